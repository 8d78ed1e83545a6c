"""From a DID to its document, as far as that goes without asking anybody (reference 8.1)."""

from __future__ import annotations

from mediatord.errors import SenderUnresolvable, SenderUnsupported
from mediatord.protocol.didcomm.did import DIDDocument, NeedsNetwork, is_did
from mediatord.protocol.didcomm.did_key import resolve_key
from mediatord.protocol.didcomm.did_peer import resolve_peer


def resolve_local(did: str) -> DIDDocument:
    """
    The document of a did:key or a did:peer of numalgo 0, 2 or 4.

    :raise NeedsNetwork: a did:web.
    :raise NeedsRecall: the short form of a did:peer:4.
    :raise SenderUnresolvable: it is malformed.
    :raise SenderUnsupported: another method, or another numalgo of did:peer.
    """
    if not is_did(did):
        raise SenderUnresolvable
    match did.split(":", 2)[1]:
        case "key":
            return resolve_key(did)
        case "peer":
            return resolve_peer(did)
        case "web":
            raise NeedsNetwork
        case _:
            raise SenderUnsupported
