"""Connections are served in turn, one quantum each."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.http.flow_control import MAX_ITERATION_SECONDS, MAX_QUANTA, RoundRobinScheduler
from mediatord.ratelimit.rate_limiter import RateLimits
from tests.http.in_memory_site import PING, PONG, InMemorySite, encode_masked_frame, encode_request, parse_responses

HIGH_LIMITS = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}


class FakeConnection:
    """:ivar left: quanta that it needs."""

    def __init__(self, scheduler: RoundRobinScheduler, log: list[str], name: str, left: int) -> None:
        self.scheduler, self.log, self.name, self.left = scheduler, log, name, left

    def run_quantum(self) -> None:
        self.log.append(self.name)
        self.left -= 1
        if self.left:
            self.scheduler.add(self)


class SchedulerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.now, self.log = Clock(), 0.0, list[str]()
        self.scheduler = RoundRobinScheduler(self.clock, lambda: self.now)

    def test_serves_round_robin(self) -> None:
        """Each connection has a quantum before one has its second, however often it is queued."""
        for name, left in (("a", 3), ("b", 2)):
            one = FakeConnection(self.scheduler, self.log, name, left)
            self.scheduler.add(one)
            self.scheduler.add(one)
        self.clock.advance(0)
        self.assertEqual(self.log, list("ababa"))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_limits_quanta_per_iteration(self) -> None:
        """The rest follows in the next iteration."""
        self.scheduler.add(FakeConnection(self.scheduler, self.log, "a", MAX_QUANTA + 1))
        self.scheduler._run()
        self.assertEqual(len(self.log), MAX_QUANTA)
        self.clock.advance(0)
        self.assertEqual(len(self.log), MAX_QUANTA + 1)

    def test_slow_quanta_end_iteration(self) -> None:
        """No quantum begins after the time of an iteration."""
        steps = iter(range(1000))
        self.scheduler = RoundRobinScheduler(self.clock, lambda: next(steps) * MAX_ITERATION_SECONDS)
        self.scheduler.add(FakeConnection(self.scheduler, self.log, "a", 3))
        self.scheduler._run()
        self.assertEqual(len(self.log), 1)


class FloodTests(SynchronousTestCase):
    """Requests in one segment are not all served in one iteration."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)

    def served_at_once(self, requests: bytes, number: int) -> int:
        """Return how many requests are answered before other connections are served; in the end all are."""
        transport = self.site_fixture.connect()
        transport.protocol.dataReceived(requests * number)
        at_once: int = transport.value().count(b"HTTP/1.1 ")
        self.site_fixture.run_due_calls()
        self.assertEqual(len(parse_responses(transport.take_output())), number)
        self.assertEqual(transport.producerState, "producing")
        return at_once

    def test_empty_posts(self) -> None:
        """Empty posts of either protocol, on the fast path."""
        for path in ("/didcomm", "/"):
            self.assertLessEqual(self.served_at_once(encode_request("POST", path, b""), 500), 8)

    def test_general_path(self) -> None:
        """Requests on the general path."""
        for request in (
            encode_request("OPTIONS", "/"),
            encode_request("GET", "/nothing"),
            encode_request("POST", "/didcomm", b"", {"X-Anything": "1"}),
        ):
            self.assertLessEqual(self.served_at_once(request, 300), 2)

    def test_pings(self) -> None:
        """Pings are all answered, in order."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.transport.protocol.dataReceived(
            b"".join(encode_masked_frame(b"%d" % n, PING) for n in range(900))
        )
        self.assertLess(websocket_client.transport.value().count(b"\x8a"), 50)
        self.assertEqual(websocket_client.transport.producerState, "paused")
        self.assertEqual(websocket_client.frames(), [(PONG, b"%d" % n) for n in range(900)])
        self.assertEqual(websocket_client.transport.producerState, "producing")

    def test_flooding_address_is_disconnected(self) -> None:
        """An address over its limit gets one refusal, and its connections are closed."""
        self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
        for request in (encode_request("POST", "/didcomm", b""), encode_request("OPTIONS", "/")):
            transport = self.site_fixture.connect("192.0.2.50")
            transport.feed(request * 1200)
            self.site_fixture.run_due_calls()
            self.assertEqual([response.status for response in parse_responses(transport.take_output())][-1], 429)
            self.assertTrue(transport.lost)
        websocket_client = self.site_fixture.websocket_client(peer="192.0.2.51")
        websocket_client.send(b"".join([b""]))
        websocket_client.transport.feed(encode_masked_frame(b"", PING) * 1200)
        self.assertEqual(websocket_client.close_code(), 1008)
