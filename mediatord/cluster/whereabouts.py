"""Asks the store who holds sockets of a DID."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.faults import without_text
from mediatord.interfaces import IClusterStore, Presence

_log = Logger()

# DIDs of one question to the store, and such questions at the same time.
CHUNK = 500
AT_ONCE = 4


class Whereabouts:
    """
    Asks the store who holds sockets of a DID, for all that comes in one turn of the reactor together.

    Answers for one DID come in the order of the questions.
    """

    def __init__(self, clock: IReactorTime, store: IClusterStore) -> None:
        self._clock = clock
        self._store = store
        self._wanted: dict[str, list[Deferred[list[Presence]]]] = {}
        self._asked: set[str] = set()
        self._asking = 0
        self._begin: IDelayedCall | None = None

    def of(self, did: str) -> Deferred[list[Presence]]:
        """
        All that is known of a DID.

        :raise StoreUnavailable: that cannot be known.
        """
        found: Deferred[list[Presence]] = Deferred()
        self._wanted.setdefault(did, []).append(found)
        self._arm()
        return found

    def _arm(self) -> None:
        if self._wanted and self._begin is None and self._asking < AT_ONCE:
            self._begin = self._clock.callLater(0, self._ask)

    def _ask(self) -> None:
        self._begin = None
        while self._asking < AT_ONCE:
            dids = list(islice((did for did in self._wanted if did not in self._asked), CHUNK))
            if not dids:
                break
            self._asked.update(dids)
            waiting = {did: self._wanted.pop(did) for did in dids}
            self._asking += 1
            asked = self._store.whereabouts(dids)
            asked.addBoth(self._answered, waiting)
            asked.addErrback(lambda failure: _log.failure("looking for sockets failed", without_text(failure)))

    def _answered(self, found: object, waiting: dict[str, list[Deferred[list[Presence]]]]) -> None:
        self._asking -= 1
        self._asked.difference_update(waiting)
        self._arm()
        if not isinstance(found, list):
            for one in _all(waiting.values()):
                one.errback(found)  # type: ignore[arg-type]  # a Failure
            return
        places: dict[str, list[Presence]] = {did: [] for did in waiting}
        for place in found:
            places[place.did].append(place)
        for did, deferreds in waiting.items():
            for one in deferreds:
                one.callback(places[did])


def _all(groups: Iterable[list[Deferred[list[Presence]]]]) -> Iterable[Deferred[list[Presence]]]:
    return (one for group in groups for one in group)
