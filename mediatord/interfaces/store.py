"""One backend, with all that is kept."""

from __future__ import annotations

from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Attribute

from mediatord.interfaces.accounts import IAccountStore
from mediatord.interfaces.cluster import IClusterStore
from mediatord.interfaces.decentrl import IDecentrlStore
from mediatord.interfaces.messages import IMessageStore
from mediatord.interfaces.nonces import INonceCache

# What may be wrong with a store, the worst first; `missing` and `damaged` occur only with a file.
Fault = Literal["missing", "damaged", "full"]
FAULTS: tuple[Fault, ...] = ("missing", "damaged", "full")
# What an operator is told.
FAULT_MESSAGES: dict[Fault, str] = {
    "missing": "store unavailable: the database file was removed, renamed or replaced",
    "damaged": "store unavailable: the database is damaged",
    "full": "store full: only reading and deleting",
}


class StoreRefused(Exception):
    """The store can be reached but must not be used; the text is one line for the operator."""


class IStore(IMessageStore, IAccountStore, INonceCache):
    """One backend."""

    decentrl: IDecentrlStore = Attribute("What the Decentrl half keeps, in the same place and open as long as this.")
    cluster: IClusterStore = Attribute("What processes that share this store know of each other, open as long.")
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

    def table_sizes() -> Deferred[dict[str, int]]:
        """
        Bytes of each table or collection with its indexes, as far as that can be found out quickly.

        :raise StoreUnavailable: it cannot be asked.
        """

    def ping() -> Deferred[None]:
        """Really ask the backend; fails with StoreUnavailable when it does not answer."""
