"""
Tests of the interfaces in `mediatord.store.interfaces`, which every backend must pass.

A backend's test cases are `class XTests(XBackend, EnqueueContract, TestCase)` and so on, one for each mixin, where
`XBackend` has the methods `make_store` and `make_second_store`, and `pass_time` where leases run on a server's clock.
"""

from tests.store.contract.accounts import AccountContract, AccountExpiryContract
from tests.store.contract.administration import AdministrationContract
from tests.store.contract.backlog import BacklogContract
from tests.store.contract.base import StoreContract
from tests.store.contract.cluster import ClusterContract, ClusterIdentityContract, LeaderLeaseContract
from tests.store.contract.cluster_base import ClusterStoreContract
from tests.store.contract.cluster_presence import ClusterDeliveryContract, ClusterPresenceContract
from tests.store.contract.decentrl_archive import DecentrlArchiveCapContract, DecentrlTagContract
from tests.store.contract.decentrl_base import DecentrlContract
from tests.store.contract.decentrl_contracts import DecentrlCommunicationContract, DecentrlRegistrationContract
from tests.store.contract.decentrl_event_lookup import DecentrlEventLookupContract
from tests.store.contract.decentrl_events import DecentrlEventContract, DecentrlFilterContract
from tests.store.contract.decentrl_guards import DecentrlGuardContract
from tests.store.contract.decentrl_lifecycle import DecentrlLifecycleContract
from tests.store.contract.decentrl_pending import DecentrlDeliveryContract, DecentrlPendingContract
from tests.store.contract.decentrl_public import DecentrlPublicContract
from tests.store.contract.decentrl_requests import DecentrlRequestContract
from tests.store.contract.devices import (
    DeviceContract,
    DeviceStoreContract,
    OwedWakeupContract,
    WakeupContract,
)
from tests.store.contract.enqueue import EnqueueContract
from tests.store.contract.fair_share import (
    FairShareContract,
    FairShareRefusalContract,
    NoFairShareContract,
    RefusalContract,
    SenderReserveContract,
    SenderReserveRefusalContract,
)
from tests.store.contract.ledger import DecentrlLedgerContract, LedgerContract
from tests.store.contract.lifecycle import LifecycleContract
from tests.store.contract.message_lookup import MessageLookupContract
from tests.store.contract.nonce_capacity import NonceCapacityContract
from tests.store.contract.nonces import NonceContract
from tests.store.contract.pickup import PickupContract
from tests.store.contract.quotas import QuotaContract
from tests.store.contract.timing import TimingContract
from tests.store.contract.v1_connections import V1ConnectionContract

__all__ = [
    "AccountContract",
    "AccountExpiryContract",
    "AdministrationContract",
    "BacklogContract",
    "ClusterContract",
    "ClusterDeliveryContract",
    "ClusterIdentityContract",
    "ClusterPresenceContract",
    "ClusterStoreContract",
    "DecentrlArchiveCapContract",
    "DecentrlCommunicationContract",
    "DecentrlContract",
    "DecentrlDeliveryContract",
    "DecentrlEventContract",
    "DecentrlEventLookupContract",
    "DecentrlFilterContract",
    "DecentrlGuardContract",
    "DecentrlLedgerContract",
    "DecentrlLifecycleContract",
    "DecentrlPendingContract",
    "DecentrlPublicContract",
    "DecentrlRegistrationContract",
    "DecentrlRequestContract",
    "DecentrlTagContract",
    "DeviceContract",
    "DeviceStoreContract",
    "EnqueueContract",
    "FairShareContract",
    "FairShareRefusalContract",
    "LeaderLeaseContract",
    "LedgerContract",
    "LifecycleContract",
    "MessageLookupContract",
    "NoFairShareContract",
    "NonceCapacityContract",
    "NonceContract",
    "OwedWakeupContract",
    "PickupContract",
    "QuotaContract",
    "RefusalContract",
    "SenderReserveContract",
    "SenderReserveRefusalContract",
    "StoreContract",
    "TimingContract",
    "V1ConnectionContract",
    "WakeupContract",
]
