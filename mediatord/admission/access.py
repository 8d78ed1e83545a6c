"""Who may have an account in one half of the mediator, and whom it does not serve at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_ALL_BELOW = ":*"


class AccessList:
    """
    DIDs by name, and all DIDs below one that ends in `:*`, such as `did:web:example.com:*`. What is denied is denied,
    whatever else is allowed.

    :param spelling: one for all those of a DID that lead to the same keys; a DID is compared by it, and as it came.
    """

    def __init__(self, spelling: Callable[[str], str] = str) -> None:
        self._spelling = spelling
        self._allowed: _DIDs | None = None
        self._denied = _DIDs((), spelling)

    def change(self, allow: Iterable[str] | None, deny: Iterable[str]) -> None:
        """
        Go by other lists from now on.

        :param allow: who may have an account; None for everybody.
        :param deny: who may have none and is refused what it authenticates.
        """
        self._allowed = None if allow is None else _DIDs(allow, self._spelling)
        self._denied = _DIDs(deny, self._spelling)

    def allows(self, did: str) -> bool:
        """Whether it may have an account."""
        return not self.denies(did) and (self._allowed is None or did in self._allowed)

    def denies(self, did: str) -> bool:
        """Whether it is not served."""
        return did in self._denied


class _DIDs:
    def __init__(self, names: Iterable[str], spelling: Callable[[str], str]) -> None:
        names = list(names)
        below = [name.removesuffix(_ALL_BELOW) for name in names if name.endswith(_ALL_BELOW)]
        self._spelling = spelling
        self._exact = frozenset((*names, *map(spelling, names)))
        self._below = tuple(f"{name}:" for one in below for name in (one, spelling(one)))

    def __contains__(self, did: str) -> bool:
        if not self._exact:
            return False
        return any(one in self._exact or one.startswith(self._below) for one in (did, self._spelling(did)))
