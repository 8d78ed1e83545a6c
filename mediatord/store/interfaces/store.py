"""One storage backend, and its cache of nonces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from mediatord.store.interfaces.accounts import IAccountStore
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster import MAX_CLOCK_SKEW, IClusterStore
from mediatord.store.interfaces.decentrl import IDecentrlStore
from mediatord.store.interfaces.messages import AcknowledgementResult, IMessageStore

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
    "full": "store full: only reading and deleting",
}


class StoreUnusable(Exception):
    """The store can be reached but must not be used; the text is one line for the operator."""


class IStore(IMessageStore, IAccountStore, INonceCache):
    """
    One storage backend. Times are seconds since the epoch. Every Deferred may fail with StoreUnavailable; then
    nothing was stored.
    """

    decentrl: IDecentrlStore = Attribute("Storage of the Decentrl half, open as long as this.")
    cluster: IClusterStore = Attribute("State that processes share, open as long as this.")
    administration: IStoreAdministration = Attribute("Listings and removals for the operator, open as long as this.")
    trouble: str = Attribute("The fault of the store, for the operator; empty when there is none.")

    def open() -> Deferred[None]:
        """
        Open the store. Every message that was `delivered` by a node that is not live, or by no named node, becomes
        `pending`.

        :raise StoreUnavailable: it could not be opened (the reason is logged).
        :raise StoreUnusable: it must not be used as it is, and another try does not help.
        """

    def close() -> Deferred[None]:
        """Finish operations that were begun, and disconnect. Later calls fail with StoreUnavailable."""

    def acknowledge_once(
        account: str, ids: Sequence[str], key: bytes, until: float, share: float = 1.0, *, with_status: bool = False
    ) -> Deferred[AcknowledgementResult | None]:
        """
        Claim a nonce as :meth:`~INonceCache.claim_nonce`, and if it was new, acknowledge as
        :meth:`~mediatord.store.interfaces.messages.IMessageStore.acknowledge`; where the backend can, in one
        transaction. Fires with None if the nonce was claimed before; then nothing was removed.

        :param with_status: whether the result has the status of all queues of the account, as after that, unless that
            cannot be read.
        :raise ReplayCacheFull: as :meth:`~INonceCache.claim_nonce`; nothing was removed.
        """

    def table_sizes() -> Deferred[dict[str, int]]:
        """
        Bytes of each table or collection with its indexes, as far as they can be measured quickly.

        :raise StoreUnavailable: the backend does not answer.
        """

    def ping() -> Deferred[None]:
        """Make a round trip to the backend; fails with StoreUnavailable when it does not answer."""
