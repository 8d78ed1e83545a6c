"""Joining, staying, being refused, and coming back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock, deferLater
from twisted.logger import LogEvent, LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.membership import (
    FOREIGN_NODES,
    IDENTITY_DIFFERS,
    JOIN_RETRY_DELAY,
    LEASE_POLL_INTERVAL,
    NODE_LEASE,
    RENEWAL_INTERVAL,
    SECRET_DIFFERS,
    UNRENEWED_LEASE_AGE,
    Membership,
)
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import ClockSkewError, ClusterNode
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.in_memory_mediator import NOW
from tests.store.builders import enforce_identity


def node(name: str = "ann", boot: str = "aaaa", seal: bytes = b"seal", identity: bytes = b"we") -> ClusterNode:
    """One of several."""
    return ClusterNode(name, boot, f"tcp:host=10.0.0.1:port={len(boot)}", seal, identity)


NOT_ENDED = "the store was not available for ending the lease of this node; others wait until it is over"


def warnings(events: Sequence[LogEvent]) -> list[str]:
    """What the operator is warned of."""
    return [formatEvent(event) for event in events if event["log_level"] is LogLevel.warn]


class MembershipTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        store = MemoryStore(self.clock, QueueLimits())
        self.successResultOf(store.open())
        self.store: Any = store.cluster
        self.heard: list[str] = []
        self.seen: list[list[str]] = []
        self.said: list[str] = []
        self.clock_is_wrong = False
        self.probed: list[str] = []
        self.answering: str | None = None
        self.silence: Deferred[None] = succeed(None)
        self.membership = self.member(node())

    def member(self, node: ClusterNode, *, is_worker: bool = False) -> Membership:
        """A service that has yet to be started."""
        return self.build(node, self.probe, is_worker=is_worker)

    def build(
        self, node: ClusterNode, probe: Callable[[ClusterNode], Awaitable[str | None]], *, is_worker: bool = False
    ) -> Membership:
        """:param probe: who answers at an address."""
        return Membership(
            self.clock,
            self.store,
            node,
            cast(Any, self),
            cast(Any, SimpleNamespace(joined=lambda: None, parted=lambda: None, stop=lambda: self.silence)),
            probe=probe,
            give_up=self.said.append,
            on_first_join=lambda: None,
            set_live_nodes=self.set_live_nodes,
            is_worker=is_worker,
        )

    async def probe(self, node: ClusterNode) -> str | None:
        """Who is there, as the test says."""
        self.probed.append(node.boot)
        return self.answering

    def joined(self) -> None:
        """Noted."""
        self.heard.append("joined")

    def parted(self) -> None:
        """Noted."""
        self.heard.append("parted")

    def set_live_nodes(self, live: Collection[ClusterNode]) -> None:
        """Noted."""
        self.seen.append([one.boot for one in live])

    def clock_differs(self, refused: ClockSkewError) -> None:
        """Noted."""
        self.heard.append(f"clock {refused.ahead:+.0f}")
        self.clock_is_wrong = True

    def clock_agrees(self) -> None:
        """Noted."""
        self.clock_is_wrong = False

    def begin(self) -> None:
        """Start, with a store that is open."""
        self.membership.startService()
        self.membership.store_opened()
        self.clock.advance(0)

    def live(self) -> list[str]:
        """The boots of the live nodes."""
        return [one.boot for one in self.successResultOf(self.store.list_nodes())]

    def pass_time(self, seconds: float) -> None:
        """In small steps."""
        self.clock.pump([0.25] * int(seconds * 4))

    @contextmanager
    def away(self, *operations: str) -> Iterator[None]:
        """The store does not answer these."""
        refusals: dict[str, Any] = {
            operation: lambda *args, **more: fail(StoreUnavailable()) for operation in operations
        }
        with mock.patch.multiple(self.store, **refusals):
            yield


class MembershipTests(MembershipTestCase):
    def test_waits_for_the_store(self) -> None:
        """Nothing is asked of it before it is open, and nothing before the service has started."""
        self.membership.startService()
        self.clock.advance(1)
        self.assertEqual(self.live(), [])
        self.membership.store_opened()
        self.assertEqual((self.live(), self.heard), (["aaaa"], ["joined"]))
        other = self.member(node("bea", "bbbb"))
        other.store_opened()
        self.assertEqual(self.live(), ["aaaa"])
        other.startService()
        self.assertEqual(self.live(), ["aaaa", "bbbb"])

    def test_stays(self) -> None:
        """For as long as it says so; and it knows who else is there."""
        self.begin()
        self.assertEqual(self.seen, [["aaaa"]])
        self.successResultOf(self.store.join(node("bea", "bbbb"), 100))
        self.pass_time(5 * NODE_LEASE)
        self.assertEqual((self.live(), self.heard), (["aaaa", "bbbb"], ["joined"]))
        self.assertEqual(self.seen[-1], ["aaaa", "bbbb"])

    def test_settled(self) -> None:
        """Only after a while, when everybody else has had time to come back."""
        self.assertFalse(self.membership.is_settled)
        self.begin()
        self.assertFalse(self.membership.is_settled)
        self.pass_time(RENEWAL_INTERVAL)
        self.assertTrue(self.membership.is_settled)

    def test_leaves(self) -> None:
        """Others need not wait until its lease is over; and it has stopped speaking of sockets by then."""
        self.begin()
        self.silence = Deferred()
        stopped = self.membership.stopService()
        self.assertEqual(self.live(), ["aaaa"])
        self.silence.callback(None)
        self.successResultOf(stopped)
        self.assertEqual((self.live(), self.clock.getDelayedCalls()), ([], []))

    def test_leaves_without_the_store(self) -> None:
        """The lease will be over."""
        self.begin()
        with self.away("drop"), capturedLogs() as events:
            self.successResultOf(self.membership.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(warnings(events), [NOT_ENDED])

    def test_stops_before_it_joined(self) -> None:
        """Nothing is left to do."""
        self.membership.startService()
        self.successResultOf(self.membership.stopService())
        self.membership.store_opened()
        self.assertEqual(self.live(), [])

    def test_store_away_at_first(self) -> None:
        """It joins when the store is there."""
        with self.away("join"):
            self.begin()
            self.pass_time(30)
            self.assertEqual((self.heard, self.said), ([], []))
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual(self.heard, ["joined"])

    def test_store_away_for_a_moment(self) -> None:
        """The lease lasts longer than that."""
        self.begin()
        self.pass_time(RENEWAL_INTERVAL)
        with self.away("renew", "list_nodes"):
            self.pass_time(NODE_LEASE - RENEWAL_INTERVAL - 1)
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.live(), self.heard), (["aaaa"], ["joined"]))

    def test_store_away_for_long(self) -> None:
        """The lease is lost, and it says so once; it joins again within a second of the return."""
        self.begin()
        with self.away("renew", "join"), capturedLogs() as events:
            self.pass_time(NODE_LEASE - 1)
            self.assertEqual((self.live(), self.heard, self.membership.is_settled), (["aaaa"], ["joined"], True))
            self.pass_time(3 * NODE_LEASE)
            self.assertEqual((self.live(), self.heard, self.membership.is_settled), ([], ["joined", "parted"], False))
        self.assertEqual(warnings(events), ["the lease of node ann has expired; it joins again as soon as it can"])
        with capturedLogs() as events:
            self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.live(), self.heard), (["aaaa"], ["joined", "parted", "joined"]))
        self.assertEqual((self.membership.is_settled, warnings(events)), (False, []))
        self.pass_time(RENEWAL_INTERVAL)
        self.assertTrue(self.membership.is_settled)

    def test_answers_lost(self) -> None:
        """Who cannot know whether others take it for live is no node, and is one again as soon as it knows."""
        self.begin()
        self.pass_time(NODE_LEASE)
        renew = self.store.renew
        self.store.renew = lambda *args: renew(*args).addCallback(lambda _: fail(StoreUnavailable()))
        self.pass_time(5 * NODE_LEASE)
        self.assertEqual(
            (self.live(), self.heard, self.membership.is_settled), (["aaaa"], ["joined", "parted"], False)
        )
        self.store.renew = renew
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.live(), self.heard), (["aaaa"], ["joined", "parted", "joined"]))
        self.pass_time(5 * NODE_LEASE)
        self.assertEqual((self.heard[3:], self.membership.is_settled), ([], True))

    def test_renewal_that_takes_long(self) -> None:
        """It does not wait for the answer to say that it is none."""
        late: Deferred[bool] = Deferred()
        self.store.renew = lambda *_: late
        self.begin()
        self.pass_time(NODE_LEASE)
        self.assertEqual(self.heard, ["joined", "parted"])
        del self.store.renew
        late.callback(True)
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.live(), self.heard), (["aaaa"], ["joined", "parted", "joined"]))

    def test_store_away_while_the_clock_is_set(self) -> None:
        """That makes its lease neither longer nor shorter."""
        for step in (-30.0, 30.0):
            self.setUp()
            self.begin()
            with self.away("renew", "join"):
                self.pass_time(NODE_LEASE / 2)
                self.set_clock(step)
                self.pass_time(NODE_LEASE / 2 - 1)
                self.assertEqual(self.heard, ["joined"])
                self.pass_time(1)
                self.assertEqual(self.heard, ["joined", "parted"])

    def set_clock(self, step: float) -> None:
        """As :mod:`mediatord.runtime.reactor_clock` has timers follow the clock of the host."""
        self.clock.rightNow += step
        for call in self.clock.calls:
            call.time += step

    def test_dropped_by_others(self) -> None:
        """Likewise."""
        self.begin()
        self.successResultOf(self.store.drop("aaaa", until=inf))
        self.pass_time(RENEWAL_INTERVAL)
        self.assertEqual((self.live(), self.heard), (["aaaa"], ["joined", "parted", "joined"]))

    def test_not_settled_without_the_lease(self) -> None:
        """What is done every few seconds is not done by a node that cannot come back yet."""
        self.begin()
        self.pass_time(RENEWAL_INTERVAL)
        self.assertTrue(self.membership.is_settled)
        self.successResultOf(self.store.drop("aaaa", until=inf))
        with self.away("join"):
            self.pass_time(RENEWAL_INTERVAL)
            self.assertEqual(self.heard, ["joined", "parted"])
            self.assertFalse(self.membership.is_settled)

    def test_fault(self) -> None:
        """A mistake of ours is logged, and not the end."""
        self.store.join = lambda *args: fail(RuntimeError("boom"))
        self.begin()
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        del self.store.join
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual(self.heard, ["joined"])

    def test_fault_in_staying(self) -> None:
        """It is no node until it has joined again."""
        self.begin()
        self.store.renew = lambda *args: fail(RuntimeError("boom"))
        with self.away("join"):
            self.pass_time(RENEWAL_INTERVAL + JOIN_RETRY_DELAY)
            self.assertEqual((self.heard, self.membership.is_settled), (["joined", "parted"], False))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        del self.store.renew
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual(self.heard, ["joined", "parted", "joined"])

    def test_another_secret(self) -> None:
        """One line, and that was it."""
        self.successResultOf(self.store.join(node("bea", "bbbb", b"other"), 100))
        self.begin()
        self.assertEqual((self.said, self.heard), ([SECRET_DIFFERS], []))
        self.pass_time(NODE_LEASE)
        self.assertEqual((len(self.said), self.live()), (1, ["bbbb"]))
        self.successResultOf(self.membership.stopService())

    def test_another_secret_later(self) -> None:
        """Who was a member stays up, with its sockets, and joins again as soon as it may."""
        self.begin()
        with self.away("renew", "join"):
            self.pass_time(NODE_LEASE)
        self.successResultOf(self.store.join(node("bea", "bbbb", b"other"), 5 * NODE_LEASE))
        self.pass_time(4 * NODE_LEASE)
        self.assertEqual((self.said, self.heard, self.live()), ([], ["joined", "parted"], ["bbbb"]))
        self.pass_time(NODE_LEASE + JOIN_RETRY_DELAY)
        self.assertEqual((self.heard[2:], self.live()), (["joined"], ["aaaa"]))

    def test_another_identity(self) -> None:
        """One line that says what to do, and that was it; later it waits until it may join again."""
        enforce_identity(self.store)
        other = node("bea", "bbbb", identity=b"they")
        self.successResultOf(self.store.join(other, 100))
        self.begin()
        self.assertEqual((self.said, self.heard, self.live()), ([IDENTITY_DIFFERS], [], ["bbbb"]))
        self.assertIn("copy keys.jwks", IDENTITY_DIFFERS)
        self.successResultOf(self.membership.stopService())
        self.successResultOf(self.store.drop("bbbb", until=inf))
        self.membership = self.member(node())
        self.begin()
        with self.away("renew", "join"):
            self.pass_time(NODE_LEASE)
        self.successResultOf(self.store.join(other, NODE_LEASE))
        self.pass_time(NODE_LEASE - JOIN_RETRY_DELAY)
        self.assertEqual((len(self.said), self.heard, self.live()), (1, ["joined", "parted"], ["bbbb"]))
        self.pass_time(2 * JOIN_RETRY_DELAY)
        self.assertEqual((self.heard[2:], self.live()), (["joined"], ["aaaa"]))

    def test_workers_beside_others(self) -> None:
        """They have no secret file: the line says who is there."""
        self.successResultOf(self.store.join(node("other-2", "dddd", b"other"), 100))
        self.successResultOf(self.store.join(node("other-1", "bbbb", b"other"), 100))
        self.membership = self.member(node(), is_worker=True)
        self.begin()
        self.assertEqual(self.said, [f"{FOREIGN_NODES}: other-1, other-2"])

    def test_renews_on_time(self) -> None:
        """A store that takes its time makes no renewal later."""
        renewed: list[float] = []
        renew = self.store.renew

        def slow(boot: str, lease: float) -> Any:
            renewed.append(self.clock.seconds() - NOW)
            return deferLater(self.clock, 1, renew, boot, lease)

        self.store.renew = slow
        self.begin()
        self.pass_time(2 * RENEWAL_INTERVAL)
        self.assertEqual(renewed, [0, RENEWAL_INTERVAL, 2 * RENEWAL_INTERVAL])


class ClockTests(MembershipTestCase):
    """The clock of the host, and that of the store's server."""

    @contextmanager
    def wrong(self, ahead: float) -> Iterator[None]:
        """The store refuses us."""
        for operation in ("join", "renew"):
            setattr(self.store, operation, lambda *_: fail(ClockSkewError(ahead)))
        yield
        for operation in ("join", "renew"):
            delattr(self.store, operation)

    def test_wrong_at_the_start(self) -> None:
        """One line, and that was it."""
        with self.wrong(4320):
            self.begin()
        (line,) = self.said
        self.assertTrue(line.startswith("the clock of this host is 1 h 12 min ahead of the MongoDB server's"), line)
        self.assertIn("60 s", line)
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.heard, self.live()), ([], []))

    def test_wrong_later(self) -> None:
        """It is no node and has no turn from then on, without waiting for its lease, until the clock is right."""
        self.begin()
        self.successResultOf(self.store.add_presence("aaaa", ["did:x"]))
        self.assertIs(self.successResultOf(self.store.acquire_lease("turn", "aaaa", 100)), True)
        with self.wrong(-100):
            self.pass_time(RENEWAL_INTERVAL)
            self.assertEqual((self.heard[:3], self.live()), (["joined", "clock -100", "parted"], []))
            self.assertEqual(self.successResultOf(self.store.find_presence(["did:x"])), [])
            self.assertIs(self.successResultOf(self.store.acquire_lease("turn", "bbbb", 100)), True)
            self.pass_time(2 * NODE_LEASE)
            self.assertEqual((set(self.heard[3:]), self.live(), self.said), ({"clock -100"}, [], []))
            self.assertFalse(self.membership.is_settled)
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.heard[-1], self.live()), ("joined", ["aaaa"]))

    def test_wrong_when_it_cannot_leave(self) -> None:
        """Then its lease will be over; nothing says that it stops."""
        self.begin()
        with self.wrong(100), self.away("drop"):
            with capturedLogs() as events:
                self.pass_time(RENEWAL_INTERVAL)
            self.assertEqual(warnings(events), [NOT_ENDED])
            self.assertEqual((self.heard[:3], self.live()), (["joined", "clock +100", "parted"], ["aaaa"]))
            self.pass_time(NODE_LEASE)
            self.assertEqual(self.live(), [])
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.heard[-1], self.live()), ("joined", ["aaaa"]))

    def test_wrong_after_an_outage(self) -> None:
        """Who was a member is not refused for good."""
        self.begin()
        with self.away("renew", "join"):
            self.pass_time(NODE_LEASE + RENEWAL_INTERVAL)
        with self.wrong(100):
            self.pass_time(NODE_LEASE)
            self.assertEqual((set(self.heard[1:]), self.said), ({"clock +100", "parted"}, []))
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.heard[-1], self.live()), ("joined", ["aaaa"]))

    def test_right_again_and_refused(self) -> None:
        """Then it is not the clock that is in the way."""
        self.begin()
        with self.wrong(100):
            self.pass_time(RENEWAL_INTERVAL)
            self.assertTrue(self.clock_is_wrong)
            self.successResultOf(self.store.drop("aaaa", until=inf))
        self.successResultOf(self.store.join(node("bea", "bbbb", b"other"), 2 * NODE_LEASE))
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.clock_is_wrong, self.said, self.live()), (False, [], ["bbbb"]))
        with self.wrong(100):
            self.pass_time(JOIN_RETRY_DELAY)
            self.assertTrue(self.clock_is_wrong)


