"""One storage backend: accounts of DIDComm wallets with their recipient DIDs, and the cache of nonces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import Attribute, Interface

from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW, IClusterStore
from mediatord.store.interfaces.decentrl import IDecentrlStore
from mediatord.store.interfaces.devices import IDeviceStore
from mediatord.store.interfaces.messages import IMessageStore
from mediatord.store.interfaces.v1_connections import IV1ConnectionStore

RecipientUpdateAction = Literal["add", "remove"]
# Seconds after its creation during which contact does not show that an account is used.
FIRST_DAY_SECONDS = 86_400.0

ExpiryReason = Literal["unused", "idle"]
RecipientUpdateResult = Literal["success", "no_change", "client_error", "server_error"]


@dataclass(frozen=True, slots=True)
class Account:
    """
    A wallet with a mediation grant (reference section 12).

    :param did: its DID; a did:peer:4 stands in its short form.
    :param draft03: whether it has been seen to use ECDH-1PU draft 03 and cannot read the later one (1.10).
    :param seen_at: last authenticated contact, as far as that was recorded (:meth:`IAccountStore.record_contact`).
    """

    did: str
    created_at: float
    draft03: bool = False
    seen_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ExpiredAccount:
    """
    An account that was removed because it was not used.

    :param recipients: number of recipient names that it had registered.
    """

    did: str
    recipients: int
    reason: ExpiryReason


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """
    Storage that all accounts and registrations take.

    :param accounts: number of DIDComm accounts.
    :param bytes: approximate size of account DIDs, including retired ones, their long forms, recipient DIDs and the
        text of Decentrl registrations; with MongoDB the size of the documents.
    """

    accounts: int
    bytes: int


class IAccountStore(Interface):
    """
    Accounts and the recipient DIDs that they have registered.

    A recipient DID has one owner, whichever of its forms or DID URLs names it
    (:mod:`mediatord.protocol.canonical_did`). A `recipient_did` may be any of them; the canonical form is found
    fastest. DIDs of accounts are compared literally: callers pass the canonical form.
    """

    def get_account(did: str) -> Deferred[Account | None]:
        """The account of this DID, if it has a grant."""

    def grant(did: str) -> Deferred[Account]:
        """
        The account of this DID, created if there is none.

        :raise MediationNotGranted: the DID is retired (:meth:`move_account`).
        """

    def record_contact(did: str) -> Deferred[None]:
        """Record authenticated contact of this account now. Once a day is enough."""

    def expire_accounts(
        limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        """
        Remove at most `limit` accounts with all that they have registered; never one with queued messages.

        :param unused_before: remove those created before this time for which no message was ever accepted, and
            without contact after their first day; None for none.
        :param idle_before: remove those with the last contact before this time; None for none.
        """

    def get_account_usage() -> Deferred[AccountUsage]:
        """Storage that all accounts take. Cheap: called every few seconds."""

    def mark_draft03(did: str) -> Deferred[None]:
        """Record that this account reads and writes ECDH-1PU draft 03 only."""

    def find_owner(recipient_did: str) -> Deferred[str | None]:
        """DID of the account that has registered this recipient DID. Cheap: called for every forward."""

    def list_spellings(recipient_did: str) -> Deferred[list[str]]:
        """
        Spellings under which the owner has registered this DID, in order of registration; empty if there is no owner.
        """

    def get_buffered() -> tuple[int, int]:
        """Number of operations that are queued in memory, and the bytes that they hold."""

    def update_recipients(
        account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        """
        Apply updates in order, with one result each (reference 5.3): `success`; `no_change` for what is already so,
        and for the removal of a DID that the account has not registered; `client_error` for a DID of another account,
        or one too many.

        An account may register several names of one DID, which is registered until the last of them is removed. After
        a removal queued messages stay for this account until they are acknowledged or expire.
        """

    def list_recipients(account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        """A slice of the names that the account has registered, in order of registration, and the number of all."""

    def move_account(prior: str, new: str) -> Deferred[bool]:
        """
        Move the account of `prior`, with all it has, to `new`, after which `prior` is retired (`from_prior`,
        reference 2.3). Fires with False, and changes nothing, when `prior` has no account or `new` has one.
        """

    def is_retired(did: str) -> Deferred[bool]:
        """Whether an account was moved away from this DID (:meth:`move_account`)."""

    def remember_did(short: str, long: str) -> Deferred[None]:
        """Store the long form of a did:peer:4, so that its short form resolves from now on."""

    def recall_did(short: str) -> Deferred[str | None]:
        """The stored long form of a did:peer:4, if there is one."""


# Seconds for which a claim is kept after it has expired: the clock of the process that prunes may be ahead, and that
# of the process that claims next behind, by the allowed skew each.
NONCE_GRACE_SECONDS = 2 * MAX_CLOCK_SKEW + 1.0


class INonceCache(Interface):
    """
    Nonces that were received before, kept through a restart where the backend can. The cache is bounded: when it is
    full no nonce is claimed, and those that are there stay, so that nobody can displace a claim by making others.
    """

    def claim_nonce(key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        """
        Insert a nonce unless it is present, atomically; fires with whether it was new.

        :param until: when it counts as not present again, by the clock of the claiming process.
        :param share: share of the capacity that may be in use already.
        :raise ReplayCacheFull: it is new, and more is in use; expired nonces count until they are pruned. Nodes of a
            cluster may notice that with a short delay.
        """

    def release_nonce(key: bytes) -> Deferred[None]:
        """Remove a claim, because the operation that it guards was not performed."""

    def prune_nonces() -> Deferred[int]:
        """Remove nonces that expired :data:`NONCE_GRACE_SECONDS` seconds ago; fires with their number."""


# What may be wrong with a store, the worst first; `missing` and `damaged` occur only with a file.
StoreFault = Literal["missing", "damaged", "full"]
STORE_FAULTS: tuple[StoreFault, ...] = ("missing", "damaged", "full")
# What an operator is told.
STORE_FAULT_MESSAGES: dict[StoreFault, str] = {
    "missing": "store unavailable: the database file was removed, renamed or replaced",
    "damaged": "store unavailable: the database is damaged",
    "full": "store full: only reads and deletions succeed",
}


_log = Logger(namespace="mediatord.store")


def log_store_fault(what: str, error: BaseException | None) -> None:
    """Log a failure by the kind of error only: its text may contain stored data."""
    code = getattr(error, "sqlite_errorname", None)
    _log.error("{what}: {error} {code}", event="store.failed", what=what, error=type(error).__name__, code=code)


# Called with the name and duration of an operation, in seconds.
OperationObserver = Callable[[str, float], None]


def ignore_observation(_operation: str, _seconds: float, /) -> None:
    """An :data:`OperationObserver` that does nothing."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one batch, and of the operations that are queued for batches."""

    batch: int = 512
    batch_bytes: int = 8_388_608
    waiting: int = 20_000
    waiting_bytes: int = 134_217_728


