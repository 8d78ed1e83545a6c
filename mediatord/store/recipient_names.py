"""
The spellings under which an account has registered one DID, with their places in its order of registration.

Nearly always there is one, which is the DID itself, and then nothing but its place is stored.

Texts that no database takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mediatord.protocol.canonical_did import canonicalize_did

# Of one DID: they are read and written together.
MAX_RECIPIENT_NAMES = 32

# A place and a spelling; one that begins with the DID is stored without it.
StoredRecipientName = Sequence[int | str]


class RecipientNames:
    """
    :param did: in its canonical form.
    :param place: that of the first; None when it is not registered.
    :param stored: as :attr:`stored` was.
    """

    def __init__(self, did: str, place: int | None, stored: Iterable[StoredRecipientName] | None = None) -> None:
        self._did = did
        self._places: dict[str, int] = {}
        if stored is not None:
            self._places = {self._spelling(str(name)): int(at) for at, name in stored}
        elif place is not None:
            self._places = {did: place}

    @property
    def did(self) -> str:
        """In its canonical form."""
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
        """:param name: one that is not there; :param place: the next."""
        self._places[name] = place

    def remove(self, name: str) -> None:
        """:param name: one that is there."""
        del self._places[name]

    @property
    def spellings(self) -> list[tuple[int, str]]:
        """All with their places, in order."""
        return sorted((place, name) for name, place in self._places.items())

    @property
    def place(self) -> int | None:
        """That of the first; None when there is none."""
        return min(self._places.values(), default=None)

    @property
    def stored(self) -> list[list[int | str]] | None:
        """What is to be stored beside the place; None for the DID itself alone, or nothing."""
        if not self._places.keys() - {self._did}:
            return None
        return [[place, name.removeprefix(self._did)] for place, name in self.spellings]

    def _spelling(self, stored: str) -> str:
        return stored if stored.startswith("did:") else self._did + stored


def export_names(
    did: str, place: int | None, stored: Iterable[StoredRecipientName] | None
) -> tuple[tuple[int, str], ...]:
    """As a record of a transfer has them: spelled out, and none where the DID is the only one."""
    return () if stored is None else tuple(RecipientNames(did, place, stored).spellings)


def import_names(did: str, place: int | None, names: Iterable[tuple[int, str]]) -> RecipientNames:
    """
    What a record of a transfer says.

    :param did: in whatever form; it is the only name if there are no others.
    """
    found = RecipientNames(canonicalize_did(did), None)
    for at, name in tuple(names) or (() if place is None else ((place, did),)):
        found.add(name, at)
    return found


def slice_names(recipients: Iterable[RecipientNames], offset: int, limit: int) -> list[str]:
    """
    A slice of the spellings in order of registration.

    :param recipients: the first `offset + limit` of an account by their places, at least.
    """
    spellings = sorted(one for recipient in recipients for one in recipient.spellings)
    return [name for _, name in spellings[offset : offset + limit]]


def is_valid_unicode(text: str) -> bool:
    """Whether anything can be called so: what is no Unicode, as half of a surrogate pair is not, nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def filter_valid_ids(ids: Iterable[str]) -> tuple[str, ...]:
    """Distinct ids that a row can have; an invalid one would make a query for all of them fail."""
    return tuple([id_ for id_ in dict.fromkeys(ids) if id_.isascii() or is_valid_unicode(id_)])
