"""Which DIDs resolve here, and the keys they sign with (reference 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from mediatord.protocol.decentrl.did import parse_did

Lookup = Callable[[str, str], bytes | None]


class Directory:
    """
    Resolves `did:decentrl`, which holds its keys itself, and the mediator's own DIDs; nothing else, never over the
    network.

    :param own: the mediator's DIDs, as they are now.
    :param keys: its Ed25519 public keys, as they are now: the current one, and those that were.
    """

    def __init__(self, own: Callable[[], Collection[str]], keys: Callable[[], Sequence[bytes]]) -> None:
        self._own = own
        self._keys = keys

    def owns(self, did: str) -> bool:
        """Whether it is a DID of the mediator."""
        return did in self._own()

    def resolves(self, did: str) -> bool:
        """Whether there is a document of this DID."""
        if self.owns(did):
            return True
        try:
            parse_did(did)
        except ValueError:
            return False
        return True

    def signing_key(self, did: str, key_id: str) -> bytes | None:
        """The Ed25519 public key that has exactly this id in the document of this DID; None where there is none."""
        return self._signing_key(0, did, key_id)

    def lookups(self, dids: Collection[str]) -> Iterator[Lookup]:
        """
        What says which keys something may have been signed with: as :meth:`signing_key`, and then, if it is signed by
        the mediator, with each key that had the same id before.

        :param dids: of those who signed it.
        """
        ours = any(map(self.owns, dids))
        for number in range(len(self._keys()) if ours else 1):
            yield partial(self._signing_key, number)

    def _signing_key(self, number: int, did: str, key_id: str) -> bytes | None:
        if self.owns(did):
            return self._keys()[number] if key_id == f"{did}#signing" else None
        try:
            found = parse_did(did)
        except ValueError:
            return None
        return found.signing_key if key_id == found.signing_key_id else None
