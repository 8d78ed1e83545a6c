"""
The seams: what storage and resolution promise, and the values that cross them.

Times are seconds since the epoch as float. Every Deferred may fail with
:class:`~mediatord.errors.StoreUnavailable`; then nothing was stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.protocol.didcomm.did import DIDDocument

Form = Literal["json", "base64"]
Status = Literal["pending", "delivered"]
Reason = Literal["ttl", "fifo_count", "fifo_bytes"]
Action = Literal["add", "remove"]
UpdateResult = Literal["success", "no_change", "client_error", "server_error"]


@dataclass(frozen=True, slots=True)
class Account:
    """
    A wallet with a mediation grant (reference section 12).

    :param did: its DID; a did:peer:4 stands in its short form.
    :param draft03: whether it has been seen to use ECDH-1PU draft 03 and cannot read the later one (1.10).
    """

    did: str
    created_at: float
    draft03: bool = False


@dataclass(frozen=True, slots=True)
class Payload:
    """
    One opaque message to be queued.

    :param form: how the sender attached it, so that it can be handed over the same way (D10).
    """

    id: str
    data: bytes = field(repr=False)
    form: Form


@dataclass(frozen=True, slots=True)
class Deposit:
    """Arguments of one :meth:`IMessageStore.deposit`."""

    recipient_did: str
    payloads: tuple[Payload, ...]
    expires_at: float
    due_at: float | None = None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """
    A message waiting for its recipient (UC-021 "Message model"). The sender is never kept.

    :param recipient_did: as it was registered.
    :param account: DID of the account that the recipient DID was registered by on arrival.
    :param status: `delivered` means pushed, not yet acknowledged.
    :param due_at: before this time nobody sees it (`delay_milli`); None when not delayed.
    """

    id: str
    recipient_did: str
    account: str
    payload: bytes = field(repr=False)
    form: Form
    received_at: float
    expires_at: float
    status: Status = "pending"
    due_at: float | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """
    A message that left the queue, without its payload.

    :param size: bytes of its payload.
    :param pushes: how often it was marked delivered.
    """

    id: str
    recipient_did: str
    account: str
    size: int
    received_at: float
    pushes: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Deposited:
    """What :meth:`IMessageStore.deposit` did: the stored messages in order, and what had to make room."""

    messages: tuple[StoredMessage, ...]
    evicted: tuple[Removed, ...]


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """
    What waits (reference section 6): expired and not yet due messages are left out, pushed ones are in.

    :param oldest_received_time: None, like the newest, when nothing waits.
    """

    message_count: int
    total_bytes: int
    oldest_received_time: float | None = None
    newest_received_time: float | None = None


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Per recipient DID: at most `max_messages` and `max_bytes`; the oldest makes room (UC-021 AF-4)."""

    max_messages: int = 1000
    max_bytes: int = 67_108_864


