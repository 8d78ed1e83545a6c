"""What an operator lists and removes: queues, their entries without payloads, accounts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from mediatord.store.interfaces.messages import RemovedMessage

QueueProtocol = Literal["didcomm", "decentrl"]
AccountProtocol = Literal["didcomm", "didcomm_v1"]
QUEUE_PROTOCOLS: tuple[QueueProtocol, ...] = ("didcomm", "decentrl")
# Called with entries that a purge has removed although it had failed with an unknown outcome.
LatePurgeListener = Callable[[QueueProtocol, Sequence[RemovedMessage]], None]
# Most rows that one call returns, and most entries that one transaction removes.
MAX_ROWS = 1_000
MAX_PURGE_BATCH = 100


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """
    One queue that is not empty.

    :param account: DID of the account that the recipient belongs to; the recipient itself with Decentrl.
    :param oldest_at: arrival of the first entry, seconds; None if that was removed meanwhile.
    """

    protocol: QueueProtocol
    did: str
    account: str
    messages: int
    bytes: int
    oldest_at: float | None


@dataclass(frozen=True, slots=True)
class QueueListTotals:
    """Number and content of all queues."""

    queues: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """
    One message or pending event, without its payload.

    :param expires_at: None for events, which wait until they are acknowledged.
    :param due_at: when a delayed message becomes visible; None when it is not delayed.
    :param pushes: number of pushes; 0 for events, whose pushes are not counted.
    """

    protocol: QueueProtocol
    id: str
    did: str
    account: str
    size: int
    received_at: float
    expires_at: float | None = None
    status: str = "pending"
    pushes: int = 0
    due_at: float | None = None


@dataclass(frozen=True, slots=True)
class EntryPage:
    """:param after: cursor of the next page; None after the last one."""

    entries: list[QueuedMessage]
    after: str | None


@dataclass(frozen=True, slots=True)
class DIDPage:
    """:param after: cursor of the next page; None after the last one."""

    dids: list[str]
    after: str | None


@dataclass(frozen=True, slots=True)
class AccountSummary:
    """
    An account with the size of its queues.

    :param seen_at: last authenticated contact, to a day.
    :param used: whether a message was ever accepted for it, or there was contact after its first day.
    :param recipients: number of names that it has registered.
    :param protocol: `didcomm_v1` if its wallet has connected with DIDComm v1.
    :param connected_at: when it did; None for others.
    """

    did: str
    created_at: float
    seen_at: float
    used: bool
    recipients: int
    messages: int
    bytes: int
    protocol: AccountProtocol = "didcomm"
    connected_at: float | None = None


class IStoreAdministration(Interface):
    """
    Listings in pages of at most :data:`MAX_ROWS`, and removals in bounded transactions.

    All Deferreds fail with StoreUnavailable when the store does not answer.
    """

    on_late_purge: LatePurgeListener = Attribute("Called when the outcome of a failed purge becomes known.")

    def list_queues(protocols: Sequence[QueueProtocol], offset: int, limit: int) -> Deferred[list[QueueInfo]]:
        """The longest queues, longest first."""

    def sum_queues(protocols: Sequence[QueueProtocol]) -> Deferred[QueueListTotals]:
        """All queues added up."""

    def list_dids(after: str, limit: int) -> Deferred[DIDPage]:
        """
        DIDs of accounts, recipients and Decentrl identities; some occur several times.

        :param after: cursor of the page before; empty for the first page.
        """

    def find_did(did: str) -> Deferred[str | None]:
        """The stored DID that this is a form or a DID URL of."""

    def list_entries(did: str, protocol: QueueProtocol, after: str, limit: int) -> Deferred[EntryPage]:
        """
        Entries of a queue in order of arrival.

        :param did: as :meth:`find_did` returns it.
        :param after: cursor of the page before; empty for the first page.
        """

    def purge(did: str, protocol: QueueProtocol, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """
        Remove entries of one queue in one transaction, counted as `removed` by the ledger; fires with those that
        were still there.

        :param ids: at most :data:`MAX_PURGE_BATCH`.
        """

    def list_accounts(offset: int, limit: int) -> Deferred[list[AccountSummary]]:
        """Accounts, newest first."""

    def count_accounts() -> Deferred[int]:
        """Number of accounts."""

    def find_account(did: str) -> Deferred[AccountSummary | None]:
        """The account with this DID, which is in its canonical form."""

    def list_queued_dids(account: str) -> Deferred[list[str]]:
        """Recipient DIDs of an account with entries, whether they are still registered or not."""

    def unregister_recipients(account: str) -> Deferred[None]:
        """Remove all registrations of an account, so that nothing more is accepted for it; entries stay."""

    def remove_account(account: str) -> Deferred[bool]:
        """Remove an account without entries; fires with whether it was removed."""
