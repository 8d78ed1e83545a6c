"""One backend, with all that is kept."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from zope.interface import Attribute

from mediatord.interfaces.accounts import IAccountStore
from mediatord.interfaces.decentrl import IDecentrlStore
from mediatord.interfaces.messages import IMessageStore
from mediatord.interfaces.nonces import INonceCache


class IStore(IMessageStore, IAccountStore, INonceCache):
    """One backend."""

    decentrl: IDecentrlStore = Attribute("What the Decentrl half keeps, in the same place and open as long as this.")

    def open() -> Deferred[None]:
        """
        Make ready; every `delivered` message becomes `pending`.

        :raise StoreUnavailable: it could not be opened (the reason is logged).
        """

    def close() -> Deferred[None]:
        """Finish what was begun, then let go. Later calls fail with StoreUnavailable."""

    def ping() -> Deferred[None]:
        """Really ask the backend; fails with StoreUnavailable when it does not answer."""
