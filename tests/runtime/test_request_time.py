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

from mediatord.cluster.peer_connection import PeerServer, derive_cluster_keys
from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm.pickup import MARK_DELAY
from mediatord.runtime.request_time import (
    REQUEST_TIME_LIMIT,
    get_request_start,
    get_time_left,
    outside_request,
    pause_deadline,
    request_deadline,
)
from tests.in_memory_identities import InMemoryIdentity
from tests.in_memory_mediator import NOW, PEER, InMemoryMediator, InMemoryWallet, pack_forward

# A time after all others, which is what is said to be the beginning where there is no request.
NONE = inf


class DeadlineTests(SynchronousTestCase):
    """The clock is at 0 when the request begins."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.seen: list[float] = []

    def look(self) -> None:
        """Note what is known here of the request."""
        self.seen.append(get_request_start(NONE))

    async def later(self, seconds: float) -> None:
        """Look now and in some time."""
        self.look()
        await deferLater(self.clock, seconds, lambda: None)
        self.look()

    def test_shared(self) -> None:
        """All that a request waits for knows when it began, however deep and late; another one has its own time."""

        async def work() -> None:
            with request_deadline(self.clock):
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
        with request_deadline(self.clock):
            lasting = Deferred.fromCoroutine(self.later(2.0))
            self.clock.callLater(1.0, self.look)
        self.clock.advance(2.0)
        self.assertEqual(self.seen, [0.0, NONE, NONE])
        self.successResultOf(lasting)

    def test_dropped(self) -> None:
        """One that nobody waits for any more ends within another one, which goes on as before."""

        async def work() -> None:
            with request_deadline(self.clock):
                await Deferred()

        dropped = work()
        copy_context().run(dropped.send, None)
        self.clock.advance(1.0)
        with request_deadline(self.clock):
            dropped.close()
            self.look()
        self.assertEqual(self.seen, [1.0])

    def test_on_its_own(self) -> None:
        """What nobody waits for has all its time from the beginning, and the rest of the request has not."""
        with request_deadline(self.clock):
            with outside_request():
                lasting = Deferred.fromCoroutine(self.later(1.0))
            self.look()
            self.clock.advance(1.0)
        self.assertEqual(self.seen, [NONE, 0.0, NONE])
        self.successResultOf(lasting)

    def test_time_left(self) -> None:
        """It gets less until there is none; without a request there is always all of it."""
        with request_deadline(self.clock):
            for spent in (0.0, 1.0, REQUEST_TIME_LIMIT, 60.0):
                self.clock.rightNow = spent
                self.assertEqual(get_time_left(self.clock), max(REQUEST_TIME_LIMIT - spent, 0.0))
            with outside_request():
                self.assertEqual(get_time_left(self.clock), REQUEST_TIME_LIMIT)

    def test_set_back(self) -> None:
        """A clock that is set back gives nobody more time than there is."""
        self.clock.advance(120.0)
        with request_deadline(self.clock):
            self.clock.rightNow = 0.0
            self.assertEqual(get_time_left(self.clock), REQUEST_TIME_LIMIT)

    def test_not_counted(self) -> None:
        """Waiting for somebody else than the store leaves as much time as before, also if it was in vain."""
        with request_deadline(self.clock):
            self.clock.advance(1.0)
            with contextlib.suppress(ValueError), pause_deadline(self.clock):
                self.clock.advance(30.0)
                raise ValueError
            self.assertEqual(get_time_left(self.clock), REQUEST_TIME_LIMIT - 1.0)
        with pause_deadline(self.clock):
            self.clock.advance(30.0)
        self.assertEqual(get_time_left(self.clock), REQUEST_TIME_LIMIT)


class MediatorDeadlineTests(SynchronousTestCase):
    """What a mediator asks its store within a request and what on its own."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.asked: dict[str, float] = {}

    def watch(self, store: Any, *operations: str) -> None:
        """Note for each when the request began that it was asked for."""
        for name in operations:
            self.patch(store, name, partial(self._note, name, getattr(store, name)))

    def _note(self, name: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.asked[name] = get_request_start(NONE)
        return operation(*args, **options)

    def run_request(self, work: Any) -> Any:
        """As a transport has it done."""
        return self.in_memory.done(self.in_memory.base.gate.run_request(work))

    def test_a_forward(self) -> None:
        """That the message is on a socket is marked after the answer, with time of its own."""
        guest = InMemoryWallet(self.in_memory).enrol()
        guest.go_live()
        self.watch(self.in_memory.store, "find_owner", "enqueue", "mark_delivered")
        raw = pack_forward(self.in_memory, guest.did, guest.letter())
        self.assertEqual(
            self.run_request(lambda: self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER))).status, 202
        )
        self.in_memory.clock.advance(MARK_DELAY)
        self.assertEqual(self.asked, {"find_owner": NOW, "enqueue": NOW, "mark_delivered": NONE})

    def test_a_command(self) -> None:
        """All of it is within the request."""
        new_identity = InMemoryIdentity(self.in_memory, "alice")
        new_identity.register()
        self.watch(self.in_memory.store.decentrl, "check_guard", "pending_events")
        query = {"type": "QUERY_PENDING_EVENTS", "filter": {}, "pagination": {"page": 0, "page_size": 1}}
        raw = new_identity.command(query)
        self.assertEqual(self.run_request(lambda: self.in_memory.decentrl.dispatcher.receive(raw, PEER)).status, 200)
        self.assertEqual(self.asked, {"check_guard": NOW, "pending_events": NOW})


class PeerServerDeadlineTests(SynchronousTestCase):
    """A request of another node."""

    def test_is_one(self) -> None:
        """Whatever is asked of the store for it shares its time."""
        clock, keys = Clock(), derive_cluster_keys(b"what only nodes know, and nobody else does")
        seen: list[float] = []

        async def use(body: bytes) -> bytes:
            seen.append(get_request_start(NONE))
            return body

        clock.advance(7.0)
        server = PeerServer(clock, keys, "bbbb", use, self.fail)
        answer = self.successResultOf(Deferred.fromCoroutine(server.serve(b"{}")))
        self.assertEqual((answer, seen), (b"{}", [7.0]))
