"""The time that all work on one request may take together, and who has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from math import inf
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.sealing import Sealing
from mediatord.cluster.secret import derive
from mediatord.cluster.serving import Serving
from mediatord.deadline import PATIENCE, not_counted, on_its_own, one_request, request_began, time_left
from mediatord.didcomm.exchange import Origin
from mediatord.didcomm.marks import MARK_SECONDS
from tests.citizens import Citizen
from tests.house import NOW, PEER, Guest, House, sealed_forward

# A time after all others, which is what is said to be the beginning where there is no request.
NONE = inf


class DeadlineTests(SynchronousTestCase):
    """The clock is at 0 when the request begins."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.seen: list[float] = []

    def look(self) -> None:
        """Note what is known here of the request."""
        self.seen.append(request_began(NONE))

    async def later(self, seconds: float) -> None:
        """Look now and in some time."""
        self.look()
        await deferLater(self.clock, seconds, lambda: None)
        self.look()

    def test_shared(self) -> None:
        """All that a request waits for knows when it began, however deep and late; another one has its own time."""

        async def work() -> None:
            with one_request(self.clock):
                await self.later(1.0)
                await Deferred.fromCoroutine(self.later(1.0))
            self.look()

        first = Deferred.fromCoroutine(work())
        self.clock.advance(0.5)
        second = Deferred.fromCoroutine(work())
        self.look()
        self.clock.pump([0.5] * 4)
        self.assertEqual(self.seen, [0.0, 0.5, NONE, 0.0, 0.0, 0.5, 0.5, 0.0, NONE, 0.5, NONE])
        self.successResultOf(first)
        self.successResultOf(second)

    def test_what_outlives_it(self) -> None:
        """What was begun for a request has all its time once that is over, and what the reactor calls always has."""
        with one_request(self.clock):
            lasting = Deferred.fromCoroutine(self.later(2.0))
            self.clock.callLater(1.0, self.look)
        self.clock.advance(2.0)
        self.assertEqual(self.seen, [0.0, NONE, NONE])
        self.successResultOf(lasting)

    def test_dropped(self) -> None:
        """One that nobody waits for any more ends within another one, which goes on as before."""

        async def work() -> None:
            with one_request(self.clock):
                await Deferred()

        dropped = work()
        copy_context().run(dropped.send, None)
        self.clock.advance(1.0)
        with one_request(self.clock):
            dropped.close()
            self.look()
        self.assertEqual(self.seen, [1.0])

    def test_on_its_own(self) -> None:
        """What nobody waits for has all its time from the beginning, and the rest of the request has not."""
        with one_request(self.clock):
            with on_its_own():
                lasting = Deferred.fromCoroutine(self.later(1.0))
            self.look()
            self.clock.advance(1.0)
        self.assertEqual(self.seen, [NONE, 0.0, NONE])
        self.successResultOf(lasting)

    def test_time_left(self) -> None:
        """It gets less until there is none; without a request there is always all of it."""
        with one_request(self.clock):
            for spent in (0.0, 1.0, PATIENCE, 60.0):
                self.clock.rightNow = spent
                self.assertEqual(time_left(self.clock), max(PATIENCE - spent, 0.0))
            with on_its_own():
                self.assertEqual(time_left(self.clock), PATIENCE)

    def test_set_back(self) -> None:
        """A clock that is set back gives nobody more time than there is."""
        self.clock.advance(120.0)
        with one_request(self.clock):
            self.clock.rightNow = 0.0
            self.assertEqual(time_left(self.clock), PATIENCE)

    def test_not_counted(self) -> None:
        """Waiting for somebody else than the store leaves as much time as before, also if it was in vain."""
        with one_request(self.clock):
            self.clock.advance(1.0)
            with contextlib.suppress(ValueError), not_counted(self.clock):
                self.clock.advance(30.0)
                raise ValueError
            self.assertEqual(time_left(self.clock), PATIENCE - 1.0)
        with not_counted(self.clock):
            self.clock.advance(30.0)
        self.assertEqual(time_left(self.clock), PATIENCE)


class HouseTests(SynchronousTestCase):
    """What a mediator asks its store within a request and what on its own."""

    def setUp(self) -> None:
        self.house = House(self)
        self.asked: dict[str, float] = {}

    def watch(self, store: Any, *operations: str) -> None:
        """Note for each when the request began that it was asked for."""
        for name in operations:
            self.patch(store, name, partial(self._note, name, getattr(store, name)))

    def _note(self, name: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.asked[name] = request_began(NONE)
        return operation(*args, **options)

    def through(self, work: Any) -> Any:
        """As a transport has it done."""
        return self.house.done(self.house.base.gate.through(work))

    def test_a_forward(self) -> None:
        """That the message is on a socket is marked after the answer, with time of its own."""
        guest = Guest(self.house).enrol()
        guest.go_live()
        self.watch(self.house.store, "owner", "deposit", "mark_delivered")
        raw = sealed_forward(self.house, guest.did, guest.letter())
        self.assertEqual(self.through(lambda: self.house.half.mediator.receive(raw, Origin(PEER))).status, 202)
        self.house.clock.advance(MARK_SECONDS)
        self.assertEqual(self.asked, {"owner": NOW, "deposit": NOW, "mark_delivered": NONE})

    def test_a_command(self) -> None:
        """All of it is within the request."""
        citizen = Citizen(self.house, "alice")
        citizen.register()
        self.watch(self.house.store.decentrl, "admit", "pending_events")
        query = {"type": "QUERY_PENDING_EVENTS", "filter": {}, "pagination": {"page": 0, "page_size": 1}}
        raw = citizen.command(query)
        self.assertEqual(self.through(lambda: self.house.decentrl.mediator.receive(raw, PEER)).status, 200)
        self.assertEqual(self.asked, {"admit": NOW, "pending_events": NOW})


class ServingTests(SynchronousTestCase):
    """A request of another node."""

    def test_is_one(self) -> None:
        """Whatever is asked of the store for it shares its time."""
        clock, sealing = Clock(), Sealing(Clock(), derive(b"what only nodes know, and nobody else does"))
        seen: list[float] = []

        async def use(body: bytes) -> bytes:
            seen.append(request_began(NONE))
            return body

        serving = Serving(clock, "bbbb", sealing, {"/path": use}, self.fail)
        headers = sealing.seal_request(sealing.stamp("aaaa", "bbbb"), "POST", "/path", b"{}")
        clock.advance(7.0)
        answer = self.successResultOf(Deferred.fromCoroutine(serving.serve("POST", "/path", headers, b"{}")))
        self.assertEqual((answer.status, seen), (200, [7.0]))
