"""
Names under which an account has registered one DID, with their places in its order of registration.

Usually there is one name, the DID itself; then only its place is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mediatord.protocol.canonical_did import canonicalize_did

# Per DID: they are read and written together.
MAX_REGISTERED_NAMES = 32

# A place and a name; the DID at its beginning is left out.
StoredName = Sequence[int | str]


class RegisteredNames:
    """
    The registered names of one DID.

    :param did: in its canonical form.
    :param place: place of the first name; None when it is not registered.
    :param stored: as returned by :attr:`stored`.
    """

    def __init__(self, did: str, place: int | None, stored: Iterable[StoredName] | None = None) -> None:
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
        Add a name.

        :param name: one that is not registered.
        :param place: the next place.
        """
        self._places[name] = place

    def remove(self, name: str) -> None:
        """Remove a registered name."""
        del self._places[name]

    @property
    def spellings(self) -> list[tuple[int, str]]:
        """All names with their places, in order."""
        return sorted((place, name) for name, place in self._places.items())

    @property
    def place(self) -> int | None:
        """Place of the first name; None when there is none."""
        return min(self._places.values(), default=None)

    @property
    def stored(self) -> list[list[int | str]] | None:
        """The names as they are stored beside the place; None for the DID itself alone, or no name."""
        if not self._places.keys() - {self._did}:
            return None
        return [[place, name.removeprefix(self._did)] for place, name in self.spellings]

    def _spelling(self, stored: str) -> str:
        return stored if stored.startswith("did:") else self._did + stored


def export_names(did: str, place: int | None, stored: Iterable[StoredName] | None) -> tuple[tuple[int, str], ...]:
    """Names as in a backup record: complete, and none where the DID is the only one."""
    return () if stored is None else tuple(RegisteredNames(did, place, stored).spellings)


def import_names(did: str, place: int | None, names: Iterable[tuple[int, str]]) -> RegisteredNames:
    """
    Names from a backup record.

    :param did: in any form; it is the only name if there are no others.
    """
    found = RegisteredNames(canonicalize_did(did), None)
    for at, name in tuple(names) or (() if place is None else ((place, did),)):
        found.add(name, at)
    return found


def slice_names(recipients: Iterable[RegisteredNames], offset: int, limit: int) -> list[str]:
    """
    A slice of names in order of registration.

    :param recipients: at least the first `offset + limit` of an account by their places.
    """
    spellings = sorted(one for recipient in recipients for one in recipient.spellings)
    return [name for _, name in spellings[offset : offset + limit]]
