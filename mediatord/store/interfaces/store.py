"""
What both halves were sent before.

One backend, with all that is kept.
"""

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

# Seconds for which a claim is kept beyond its time. Whoever prunes may be ahead of whoever is asked next: each clock
# may be off by as much as is allowed, one this way and one that way.
NONCE_GRACE_SECONDS = 2 * MAX_CLOCK_SKEW + 1.0


class INonceCache(Interface):
    """
    What was received before, kept through a restart where the backend can. Bounded: where there is no room nothing is
    claimed, and what is there stays, so that nobody can have a claim forgotten by making others.
    """

    def claim_nonce(key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        """
        Insert unless present, atomically; fires with whether it was new.

        :param until: from then on, by the clock of whoever claims it again, it counts as not present.
        :param share: of all the room there is, how much may be taken already, whoever took it.
        :raise ReplayCacheFull: it would be new, and more is taken; those that are over count until they are pruned.
            Nodes of a cluster may notice that a little late.
        """

    def release_nonce(key: bytes) -> Deferred[None]:
        """Forget a claim, because what it stood for was not done."""

    def prune_nonces() -> Deferred[int]:
        """Forget what was over :data:`NONCE_GRACE_SECONDS` seconds ago; fires with how many those were."""


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
    """One backend."""

    decentrl: IDecentrlStore = Attribute("What the Decentrl half keeps, in the same place and open as long as this.")
    cluster: IClusterStore = Attribute("What processes that share this store know of each other, open as long.")
    administration: IStoreAdministration = Attribute("Listings and removals for the operator, open as long as this.")
    trouble: str = Attribute("What is wrong with it, as far as it knows, for the operator; empty when nothing is.")

    def open() -> Deferred[None]:
        """
        Make ready; every message that was `delivered` by a node that is not live becomes `pending`, and so does every
        one that was delivered by no node of a name.

        :raise StoreUnavailable: it could not be opened (the reason is logged).
        :raise StoreRefused: it must not be used as it is, and trying again does not help.
        """

    def close() -> Deferred[None]:
        """Finish what was begun, then let go. Later calls fail with StoreUnavailable."""

    def acknowledge_once(
        account: str, ids: Sequence[str], key: bytes, until: float, share: float = 1.0, *, with_status: bool = False
    ) -> Deferred[AcknowledgementResult | None]:
        """
        Claim a nonce as :meth:`~INonceCache.claim_nonce`, and if it was new, acknowledge as
        :meth:`~mediatord.store.interfaces.messages.IMessageStore.acknowledge`; where the backend can, in one
        transaction. Fires with None if the nonce was claimed before; then nothing was removed.

        :param with_status: whether the result has the status of all queues of the account, as after that.
        :raise ReplayCacheFull: as :meth:`~INonceCache.claim_nonce`; nothing was removed.
        """

    def table_sizes() -> Deferred[dict[str, int]]:
        """
        Bytes of each table or collection with its indexes, as far as that can be found out quickly.

        :raise StoreUnavailable: it cannot be asked.
        """

    def ping() -> Deferred[None]:
        """Really ask the backend; fails with StoreUnavailable when it does not answer."""
