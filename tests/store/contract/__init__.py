"""
What every backend promises (the docstrings of `mediatord.interfaces`), as tests that any of them must pass.

A backend's test cases are `class XTests(MakesX, DepositContract, TestCase)` and so on, one for each mixin, where
`MakesX` has the methods `make_store` and `a_neighbour`, and `pass_time` where leases run on a clock of a server.
"""

from tests.store.contract.accounts import AccountContract, AccountExpiryContract
from tests.store.contract.allowances import AllowanceContract
from tests.store.contract.arrivals import ArrivalContract
from tests.store.contract.backlog import BacklogContract
from tests.store.contract.cluster import ClusterContract, ClusterIdentityContract, ClusterTurnContract
from tests.store.contract.cluster_presence import ClusterDeliveryContract, ClusterPresenceContract
from tests.store.contract.decentrl_archive import DecentrlArchiveCapContract, DecentrlTagContract
from tests.store.contract.decentrl_arrivals import DecentrlArrivalContract
from tests.store.contract.decentrl_contracts import DecentrlCommunicationContract, DecentrlRegistrationContract
from tests.store.contract.decentrl_events import DecentrlEventContract, DecentrlFilterContract
from tests.store.contract.decentrl_guards import DecentrlGuardContract
from tests.store.contract.decentrl_lifecycle import DecentrlLifecycleContract
from tests.store.contract.decentrl_pending import DecentrlDeliveryContract, DecentrlPendingContract
from tests.store.contract.decentrl_public import DecentrlPublicContract
from tests.store.contract.decentrl_requests import DecentrlRequestContract
from tests.store.contract.deposits import DepositContract
from tests.store.contract.ledger import DecentrlLedgerContract, LedgerContract
from tests.store.contract.lifecycle import LifecycleContract
from tests.store.contract.nonces import NonceContract
from tests.store.contract.pickup import PickupContract
from tests.store.contract.shares import (
    NoShareContract,
    RankContract,
    RankRefusalContract,
    RefusalByShareContract,
    RefusalContract,
    ShareContract,
)
from tests.store.contract.timing import TimingContract

__all__ = [
    "AccountContract",
    "AccountExpiryContract",
    "AllowanceContract",
    "ArrivalContract",
    "BacklogContract",
    "ClusterContract",
    "ClusterDeliveryContract",
    "ClusterIdentityContract",
    "ClusterPresenceContract",
    "ClusterTurnContract",
    "DecentrlArchiveCapContract",
    "DecentrlArrivalContract",
    "DecentrlCommunicationContract",
    "DecentrlDeliveryContract",
    "DecentrlEventContract",
    "DecentrlFilterContract",
    "DecentrlGuardContract",
    "DecentrlLedgerContract",
    "DecentrlLifecycleContract",
    "DecentrlPendingContract",
    "DecentrlPublicContract",
    "DecentrlRegistrationContract",
    "DecentrlRequestContract",
    "DecentrlTagContract",
    "DepositContract",
    "LedgerContract",
    "LifecycleContract",
    "NoShareContract",
    "RankContract",
    "RankRefusalContract",
    "NonceContract",
    "PickupContract",
    "RefusalByShareContract",
    "RefusalContract",
    "ShareContract",
    "TimingContract",
]
