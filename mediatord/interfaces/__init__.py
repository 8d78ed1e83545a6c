"""
The seams: what storage and resolution promise, and the values that cross them.

Times are seconds since the epoch as float. Every Deferred may fail with
:class:`~mediatord.errors.StoreUnavailable`; then nothing was stored.
"""

from mediatord.interfaces.accounts import Account, Action, IAccountStore, UpdateResult
from mediatord.interfaces.messages import (
    Deposit,
    Deposited,
    Form,
    IMessageStore,
    Payload,
    QueueLimits,
    QueueStatus,
    Reason,
    Removed,
    Status,
    StoredMessage,
)
from mediatord.interfaces.nonces import INonceCache
from mediatord.interfaces.resolver import IResolver
from mediatord.interfaces.store import IStore

__all__ = [
    "Account",
    "Action",
    "Deposit",
    "Deposited",
    "Form",
    "IAccountStore",
    "IMessageStore",
    "INonceCache",
    "IResolver",
    "IStore",
    "Payload",
    "QueueLimits",
    "QueueStatus",
    "Reason",
    "Removed",
    "Status",
    "StoredMessage",
    "UpdateResult",
]
