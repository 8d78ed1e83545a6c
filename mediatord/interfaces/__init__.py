"""
The seams: what storage and resolution promise, and the values that cross them.

Times are seconds since the epoch as float. Every Deferred may fail with
:class:`~mediatord.errors.StoreUnavailable`; then nothing was stored.
"""

from mediatord.interfaces.accounts import Account, Action, IAccountStore, UpdateResult
from mediatord.interfaces.cluster import (
    CLOCKS_APART,
    ClockDiffers,
    ClusterIdentityDiffers,
    ClusterRefused,
    ClusterSecretDiffers,
    IClusterStore,
    Node,
    NodeNameTaken,
    Presence,
)
from mediatord.interfaces.messages import (
    Arrival,
    Backlog,
    Books,
    Cohort,
    Deposit,
    Deposited,
    EarlyOutcomes,
    Form,
    IMessageStore,
    Ledger,
    LongQueue,
    Payload,
    QueueLimits,
    QueueStatus,
    Reason,
    Removed,
    Status,
    StoredMessage,
    Waiting,
    WhenFull,
    Window,
)
from mediatord.interfaces.nonces import KEPT_BEYOND, INonceCache
from mediatord.interfaces.resolver import IResolver
from mediatord.interfaces.store import IStore, StoreRefused

__all__ = [
    "CLOCKS_APART",
    "KEPT_BEYOND",
    "Account",
    "Action",
    "Arrival",
    "Backlog",
    "Books",
    "ClockDiffers",
    "ClusterIdentityDiffers",
    "ClusterRefused",
    "ClusterSecretDiffers",
    "Cohort",
    "Deposit",
    "Deposited",
    "EarlyOutcomes",
    "Form",
    "IAccountStore",
    "IClusterStore",
    "IMessageStore",
    "INonceCache",
    "IResolver",
    "IStore",
    "Ledger",
    "LongQueue",
    "Node",
    "NodeNameTaken",
    "Payload",
    "Presence",
    "QueueLimits",
    "QueueStatus",
    "Reason",
    "Removed",
    "Status",
    "StoreRefused",
    "StoredMessage",
    "UpdateResult",
    "Waiting",
    "WhenFull",
    "Window",
]
