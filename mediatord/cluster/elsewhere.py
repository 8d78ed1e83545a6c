"""Has other nodes push what was accepted here: finds those that hold sockets of a DID, and hints."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.cluster.hint import Hint
from mediatord.cluster.quiet import Arrivals, Quiet, Unseen
from mediatord.cluster.reminders import Reminders
from mediatord.cluster.trails import Trails
from mediatord.cluster.way import Sender, Way
from mediatord.cluster.whereabouts import Whereabouts
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.interfaces import Node, Presence, StoredMessage
from mediatord.interfaces.decentrl import PendingEvent

_log = Logger()

# Seconds that a question to the store comes after hints that did not wait for its answer: so it is in nobody's way,
# and there is one for many.
LATER = 0.05
# What may wait for the store and for other nodes to say where its sockets are: messages, events and changes of
# contracts, and bytes of their payloads, which are in memory meanwhile.
MAX_HELD = 10_000
MAX_HELD_BYTES = 67_108_864


class Told(Protocol):
    """What counts."""

    def stale_presence(self) -> None:
        """A node was said to hold sockets, and is gone or holds none."""

    def cluster_push(self, outcome: Literal["dropped"]) -> None:
        """A hint came to this end."""


@dataclass(slots=True)
class _Lane:
    """
    Hints of one DID that the store has not answered for.

    :param ways: in order.
    :param offered: boots that all of them were offered to.
    """

    ways: dict[Way, None] = field(default_factory=dict)
    offered: frozenset[str] = frozenset()

    def add(self, way: Way, nodes: Sequence[Node]) -> None:
        """:param nodes: where sockets were seen last."""
        self.ways[way] = None
        self.offer(nodes)
        way.offer(nodes)

    def offer(self, nodes: Sequence[Node]) -> None:
        """All go to these nodes, so that none is overtaken there by one that comes later."""
        boots = frozenset(node.boot for node in nodes)
        if not boots <= self.offered:
            for way in self.ways:
                way.offer(nodes)
        self.offered = boots


class Elsewhere:
    """
    What routing and delivery know of other nodes. None of its Deferreds fails.

    A hint goes at once to the nodes where sockets of its DID were seen last. The store is asked all the same, after
    what the hint is about is stored, and those that hold sockets by then and have no hint yet get one. So a socket
    that has just come, anywhere, is found as if nothing was remembered. Hints of a DID go to each node in order.

    Nobody is asked where it shows without a question that the store would say nobody again.

    :param boot: ours.
    :param arrivals: what shows that.
    """

    def __init__(
        self,
        clock: IReactorTime,
        boot: str,
        whereabouts: Whereabouts,
        sender: Sender,
        told: Told,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._clock = clock
        self._boot = boot
        self._whereabouts = whereabouts
        self._sender = sender
        self._told = told
        self._trails = Trails(clock)
        self._quiet = Quiet(arrivals or Unseen())
        self._reminders = Reminders(clock, self._remind, lambda: told.cluster_push("dropped"))
        self._lanes: dict[str, _Lane] = {}
        # Those of them that the store is yet to be asked for.
        self._ahead: list[Way] = []
        self._question: IDelayedCall | None = None
        self._over = False
        self._held = self._held_bytes = 0

    @property
    def held(self) -> tuple[int, int]:
        """Messages, events and changes that wait until it is known whether a socket took them, and their bytes."""
        return self._held, self._held_bytes

    def message(self, message: StoredMessage) -> Deferred[bool]:
        """Fires with whether a socket of another node took a message."""
        if self._quiet.holds(message.account):
            return succeed(False)
        return self._begin_if_room(Hint("messages", message.id, message.account, len(message.payload)))

    def event(self, event: PendingEvent) -> Deferred[bool]:
        """Fires with whether a socket of another node took an event."""
        if self._quiet.holds(event.recipient_did):
            return succeed(False)
        return self._begin_if_room(Hint("events", event.id, event.recipient_did, len(event.payload)))

    def contracts(self, did: str) -> Deferred[bool]:
        """
        Fires with whether a socket of another node was told that the contracts of `did` have changed. Who cannot be
        told now is told later.
        """
        hint = Hint("contracts", did, did)
        if not self._has_room(hint):
            self._reminders.owe(did, ())
            return succeed(False)
        return self._begin(Way(hint, self._sender, self._owe))

    def keep(self, live: Collection[str]) -> None:
        """
        These nodes are live.

        :param live: boots.
        """
        self._trails.keep(live)

    def end(self) -> None:
        """Wait for nothing more, and begin nothing by itself."""
        self._over = True
        self._reminders.end()
        ahead, self._ahead = self._ahead, []
        if self._question is not None:
            self._question.cancel()
            self._question = None
        for way in ahead:
            self._end(way, None)

    def _has_room(self, hint: Hint) -> bool:
        return self._held < MAX_HELD and (not self._held or self._held_bytes + hint.weight <= MAX_HELD_BYTES)

    def _begin_if_room(self, hint: Hint) -> Deferred[bool]:
        """What there is no room for waits in the store, where the catch-up round finds it."""
        if self._has_room(hint):
            return self._begin(Way(hint, self._sender))
        self._told.cluster_push("dropped")
        return succeed(False)

    def _begin(self, way: Way) -> Deferred[bool]:
        did = way.hint.lane
        self._held += 1
        self._held_bytes += way.hint.weight
        way.taken.addCallback(self._release, way.hint.weight)
        nodes = () if self._over else self._trails.recall(did)
        self._lanes.setdefault(did, _Lane()).add(way, nodes)
        if nodes:
            self._ahead.append(way)
            if self._question is None:
                self._question = self._clock.callLater(LATER, self._ask_for_those_ahead)
        else:
            self._ask(way)
        return way.taken

    def _release(self, taken: bool, weight: int) -> bool:
        """It is known now: whoever waited for that lets go of the payload."""
        self._held -= 1
        self._held_bytes -= weight
        return taken

    def _ask_for_those_ahead(self) -> None:
        self._question = None
        ahead, self._ahead = self._ahead, []
        for way in ahead:
            self._ask(way)

    def _ask(self, way: Way) -> None:
        did = way.hint.lane
        sign, found = self._quiet.sign(did), self._whereabouts.of(did)
        found.addCallbacks(self._found, self._not_found, callbackArgs=(way, sign), errbackArgs=(way,))
        found.addErrback(lambda failure: _log.failure("hinting at a message failed", without_text(failure)))

    def _found(self, places: Sequence[Presence], way: Way, sign: Hashable) -> None:
        did = way.hint.lane
        others = [place for place in places if place.boot != self._boot]
        nodes = [place.node for place in others if place.node is not None]
        stale = len(others) - len(nodes) + len(way.sent - {place.boot for place in others})
        for _ in range(stale):
            self._told.stale_presence()
        self._trails.note(did, nodes)
        if not others:
            self._quiet.note(did, sign)
        self._lanes[did].offer(nodes)
        self._end(way, nodes)

    def _not_found(self, failure: Failure, way: Way) -> None:
        """The message is in the store, and is found there when the catch-up round comes."""
        if not failure.check(StoreUnavailable):
            _log.failure("looking for sockets failed", without_text(failure))
        self._end(way, None)

    def _end(self, way: Way, nodes: Sequence[Node] | None) -> None:
        lane = self._lanes[way.hint.lane]
        del lane.ways[way]
        if not lane.ways:
            del self._lanes[way.hint.lane]
        way.end(nodes)

    def _owe(self, way: Way) -> None:
        if not way.complete:
            self._reminders.owe(way.hint.lane, way.told)

    def _remind(self, did: str, told: Collection[str]) -> None:
        if not self._has_room(Hint("contracts", did, did)):
            self._reminders.owe_still(did, told)
            return
        self._begin(Way(Hint("contracts", did, did), self._sender, self._reminded, told))

    def _reminded(self, way: Way) -> None:
        if way.complete:
            self._reminders.paid()
        else:
            self._reminders.owe_still(way.hint.lane, way.told)
