"""Has other nodes push what was accepted here: finds those that hold sockets of a DID, and hints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.cluster.hint import Hint
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.interfaces import IClusterStore, Node, Presence, StoredMessage
from mediatord.interfaces.decentrl import PendingEvent

_log = Logger()

# DIDs of one question to the store, and such questions at the same time.
CHUNK = 500
AT_ONCE = 4


class Sender(Protocol):
    """What takes hints for other nodes."""

    def put(self, node: Node, hint: Hint) -> Deferred[bool]:
        """Fires with whether a socket of that node took it; never fails."""


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


class Elsewhere:
    """
    What routing and delivery know of other nodes. None of its Deferreds fails.

    :param boot: ours.
    :param stale: told of each record of a node that is gone.
    """

    def __init__(self, boot: str, whereabouts: Whereabouts, sender: Sender, stale: Stale) -> None:
        self._boot = boot
        self._whereabouts = whereabouts
        self._sender = sender
        self._stale = stale

    def message(self, message: StoredMessage) -> Deferred[bool]:
        """Fires with whether a socket of another node took a message."""
        return self._hint(Hint("messages", message.id, message.account, len(message.payload)))

    def event(self, event: PendingEvent) -> Deferred[bool]:
        """Fires with whether a socket of another node took an event."""
        return self._hint(Hint("events", event.id, event.recipient_did, len(event.payload)))

    def contracts(self, did: str) -> Deferred[bool]:
        """Fires with whether a socket of another node was told that the contracts of `did` have changed."""
        return self._hint(Hint("contracts", did, did))

    def _hint(self, hint: Hint) -> Deferred[bool]:
        taken = Deferred.fromCoroutine(self._tell(hint))
        taken.addErrback(_not_taken)
        return taken

    async def _tell(self, hint: Hint) -> bool:
        places = await self._whereabouts.of(hint.lane)
        taken: Sequence[bool] = await gatherResults([self._sender.put(node, hint) for node in self._live(places)])
        return any(taken)

    def _live(self, places: Iterable[Presence]) -> Iterable[Node]:
        for place in places:
            if place.boot == self._boot:
                continue
            if place.node is None:
                self._stale.stale_presence()
            else:
                yield place.node


class Stale(Protocol):
    """What counts stale records."""

    def stale_presence(self) -> None:
        """The node is gone, and its record not yet."""


def _all(groups: Iterable[list[Deferred[list[Presence]]]]) -> Iterable[Deferred[list[Presence]]]:
    return (one for group in groups for one in group)


def _not_taken(failure: object) -> bool:
    """The message is in the store, and is found there when the catch-up round comes."""
    if not failure.check(StoreUnavailable):  # type: ignore[attr-defined]  # a Failure
        _log.failure("hinting at a message failed", without_text(failure))  # type: ignore[arg-type]
    return False
