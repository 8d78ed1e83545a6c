"""
Spellings under which an account has registered one DID, with their places in its order of registration.

Usually there is one, the DID itself; then only its place is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mediatord.protocol.canonical_did import canonicalize_did

# Per DID: they are read and written together.
MAX_REGISTERED_SPELLINGS = 32

# A place and a spelling; the DID at its beginning is left out.
StoredSpelling = Sequence[int | str]


class RegisteredSpellings:
    """
    The registered spellings of one DID.

    :param did: in its canonical form.
    :param place: place of the first spelling; None when it is not registered.
    :param stored: as returned by :attr:`stored`.
    """

    def __init__(self, did: str, place: int | None, stored: Iterable[StoredSpelling] | None = None) -> None:
        self._did = did
        self._places: dict[str, int] = {}
        if stored is not None:
            self._places = {self._spelling(str(name)): int(at) for at, name in stored}
        elif place is not None:
            self._places = {did: place}

    @property
    def did(self) -> str:
        """The DID in its canonical form."""
        return self._did

    @property
    def last(self) -> int:
        """The last place, or 0."""
        return max(self._places.values(), default=0)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, name: str, place: int) -> None:
        """
        Add a spelling.

        :param name: one that is not registered.
        :param place: the next place.
        """
        self._places[name] = place

    def remove(self, name: str) -> None:
        """Remove a registered spelling."""
        del self._places[name]

    @property
    def spellings(self) -> list[tuple[int, str]]:
        """All spellings with their places, in order."""
        return sorted((place, name) for name, place in self._places.items())

    @property
    def place(self) -> int | None:
        """Place of the first spelling; None when there is none."""
        return min(self._places.values(), default=None)

    @property
    def stored(self) -> list[list[int | str]] | None:
        """The spellings as they are stored beside the place; None for the DID itself alone, or none."""
        if not self._places.keys() - {self._did}:
            return None
        return [[place, name.removeprefix(self._did)] for place, name in self.spellings]

    def _spelling(self, stored: str) -> str:
        return stored if stored.startswith("did:") else self._did + stored


def export_spellings(
    did: str, place: int | None, stored: Iterable[StoredSpelling] | None
) -> tuple[tuple[int, str], ...]:
    """Spellings as in a backup record: complete, and none where the DID is the only one."""
    return () if stored is None else tuple(RegisteredSpellings(did, place, stored).spellings)


def import_spellings(did: str, place: int | None, names: Iterable[tuple[int, str]]) -> RegisteredSpellings:
    """
    Spellings from a backup record.

    :param did: in any form; it is the only spelling if there are no others.
    """
    found = RegisteredSpellings(canonicalize_did(did), None)
    for at, name in tuple(names) or (() if place is None else ((place, did),)):
        found.add(name, at)
    return found


def slice_spellings(recipients: Iterable[RegisteredSpellings], offset: int, limit: int) -> list[str]:
    """
    A slice of spellings in order of registration.

    :param recipients: at least the first `offset + limit` of an account by their places.
    """
    spellings = sorted(one for recipient in recipients for one in recipient.spellings)
    return [name for _, name in spellings[offset : offset + limit]]