class IMessageStore(Interface):
    """Opaque messages waiting for their recipients, in order of arrival."""

    def deposit(
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
    ) -> Deferred[Deposited]:
        """
        Append all payloads in order or none, evicting the recipient's oldest messages in the same transaction
        while it is over its :class:`QueueLimits`. Delayed messages count against them too. A newly deposited
        message is never evicted by its own deposit unless it alone is over `max_bytes`.

        Fires once everything is durable. `received_at` is the store's clock.

        :raise RecipientUnknown: nobody has registered `recipient_did` (an exact match); nothing was stored.
        """

    def deposit_all(deposits: Sequence[Deposit]) -> Deferred[list[Deposited]]:
        """
        Several deposits in order, all or none of them, as :meth:`deposit`.

        :raise RecipientUnknown: one of the DIDs is not registered; nothing was stored.
        """

    def fetch(
        account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        """
        The oldest visible messages of an account, of one of its recipient DIDs or of all (None), at most `limit`,
        and no more than fit in `max_bytes` of payload, but at least one if there is one. Changes nothing.
        """

    def status(account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        """What waits for an account, or for one of its recipient DIDs."""

    def mark_delivered(ids: Sequence[str]) -> Deferred[None]:
        """Messages that were pushed and not yet acknowledged become `delivered`; unknown ids are ignored."""

    def mark_pending(ids: Sequence[str]) -> Deferred[list[str]]:
        """Delivered messages become `pending` again (UC-021 AF-6); fires with the ids that were delivered."""

    def remove(ids: Sequence[str]) -> Deferred[list[Removed]]:
        """Remove the messages with these ids, whoever they belong to by now; unknown ids are ignored."""

    def acknowledge(account: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        """
        Remove the messages of this account with these ids, or whose payload has this lower-case hexadecimal SHA-256
        (reference 6.1). Unknown and foreign ids are ignored. Fires once that is durable.
        """

    def expire(limit: int) -> Deferred[list[Removed]]:
        """Remove at most `limit` messages whose `expires_at` has come (UC-021 AF-5)."""

    def next_due() -> Deferred[float | None]:
        """When the earliest delayed message becomes visible."""

    def take_due(limit: int) -> Deferred[list[StoredMessage]]:
        """Delayed messages, oldest due first, that have become visible since they were last asked for."""

    def queue_sizes(top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        """The `top` largest queues as (recipient DID, messages), largest first, and the sum of all others."""


class IAccountStore(Interface):
    """Accounts and the recipient DIDs they have registered. DIDs are compared as exact strings."""

    def account(did: str) -> Deferred[Account | None]:
        """The account of this DID, if it has a grant."""

    def grant(did: str) -> Deferred[Account]:
        """
        The account of this DID, made if there is none.

        :raise NotEnrolled: the DID was rotated away from (`move`).
        """

    def mark_draft03(did: str) -> Deferred[None]:
        """Remember that this account reads and writes ECDH-1PU draft 03 only."""

    def owner(recipient_did: str) -> Deferred[str | None]:
        """The DID of the account that has registered this recipient DID. Cheap: asked for every forward."""

    def update(
        account: str, updates: Sequence[tuple[str, Action]], *, max_recipients: int
    ) -> Deferred[list[UpdateResult]]:
        """
        Apply updates in order, one result each (reference 5.3): `success`; `no_change` for what already is so
        and for the removal of what is not ours; `client_error` for a DID of another account or one too many.
        On `remove` what is queued stays for this account until acknowledged or expired.
        """

    def recipients(account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        """A slice of the account's recipient DIDs in order of registration, and how many there are in all."""

    def move(prior: str, new: str) -> Deferred[bool]:
        """
        `from_prior` (reference 2.3): the account of `prior`, with all it has, becomes that of `new`, and `prior`
        is refused for good. Fires with False, changing nothing, when `prior` has no account or `new` has one.
        """

    def remember_did(short: str, long: str) -> Deferred[None]:
        """Keep the long form of a did:peer:4, so that its short form resolves from now on."""

    def recall_did(short: str) -> Deferred[str | None]:
        """The long form of a did:peer:4, if it was ever seen."""


class INonceCache(Interface):
    """What was received before, kept through a restart where the backend can. Bounded: the oldest goes first."""

    def claim(key: bytes, until: float) -> Deferred[bool]:
        """Insert unless present, atomically; fires with whether it was new. May be forgotten after `until`."""

    def release(key: bytes) -> Deferred[None]:
        """Forget a claim, because what it stood for was not done."""

    def prune() -> Deferred[int]:
        """Forget what may be forgotten; fires with how many those were."""


class IStore(IMessageStore, IAccountStore, INonceCache):
    """One backend."""

    def open() -> Deferred[None]:
        """
        Make ready; every `delivered` message becomes `pending`.

        :raise StoreUnavailable: it could not be opened (the reason is logged).
        """

    def close() -> Deferred[None]:
        """Finish what was begun, then let go. Later calls fail with StoreUnavailable."""

    def ping() -> Deferred[None]:
        """Really ask the backend; fails with StoreUnavailable when it does not answer."""


class IResolver(Interface):
    """Turns a DID into its document."""

    def resolve(did: str, peer: str | None = None) -> Deferred[DIDDocument]:
        """
        :param peer: the address on whose behalf this is done, for the limit on network lookups.
        :raise SenderUnresolvable: it does not resolve.
        :raise SenderUnsupported: the method is not one of did:key, did:peer 0/2/4, did:web.
        :raise RateLimited: too many lookups for `peer`.
        :raise StoreUnavailable: the long form of a did:peer:4 could not be looked up.
        """

    def keep(did: str) -> Awaitable[None]:
        """
        Remember the long form of a did:peer:4 whose holder has proven itself, so that the short form resolves from
        now on, also after a restart (reference 8.4). Other DIDs need no memory.
        """
