"""The deadline that all work of a request shares."""

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

# Recorded as the start where there is no request.
NONE = inf


class DeadlineTests(SynchronousTestCase):
    """The clock is at 0 when the request begins."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.seen: list[float] = []

    def record(self) -> None:
        """Record what is known here of the request."""
        self.seen.append(get_request_start(NONE))

    async def record_later(self, seconds: float) -> None:
        """Record now and after some time."""
        self.record()
        await deferLater(self.clock, seconds, lambda: None)
        self.record()

    def test_shared_by_all_work(self) -> None:
        """All work of a request knows its start, however deep and late; another request has its own."""

        async def work() -> None:
            with request_deadline(self.clock):
                await self.record_later(1.0)
                await Deferred.fromCoroutine(self.record_later(1.0))
            self.record()

        first = Deferred.fromCoroutine(work())
        self.clock.advance(0.5)
        second = Deferred.fromCoroutine(work())
        self.record()
        self.clock.pump([0.5] * 4)
        self.assertEqual(self.seen, [0.0, 0.5, NONE, 0.0, 0.0, 0.5, 0.5, 0.0, NONE, 0.5, NONE])
        self.successResultOf(first)
        self.successResultOf(second)

    def test_work_that_outlives_request(self) -> None:
        """It has the full time once the request is over, as calls of the reactor always have."""
        with request_deadline(self.clock):
            lasting = Deferred.fromCoroutine(self.record_later(2.0))
            self.clock.callLater(1.0, self.record)
        self.clock.advance(2.0)
        self.assertEqual(self.seen, [0.0, NONE, NONE])
        self.successResultOf(lasting)

    def test_cancelled_request(self) -> None:
        """A request that is dropped within another one leaves that unchanged."""

        async def work() -> None:
            with request_deadline(self.clock):
                await Deferred()

        dropped = work()
        copy_context().run(dropped.send, None)
        self.clock.advance(1.0)
        with request_deadline(self.clock):
            dropped.close()
            self.record()
        self.assertEqual(self.seen, [1.0])

    def test_independent_work(self) -> None:
        """Work that the request does not wait for has the full time; the rest of the request has not."""
        with request_deadline(self.clock):
            with outside_request():
                lasting = Deferred.fromCoroutine(self.record_later(1.0))
            self.record()
            self.clock.advance(1.0)
        self.assertEqual(self.seen, [NONE, 0.0, NONE])
        self.successResultOf(lasting)

    def test_remaining_time(self) -> None:
        """It decreases to zero; without a request it is the full time."""
        with request_deadline(self.clock):
            for spent in (0.0, 1.0, REQUEST_TIME_LIMIT, 60.0):
                self.clock.rightNow = spent
                self.assertEqual(get_time_left(self.clock), max(REQUEST_TIME_LIMIT - spent, 0.0))
            with outside_request():
                self.assertEqual(get_time_left(self.clock), REQUEST_TIME_LIMIT)

    def test_clock_set_back(self) -> None:
        """A clock step gives no more than the full time."""
        self.clock.advance(120.0)
        with request_deadline(self.clock):
            self.clock.rightNow = 0.0
            self.assertEqual(get_time_left(self.clock), REQUEST_TIME_LIMIT)

    def test_excluded_waits(self) -> None:
        """Waiting for anything but the store uses no time, successful or not."""
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
    """Which store operations of a mediator belong to a request."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.asked: dict[str, float] = {}

    def watch(self, store: Any, *operations: str) -> None:
        """Record for each operation the start of its request."""
        for name in operations:
            self.patch(store, name, partial(self._recorded, name, getattr(store, name)))

    def _recorded(self, name: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.asked[name] = get_request_start(NONE)
        return operation(*args, **options)

    def run_request(self, work: Any) -> Any:
        """Run as a transport does."""
        return self.in_memory.run(self.in_memory.base.gate.run_request(work))

    def test_forward(self) -> None:
        """The delivery mark is written after the reply, with its own deadline."""
        guest = InMemoryWallet(self.in_memory).enrol()
        guest.go_live()
        self.watch(self.in_memory.store, "find_owner", "enqueue", "mark_delivered")
        raw = pack_forward(self.in_memory, guest.did, guest.make_payload())
        self.assertEqual(
            self.run_request(lambda: self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER))).status, 202
        )
        self.in_memory.clock.advance(MARK_DELAY)
        self.assertEqual(self.asked, {"find_owner": NOW, "enqueue": NOW, "mark_delivered": NONE})

    def test_command(self) -> None:
        """All of it belongs to the request."""
        new_identity = InMemoryIdentity(self.in_memory, "alice")
        new_identity.register()
        self.watch(self.in_memory.store.decentrl, "check_guard", "pending_events")
        query = {"type": "QUERY_PENDING_EVENTS", "filter": {}, "pagination": {"page": 0, "page_size": 1}}
        raw = new_identity.command(query)
        self.assertEqual(self.run_request(lambda: self.in_memory.decentrl.dispatcher.receive(raw, PEER)).status, 200)
        self.assertEqual(self.asked, {"check_guard": NOW, "pending_events": NOW})


class PeerServerDeadlineTests(SynchronousTestCase):
    """A request of another node."""

    def test_operations_share_deadline(self) -> None:
        """All store operations of the request share its deadline."""
        clock, keys = Clock(), derive_cluster_keys(b"what only nodes know, and nobody else does")
        seen: list[float] = []

        async def use(body: bytes) -> bytes:
            seen.append(get_request_start(NONE))
            return body

        clock.advance(7.0)
        server = PeerServer(clock, keys, "bbbb", use, self.fail)
        answer = self.successResultOf(Deferred.fromCoroutine(server.serve(b"{}")))
        self.assertEqual((answer, seen), (b"{}", [7.0]))
