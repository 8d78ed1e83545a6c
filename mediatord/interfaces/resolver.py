"""Finding the document of a DID."""

from __future__ import annotations

from collections.abc import Awaitable

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.protocol.didcomm.did import DIDDocument


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
