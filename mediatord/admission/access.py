"""Who may have an account in one half of the mediator, and whom it does not serve at all."""

from __future__ import annotations

from collections.abc import Iterable

from mediatord.protocol.canonical_did import canonical_did, did_digest

_ALL_BELOW = ":*"


class AccessList:
    """
    DIDs by name, and all DIDs below one that ends in `:*`, such as `did:web:example.com:*`. What is denied is denied,
    whatever else is allowed. A DID is meant in all its forms (:mod:`mediatord.protocol.canonical_did`).
    """

    def __init__(self) -> None:
        self._allowed: _DIDs | None = None
        self._denied = _DIDs(())

    def change(self, allow: Iterable[str] | None, deny: Iterable[str]) -> None:
        """
        Go by other lists from now on.

        :param allow: who may have an account; None for everybody.
        :param deny: who may have none and is refused what it authenticates.
        """
        self._allowed = None if allow is None else _DIDs(allow)
        self._denied = _DIDs(deny)

    def allows(self, did: str) -> bool:
        """Whether it may have an account."""
        return not self.denies(did) and (self._allowed is None or did in self._allowed)

    def denies(self, did: str) -> bool:
        """Whether it is not served."""
        return did in self._denied


class _DIDs:
    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        below = [name.removesuffix(_ALL_BELOW) for name in names if name.endswith(_ALL_BELOW)]
        self._exact = frozenset(did_digest(name) for name in names if not name.endswith(_ALL_BELOW))
        self._below = tuple(f"{name}:" for one in below for name in (one, canonical_did(one)))

    def __contains__(self, did: str) -> bool:
        if self._below and any(one.startswith(self._below) for one in (did, canonical_did(did))):
            return True
        return bool(self._exact) and did_digest(did) in self._exact