class NameTests(MembershipTestCase):
    """Another node has our name."""

    def setUp(self) -> None:
        super().setUp()
        self.holder = node(boot="cccc")
        self.successResultOf(self.store.join(self.holder, NODE_LEASE))
        self.dropped: list[str] = []
        drop = self.store.drop

        def noting(boot: str, **more: Any) -> Any:
            self.dropped.append(boot)
            return drop(boot, **more)

        self.store.drop = noting

    def assert_refused(self) -> None:
        """One line that names it, and that was it."""
        (line,) = self.said
        self.assertTrue(line.startswith("node: ann is running already, at tcp:host=10.0.0.1"), line)
        self.assertNotIn("\n", line)
        self.assertEqual((self.heard, self.dropped), ([], []))

    def renew(self) -> None:
        """The holder lives."""
        self.assertTrue(self.successResultOf(self.store.renew("cccc", NODE_LEASE)))

    def test_it_answers(self) -> None:
        """At once refused."""
        self.answering = "cccc"
        self.begin()
        self.assertEqual(self.probed, ["cccc"])
        self.assert_refused()
        self.assertEqual(self.live(), ["cccc"])

    def test_it_is_gone(self) -> None:
        """Not renewing its lease for longer than a node takes for that says so, whoever answers at its address."""
        for self.answering in (None, "aaaa", "dddd"):
            with self.subTest(self.answering):
                self.begin()
                self.pass_time(UNRENEWED_LEASE_AGE - LEASE_POLL_INTERVAL)
                self.assertEqual((self.dropped, self.live()), ([], ["cccc"]))
                self.pass_time(LEASE_POLL_INTERVAL)
                self.assertEqual((self.said, self.heard, self.live()), ([], ["joined"], ["aaaa"]))
                self.assertEqual(self.dropped, ["cccc"])
                self.successResultOf(self.membership.stopService())
                self.setUp()

    def test_longer_than_a_renewal(self) -> None:
        """A node that lives has renewed its lease in that time."""
        self.assertGreaterEqual(UNRENEWED_LEASE_AGE, RENEWAL_INTERVAL + LEASE_POLL_INTERVAL)

    def test_it_leaves(self) -> None:
        """Then the name is ours at once."""
        self.begin()
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.pass_time(LEASE_POLL_INTERVAL)
        self.assertEqual((self.said, self.heard, self.live()), ([], ["joined"], ["aaaa"]))

    def test_it_lives(self) -> None:
        """It renews its lease, so it is alive, even though nobody answers where it said it is."""
        self.begin()
        self.pass_time(RENEWAL_INTERVAL)
        self.renew()
        self.pass_time(LEASE_POLL_INTERVAL)
        self.assert_refused()
        self.assertEqual(self.live(), ["cccc"])

    def test_it_has_our_address(self) -> None:
        """It lives, and where it said it is we are ourselves: one line that says so."""
        self.answering = "aaaa"
        self.begin()
        self.pass_time(2)
        self.renew()
        self.pass_time(LEASE_POLL_INTERVAL)
        (line,) = self.said
        self.assertIn("where this node itself answers", line)
        self.assertNotIn("\n", line)
        self.assertEqual((self.heard, self.dropped, self.live()), ([], [], ["cccc"]))

    def test_it_renews_at_the_last_moment(self) -> None:
        """Between our last look and the end that we would have put to it: then it lives on."""
        drop = self.store.drop

        def late(boot: str, **more: Any) -> Any:
            self.renew()
            return drop(boot, **more)

        self.store.drop = late
        self.begin()
        self.pass_time(UNRENEWED_LEASE_AGE)
        self.assertEqual((self.live(), self.heard), (["cccc"], []))
        self.answering = "cccc"
        self.pass_time(LEASE_POLL_INTERVAL)
        self.assertEqual(len(self.said), 1)

    def test_store_away_meanwhile(self) -> None:
        """Then nobody could renew anything: what was seen before does not count."""
        self.begin()
        self.pass_time(2)
        with self.away("join"):
            self.pass_time(2)
        self.pass_time(UNRENEWED_LEASE_AGE - LEASE_POLL_INTERVAL)
        self.assertEqual((self.dropped, self.live()), ([], ["cccc"]))
        self.renew()
        self.pass_time(2 * LEASE_POLL_INTERVAL)
        self.assert_refused()

    def test_store_away_at_the_end(self) -> None:
        """The earlier one is dropped later, or its lease is over."""
        with self.away("drop"):
            self.begin()
            self.pass_time(UNRENEWED_LEASE_AGE + LEASE_POLL_INTERVAL)
            self.assertEqual(self.live(), ["cccc"])
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.said, self.heard, self.live()), ([], ["joined"], ["aaaa"]))

    def test_probes_that_take_long(self) -> None:
        """Looks are further apart, and that is all."""

        async def slow(node: ClusterNode) -> None:
            await deferLater(self.clock, 2)

        self.membership = self.build(node(), slow)
        self.begin()
        self.pass_time(6)
        self.assertEqual((self.said, self.heard, self.live()), ([], ["joined"], ["aaaa"]))

    def test_somebody_else_was_faster(self) -> None:
        """The name goes from one holder to another: the new one is given its time as well."""
        self.begin()
        self.pass_time(UNRENEWED_LEASE_AGE - 0.5)
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.successResultOf(self.store.join(node(boot="dddd"), NODE_LEASE))
        self.pass_time(UNRENEWED_LEASE_AGE - 0.5)
        self.assertEqual((self.said, self.live()), ([], ["dddd"]))
        self.pass_time(1)
        self.assertEqual((self.said, self.heard, self.live()), ([], ["joined"], ["aaaa"]))

    def test_predecessor(self) -> None:
        """Whoever was in our place before is gone for certain: there is nothing to wait for."""
        self.membership = self.member(node(), is_worker=True)
        self.begin()
        self.assertEqual((self.heard, self.live(), self.probed), (["joined"], ["aaaa"], []))

    def test_no_predecessor(self) -> None:
        """Who has the name at another address is somebody else."""
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.successResultOf(self.store.join(node("ann", "c"), NODE_LEASE))
        self.dropped.clear()
        self.membership = self.member(node(), is_worker=True)
        self.begin()
        self.assertEqual((self.heard, self.live(), self.probed), ([], ["c"], ["c"]))

    def test_a_name_that_was_ours(self) -> None:
        """Who comes back and finds its name taken gives up, and leaves the other one alone."""
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.begin()
        self.assertEqual(self.heard, ["joined"])
        with self.away("renew", "join"):
            self.pass_time(NODE_LEASE)
        self.dropped.clear()
        self.successResultOf(self.store.join(self.holder, 20 * NODE_LEASE))
        self.pass_time(10 * NODE_LEASE)
        self.assertEqual((len(self.said), self.dropped, self.live()), (1, [], ["cccc"]))
        self.assertTrue(self.said[0].startswith("node: ann is running already"))

    def test_two_that_live(self) -> None:
        """Neither reaches the other: one of them is refused, and the other one never notices."""
        other = self.member(node(boot="eeee"))
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.begin()
        self.pass_time(5)
        self.dropped.clear()
        other.startService()
        other.store_opened()
        self.pass_time(60)
        self.assertEqual((self.dropped, len(self.said), self.live()), ([], 1, ["aaaa"]))
        self.assertEqual(self.heard, ["joined"])
