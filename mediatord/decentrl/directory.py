"""Which DIDs resolve here, and the keys they sign with (reference 2.2)."""

from __future__ import annotations

from collections.abc import Collection

from mediatord.protocol.decentrl.did import parse_did


class Directory:
    """
    Resolves `did:decentrl`, which holds its keys itself, and the mediator's own DIDs; nothing else, never over the
    network.

    :param own: the mediator's DIDs.
    :param key: its Ed25519 public key.
    """

    def __init__(self, own: Collection[str], key: bytes) -> None:
        self._own = frozenset(own)
        self._key = key

    def owns(self, did: str) -> bool:
        """Whether it is a DID of the mediator."""
        return did in self._own

    def resolves(self, did: str) -> bool:
        """Whether there is a document of this DID."""
        if did in self._own:
            return True
        try:
            parse_did(did)
        except ValueError:
            return False
        return True

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key that has exactly this id in the document of this DID; None where there is none."""
        if did in self._own:
            return self._key if key_id == f"{did}#signing" else None
        try:
            found = parse_did(did)
        except ValueError:
            return None
        return found.signing_key if key_id == found.signing_key_id else None