class StoreUnusable(Exception):
    """The store can be reached but must not be used; the text is one line for the operator."""


class IStore(IMessageStore, IAccountStore, INonceCache):
    """
    One storage backend. Times are seconds since the epoch. Every Deferred may fail with StoreUnavailable; then
    nothing was stored.
    """

    decentrl: IDecentrlStore = Attribute("Storage for Decentrl, open as long as this.")
    cluster: IClusterStore = Attribute("State that processes share, open as long as this.")
    devices: IDeviceStore = Attribute("Devices that push services can wake, open as long as this.")
    v1_connections: IV1ConnectionStore = Attribute("Connections of DIDComm v1, open as long as this.")
    administration: IStoreAdministration = Attribute("Listings and removals for the operator, open as long as this.")
    fault_description: str = Attribute("The fault of the store, for the operator; empty when there is none.")

    def open() -> Deferred[None]:
        """
        Open the store. Every message that was `delivered` by a node that is not live, or by no named node, becomes
        `pending`.

        :raise StoreUnavailable: it could not be opened (the reason is logged).
        :raise StoreUnusable: it must not be used as it is, and another try does not help.
        """

    def close() -> Deferred[None]:
        """Finish operations that were begun, and disconnect. Later calls fail with StoreUnavailable."""

    def table_sizes() -> Deferred[dict[str, int]]:
        """
        Bytes of each table or collection with its indexes, as far as they can be measured quickly.

        :raise StoreUnavailable: the backend does not answer.
        """

    def ping() -> Deferred[None]:
        """Make a round trip to the backend; fails with StoreUnavailable when it does not answer."""
