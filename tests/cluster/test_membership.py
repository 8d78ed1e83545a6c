"""Membership: joining, renewing, being refused, and rejoining."""

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


def make_node(name: str = "ann", boot: str = "aaaa", seal: bytes = b"seal", identity: bytes = b"we") -> ClusterNode:
    """A node record."""
    return ClusterNode(name, boot, f"tcp:host=10.0.0.1:port={len(boot)}", seal, identity)


NOT_ENDED = "could not release the node lease: the store was unavailable; other nodes wait for its expiry"


def list_warnings(events: Sequence[LogEvent]) -> list[str]:
    """Warnings for the operator."""
    return [formatEvent(event) for event in events if event["log_level"] is LogLevel.warn]


class MembershipTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        store = MemoryStore(self.clock, QueueLimits())
        self.successResultOf(store.open())
        self.store: Any = store.cluster
        self.events: list[str] = []
        self.live_nodes_seen: list[list[str]] = []
        self.fatal_errors: list[str] = []
        self.clock_is_wrong = False
        self.probed: list[str] = []
        self.answering: str | None = None
        self.silence: Deferred[None] = succeed(None)
        self.membership = self.make_membership(make_node())

    def make_membership(self, node: ClusterNode, *, is_worker: bool = False) -> Membership:
        """A service that is not started."""
        return self.build(node, self.probe, is_worker=is_worker)

    def build(
        self, node: ClusterNode, probe: Callable[[ClusterNode], Awaitable[str | None]], *, is_worker: bool = False
    ) -> Membership:
        """:param probe: returns the boot that answers at an address."""
        return Membership(
            self.clock,
            self.store,
            node,
            cast(Any, self),
            cast(Any, SimpleNamespace(joined=lambda: None, parted=lambda: None, stop=lambda: self.silence)),
            probe=probe,
            give_up=self.fatal_errors.append,
            on_first_join=lambda: None,
            set_live_nodes=self.set_live_nodes,
            is_worker=is_worker,
        )

    async def probe(self, node: ClusterNode) -> str | None:
        """As set by the test."""
        self.probed.append(node.boot)
        return self.answering

    def joined(self) -> None:
        """Recorded."""
        self.events.append("joined")

    def parted(self) -> None:
        """Recorded."""
        self.events.append("parted")

    def set_live_nodes(self, live: Collection[ClusterNode]) -> None:
        """Recorded."""
        self.live_nodes_seen.append([item.boot for item in live])

    def clock_differs(self, error: ClockSkewError) -> None:
        """Recorded."""
        self.events.append(f"clock {error.ahead:+.0f}")
        self.clock_is_wrong = True

    def clock_agrees(self) -> None:
        """Recorded."""
        self.clock_is_wrong = False

    def start(self) -> None:
        """Start with an open store."""
        self.membership.startService()
        self.membership.store_opened()
        self.clock.advance(0)

    def list_live_boots(self) -> list[str]:
        """Boots of the live nodes."""
        return [item.boot for item in self.successResultOf(self.store.list_nodes())]

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps."""
        self.clock.pump([0.25] * int(seconds * 4))

    @contextmanager
    def fail_operations(self, *operations: str) -> Iterator[None]:
        """Make these store operations fail."""
        refusals: dict[str, Any] = {
            operation: lambda *args, **more: fail(StoreUnavailable()) for operation in operations
        }
        with mock.patch.multiple(self.store, **refusals):
            yield


class MembershipTests(MembershipTestCase):
    def test_waits_for_store_and_start(self) -> None:
        """The store is not used before it is open and the service has started."""
        self.membership.startService()
        self.clock.advance(1)
        self.assertEqual(self.list_live_boots(), [])
        self.membership.store_opened()
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa"], ["joined"]))
        other = self.make_membership(make_node("bea", "bbbb"))
        other.store_opened()
        self.assertEqual(self.list_live_boots(), ["aaaa"])
        other.startService()
        self.assertEqual(self.list_live_boots(), ["aaaa", "bbbb"])

    def test_renews_and_knows_peers(self) -> None:
        """A member stays live while it runs, and knows its peers."""
        self.start()
        self.assertEqual(self.live_nodes_seen, [["aaaa"]])
        self.successResultOf(self.store.join(make_node("bea", "bbbb"), 100))
        self.pass_time(5 * NODE_LEASE)
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa", "bbbb"], ["joined"]))
        self.assertEqual(self.live_nodes_seen[-1], ["aaaa", "bbbb"])

    def test_settles_after_a_while(self) -> None:
        """A member is settled only after a while, when all others could have returned."""
        self.assertFalse(self.membership.is_settled)
        self.start()
        self.assertFalse(self.membership.is_settled)
        self.pass_time(RENEWAL_INTERVAL)
        self.assertTrue(self.membership.is_settled)

    def test_leaves_on_stop(self) -> None:
        """Others need not wait for the end of its lease; presence writes have stopped by then."""
        self.start()
        self.silence = Deferred()
        stopped = self.membership.stopService()
        self.assertEqual(self.list_live_boots(), ["aaaa"])
        self.silence.callback(None)
        self.successResultOf(stopped)
        self.assertEqual((self.list_live_boots(), self.clock.getDelayedCalls()), ([], []))

    def test_stops_without_store(self) -> None:
        """Without the store its lease ends by itself."""
        self.start()
        with self.fail_operations("drop"), capturedLogs() as events:
            self.successResultOf(self.membership.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(list_warnings(events), [NOT_ENDED])

    def test_stops_before_joining(self) -> None:
        """Stopping before the join leaves nothing to do."""
        self.membership.startService()
        self.successResultOf(self.membership.stopService())
        self.membership.store_opened()
        self.assertEqual(self.list_live_boots(), [])

    def test_joins_when_store_is_up(self) -> None:
        """It joins when the store is up."""
        with self.fail_operations("join"):
            self.start()
            self.pass_time(30)
            self.assertEqual((self.events, self.fatal_errors), ([], []))
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual(self.events, ["joined"])

    def test_short_outage(self) -> None:
        """A lease outlasts a short outage."""
        self.start()
        self.pass_time(RENEWAL_INTERVAL)
        with self.fail_operations("renew", "list_nodes"):
            self.pass_time(NODE_LEASE - RENEWAL_INTERVAL - 1)
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa"], ["joined"]))

    def test_long_outage(self) -> None:
        """
        In a long outage the lease is lost, which is logged once; the node joins again within a second of the store's
        return.
        """
        self.start()
        with self.fail_operations("renew", "join"), capturedLogs() as events:
            self.pass_time(NODE_LEASE - 1)
            self.assertEqual(
                (self.list_live_boots(), self.events, self.membership.is_settled), (["aaaa"], ["joined"], True)
            )
            self.pass_time(3 * NODE_LEASE)
            self.assertEqual(
                (self.list_live_boots(), self.events, self.membership.is_settled), ([], ["joined", "parted"], False)
            )
        self.assertEqual(list_warnings(events), ["the lease of node ann has expired; rejoining"])
        with capturedLogs() as events:
            self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa"], ["joined", "parted", "joined"]))
        self.assertEqual((self.membership.is_settled, list_warnings(events)), (False, []))
        self.pass_time(RENEWAL_INTERVAL)
        self.assertTrue(self.membership.is_settled)

    def test_lost_renewal_responses(self) -> None:
        """A node that cannot know whether its lease holds is no member, and joins again as soon as it can."""
        self.start()
        self.pass_time(NODE_LEASE)
        renew = self.store.renew
        self.store.renew = lambda *args: renew(*args).addCallback(lambda _: fail(StoreUnavailable()))
        self.pass_time(5 * NODE_LEASE)
        self.assertEqual(
            (self.list_live_boots(), self.events, self.membership.is_settled), (["aaaa"], ["joined", "parted"], False)
        )
        self.store.renew = renew
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa"], ["joined", "parted", "joined"]))
        self.pass_time(5 * NODE_LEASE)
        self.assertEqual((self.events[3:], self.membership.is_settled), ([], True))

    def test_slow_renewal(self) -> None:
        """Membership ends without waiting for a slow renewal."""
        response: Deferred[bool] = Deferred()
        self.store.renew = lambda *_: response
        self.start()
        self.pass_time(NODE_LEASE)
        self.assertEqual(self.events, ["joined", "parted"])
        del self.store.renew
        response.callback(True)
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa"], ["joined", "parted", "joined"]))

    def test_clock_step_during_outage(self) -> None:
        """A clock step makes the lease neither longer nor shorter."""
        for step in (-30.0, 30.0):
            self.setUp()
            self.start()
            with self.fail_operations("renew", "join"):
                self.pass_time(NODE_LEASE / 2)
                self.step_clock(step)
                self.pass_time(NODE_LEASE / 2 - 1)
                self.assertEqual(self.events, ["joined"])
                self.pass_time(1)
                self.assertEqual(self.events, ["joined", "parted"])

    def step_clock(self, step: float) -> None:
        """As :mod:`mediatord.runtime.reactor_clock` adjusts timers to the host's clock."""
        self.clock.rightNow += step
        for call in self.clock.calls:
            call.time += step

    def test_dropped_by_others(self) -> None:
        """A node that was dropped joins again."""
        self.start()
        self.successResultOf(self.store.drop("aaaa", until=inf))
        self.pass_time(RENEWAL_INTERVAL)
        self.assertEqual((self.list_live_boots(), self.events), (["aaaa"], ["joined", "parted", "joined"]))

    def test_not_settled_without_lease(self) -> None:
        """A node that cannot rejoin does no periodic tasks."""
        self.start()
        self.pass_time(RENEWAL_INTERVAL)
        self.assertTrue(self.membership.is_settled)
        self.successResultOf(self.store.drop("aaaa", until=inf))
        with self.fail_operations("join"):
            self.pass_time(RENEWAL_INTERVAL)
            self.assertEqual(self.events, ["joined", "parted"])
            self.assertFalse(self.membership.is_settled)

    def test_programming_error(self) -> None:
        """A programming error is logged and not fatal."""
        self.store.join = lambda *args: fail(RuntimeError("boom"))
        self.start()
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        del self.store.join
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual(self.events, ["joined"])

    def test_programming_error_in_renewal(self) -> None:
        """The node is no member until it has joined again."""
        self.start()
        self.store.renew = lambda *args: fail(RuntimeError("boom"))
        with self.fail_operations("join"):
            self.pass_time(RENEWAL_INTERVAL + JOIN_RETRY_DELAY)
            self.assertEqual((self.events, self.membership.is_settled), (["joined", "parted"], False))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        del self.store.renew
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual(self.events, ["joined", "parted", "joined"])

    def test_another_secret(self) -> None:
        """It ends with one line."""
        self.successResultOf(self.store.join(make_node("bea", "bbbb", b"other"), 100))
        self.start()
        self.assertEqual((self.fatal_errors, self.events), ([SECRET_DIFFERS], []))
        self.pass_time(NODE_LEASE)
        self.assertEqual((len(self.fatal_errors), self.list_live_boots()), (1, ["bbbb"]))
        self.successResultOf(self.membership.stopService())

    def test_another_secret_later(self) -> None:
        """A former member stays up with its sockets, and joins again as soon as it may."""
        self.start()
        with self.fail_operations("renew", "join"):
            self.pass_time(NODE_LEASE)
        self.successResultOf(self.store.join(make_node("bea", "bbbb", b"other"), 5 * NODE_LEASE))
        self.pass_time(4 * NODE_LEASE)
        self.assertEqual(
            (self.fatal_errors, self.events, self.list_live_boots()), ([], ["joined", "parted"], ["bbbb"])
        )
        self.pass_time(NODE_LEASE + JOIN_RETRY_DELAY)
        self.assertEqual((self.events[2:], self.list_live_boots()), (["joined"], ["aaaa"]))

    def test_another_identity(self) -> None:
        """It ends with one line that says what to do; a former member waits until it may join again."""
        enforce_identity(self.store)
        other = make_node("bea", "bbbb", identity=b"they")
        self.successResultOf(self.store.join(other, 100))
        self.start()
        self.assertEqual((self.fatal_errors, self.events, self.list_live_boots()), ([IDENTITY_DIFFERS], [], ["bbbb"]))
        self.assertIn("copy keys.jwks", IDENTITY_DIFFERS)
        self.successResultOf(self.membership.stopService())
        self.successResultOf(self.store.drop("bbbb", until=inf))
        self.membership = self.make_membership(make_node())
        self.start()
        with self.fail_operations("renew", "join"):
            self.pass_time(NODE_LEASE)
        self.successResultOf(self.store.join(other, NODE_LEASE))
        self.pass_time(NODE_LEASE - JOIN_RETRY_DELAY)
        self.assertEqual(
            (len(self.fatal_errors), self.events, self.list_live_boots()), (1, ["joined", "parted"], ["bbbb"])
        )
        self.pass_time(2 * JOIN_RETRY_DELAY)
        self.assertEqual((self.events[2:], self.list_live_boots()), (["joined"], ["aaaa"]))

    def test_workers_beside_others(self) -> None:
        """Workers have no secret file: the line names the other nodes."""
        self.successResultOf(self.store.join(make_node("other-2", "dddd", b"other"), 100))
        self.successResultOf(self.store.join(make_node("other-1", "bbbb", b"other"), 100))
        self.membership = self.make_membership(make_node(), is_worker=True)
        self.start()
        self.assertEqual(self.fatal_errors, [f"{FOREIGN_NODES}: other-1, other-2"])

    def test_renews_on_time(self) -> None:
        """A slow store does not delay renewals."""
        renewed: list[float] = []
        renew = self.store.renew

        def slow(boot: str, lease: float) -> Any:
            renewed.append(self.clock.seconds() - NOW)
            return deferLater(self.clock, 1, renew, boot, lease)

        self.store.renew = slow
        self.start()
        self.pass_time(2 * RENEWAL_INTERVAL)
        self.assertEqual(renewed, [0, RENEWAL_INTERVAL, 2 * RENEWAL_INTERVAL])


class ClockSkewTests(MembershipTestCase):
    """The host's clock and the clock of the store's server."""

    @contextmanager
    def make_clock_wrong(self, ahead: float) -> Iterator[None]:
        """Make the store refuse this node for its clock."""
        for operation in ("join", "renew"):
            setattr(self.store, operation, lambda *_: fail(ClockSkewError(ahead)))
        yield
        for operation in ("join", "renew"):
            delattr(self.store, operation)

    def test_wrong_at_start(self) -> None:
        """It ends with one line."""
        with self.make_clock_wrong(4320):
            self.start()
        (line,) = self.fatal_errors
        self.assertTrue(line.startswith("the clock of this host is 1 h 12 min ahead of the MongoDB server's"), line)
        self.assertIn("60 s", line)
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.events, self.list_live_boots()), ([], []))

    def test_wrong_later(self) -> None:
        """It is neither member nor leader from then on, without waiting for its lease, until the clock is right."""
        self.start()
        self.successResultOf(self.store.add_presence("aaaa", ["did:x"]))
        self.assertIs(self.successResultOf(self.store.acquire_lease("turn", "aaaa", 100)), True)
        with self.make_clock_wrong(-100):
            self.pass_time(RENEWAL_INTERVAL)
            self.assertEqual((self.events[:3], self.list_live_boots()), (["joined", "clock -100", "parted"], []))
            self.assertEqual(self.successResultOf(self.store.find_presence(["did:x"])), [])
            self.assertIs(self.successResultOf(self.store.acquire_lease("turn", "bbbb", 100)), True)
            self.pass_time(2 * NODE_LEASE)
            self.assertEqual(
                (set(self.events[3:]), self.list_live_boots(), self.fatal_errors), ({"clock -100"}, [], [])
            )
            self.assertFalse(self.membership.is_settled)
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.events[-1], self.list_live_boots()), ("joined", ["aaaa"]))

    def test_wrong_on_stop(self) -> None:
        """Then its lease ends by itself, and nothing is logged."""
        self.start()
        with self.make_clock_wrong(100), self.fail_operations("drop"):
            with capturedLogs() as events:
                self.pass_time(RENEWAL_INTERVAL)
            self.assertEqual(list_warnings(events), [NOT_ENDED])
            self.assertEqual(
                (self.events[:3], self.list_live_boots()), (["joined", "clock +100", "parted"], ["aaaa"])
            )
            self.pass_time(NODE_LEASE)
            self.assertEqual(self.list_live_boots(), [])
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.events[-1], self.list_live_boots()), ("joined", ["aaaa"]))

    def test_wrong_after_outage(self) -> None:
        """A former member is not refused for good."""
        self.start()
        with self.fail_operations("renew", "join"):
            self.pass_time(NODE_LEASE + RENEWAL_INTERVAL)
        with self.make_clock_wrong(100):
            self.pass_time(NODE_LEASE)
            self.assertEqual((set(self.events[1:]), self.fatal_errors), ({"clock +100", "parted"}, []))
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.events[-1], self.list_live_boots()), ("joined", ["aaaa"]))

    def test_right_again_but_refused(self) -> None:
        """Then the clock is not the reason any more."""
        self.start()
        with self.make_clock_wrong(100):
            self.pass_time(RENEWAL_INTERVAL)
            self.assertTrue(self.clock_is_wrong)
            self.successResultOf(self.store.drop("aaaa", until=inf))
        self.successResultOf(self.store.join(make_node("bea", "bbbb", b"other"), 2 * NODE_LEASE))
        self.pass_time(JOIN_RETRY_DELAY)
        self.assertEqual((self.clock_is_wrong, self.fatal_errors, self.list_live_boots()), (False, [], ["bbbb"]))
        with self.make_clock_wrong(100):
            self.pass_time(JOIN_RETRY_DELAY)
            self.assertTrue(self.clock_is_wrong)


class NodeNameTests(MembershipTestCase):
    """Another node has the same name."""

    def setUp(self) -> None:
        super().setUp()
        self.holder = make_node(boot="cccc")
        self.successResultOf(self.store.join(self.holder, NODE_LEASE))
        self.dropped: list[str] = []
        drop = self.store.drop

        def noting(boot: str, **more: Any) -> Any:
            self.dropped.append(boot)
            return drop(boot, **more)

        self.store.drop = noting

    def assert_refused(self) -> None:
        """It ended with one line that names the node."""
        (line,) = self.fatal_errors
        self.assertTrue(line.startswith("node: the name ann is in use by the node at tcp:host=10.0.0.1"), line)
        self.assertNotIn("\n", line)
        self.assertEqual((self.events, self.dropped), ([], []))

    def renew_holder(self) -> None:
        """Renew the holder's lease."""
        self.assertTrue(self.successResultOf(self.store.renew("cccc", NODE_LEASE)))

    def test_holder_answers(self) -> None:
        """It is refused at once."""
        self.answering = "cccc"
        self.start()
        self.assertEqual(self.probed, ["cccc"])
        self.assert_refused()
        self.assertEqual(self.list_live_boots(), ["cccc"])

    def test_holder_is_gone(self) -> None:
        """
        A holder that has not renewed its lease for longer than a live node takes is gone, whoever answers at its
        address.
        """
        for self.answering in (None, "aaaa", "dddd"):
            with self.subTest(self.answering):
                self.start()
                self.pass_time(UNRENEWED_LEASE_AGE - LEASE_POLL_INTERVAL)
                self.assertEqual((self.dropped, self.list_live_boots()), ([], ["cccc"]))
                self.pass_time(LEASE_POLL_INTERVAL)
                self.assertEqual((self.fatal_errors, self.events, self.list_live_boots()), ([], ["joined"], ["aaaa"]))
                self.assertEqual(self.dropped, ["cccc"])
                self.successResultOf(self.membership.stopService())
                self.setUp()

    def test_live_holder_renews_in_time(self) -> None:
        """A live holder has renewed its lease in that time."""
        self.assertGreaterEqual(UNRENEWED_LEASE_AGE, RENEWAL_INTERVAL + LEASE_POLL_INTERVAL)

    def test_holder_leaves(self) -> None:
        """Then the name is free at once."""
        self.start()
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.pass_time(LEASE_POLL_INTERVAL)
        self.assertEqual((self.fatal_errors, self.events, self.list_live_boots()), ([], ["joined"], ["aaaa"]))

    def test_unreachable_holder_renews(self) -> None:
        """It renews its lease, so it is live, though nobody answers at its address."""
        self.start()
        self.pass_time(RENEWAL_INTERVAL)
        self.renew_holder()
        self.pass_time(LEASE_POLL_INTERVAL)
        self.assert_refused()
        self.assertEqual(self.list_live_boots(), ["cccc"])

    def test_holder_has_same_address(self) -> None:
        """The holder is live and its address leads to this node: one line says so."""
        self.answering = "aaaa"
        self.start()
        self.pass_time(2)
        self.renew_holder()
        self.pass_time(LEASE_POLL_INTERVAL)
        (line,) = self.fatal_errors
        self.assertIn("as this node does", line)
        self.assertNotIn("\n", line)
        self.assertEqual((self.events, self.dropped, self.list_live_boots()), ([], [], ["cccc"]))

    def test_holder_renews_at_last_moment(self) -> None:
        """A renewal between the last check and the drop keeps the holder."""
        drop = self.store.drop

        def late(boot: str, **more: Any) -> Any:
            self.renew_holder()
            return drop(boot, **more)

        self.store.drop = late
        self.start()
        self.pass_time(UNRENEWED_LEASE_AGE)
        self.assertEqual((self.list_live_boots(), self.events), (["cccc"], []))
        self.answering = "cccc"
        self.pass_time(LEASE_POLL_INTERVAL)
        self.assertEqual(len(self.fatal_errors), 1)

    def test_outage_meanwhile(self) -> None:
        """During an outage nobody could renew: earlier observations do not count."""
        self.start()
        self.pass_time(2)
        with self.fail_operations("join"):
            self.pass_time(2)
        self.pass_time(UNRENEWED_LEASE_AGE - LEASE_POLL_INTERVAL)
        self.assertEqual((self.dropped, self.list_live_boots()), ([], ["cccc"]))
        self.renew_holder()
        self.pass_time(2 * LEASE_POLL_INTERVAL)
        self.assert_refused()

    def test_outage_at_the_end(self) -> None:
        """The holder is dropped later, or its lease ends."""
        with self.fail_operations("drop"):
            self.start()
            self.pass_time(UNRENEWED_LEASE_AGE + LEASE_POLL_INTERVAL)
            self.assertEqual(self.list_live_boots(), ["cccc"])
        self.pass_time(NODE_LEASE)
        self.assertEqual((self.fatal_errors, self.events, self.list_live_boots()), ([], ["joined"], ["aaaa"]))

    def test_slow_probes(self) -> None:
        """Checks are further apart."""

        async def slow(node: ClusterNode) -> None:
            await deferLater(self.clock, 2)

        self.membership = self.build(make_node(), slow)
        self.start()
        self.pass_time(6)
        self.assertEqual((self.fatal_errors, self.events, self.list_live_boots()), ([], ["joined"], ["aaaa"]))

    def test_another_claimant_was_faster(self) -> None:
        """The name has a new holder, which gets the full time too."""
        self.start()
        self.pass_time(UNRENEWED_LEASE_AGE - 0.5)
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.successResultOf(self.store.join(make_node(boot="dddd"), NODE_LEASE))
        self.pass_time(UNRENEWED_LEASE_AGE - 0.5)
        self.assertEqual((self.fatal_errors, self.list_live_boots()), ([], ["dddd"]))
        self.pass_time(1)
        self.assertEqual((self.fatal_errors, self.events, self.list_live_boots()), ([], ["joined"], ["aaaa"]))

    def test_predecessor(self) -> None:
        """A holder at this node's own address is certainly gone: there is no need to wait."""
        self.membership = self.make_membership(make_node(), is_worker=True)
        self.start()
        self.assertEqual((self.events, self.list_live_boots(), self.probed), (["joined"], ["aaaa"], []))

    def test_holder_at_other_address_is_no_predecessor(self) -> None:
        """A holder at another address is another node."""
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.successResultOf(self.store.join(make_node("ann", "c"), NODE_LEASE))
        self.dropped.clear()
        self.membership = self.make_membership(make_node(), is_worker=True)
        self.start()
        self.assertEqual((self.events, self.list_live_boots(), self.probed), ([], ["c"], ["c"]))

    def test_name_taken_during_outage(self) -> None:
        """A node that returns and finds its name taken gives up, and leaves the other one alone."""
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.start()
        self.assertEqual(self.events, ["joined"])
        with self.fail_operations("renew", "join"):
            self.pass_time(NODE_LEASE)
        self.dropped.clear()
        self.successResultOf(self.store.join(self.holder, 20 * NODE_LEASE))
        self.pass_time(10 * NODE_LEASE)
        self.assertEqual((len(self.fatal_errors), self.dropped, self.list_live_boots()), (1, [], ["cccc"]))
        self.assertTrue(self.fatal_errors[0].startswith("node: the name ann is in use"))

    def test_two_live_nodes(self) -> None:
        """If neither reaches the other, one is refused and the other one is not affected."""
        other = self.make_membership(make_node(boot="eeee"))
        self.successResultOf(self.store.drop("cccc", until=inf))
        self.start()
        self.pass_time(5)
        self.dropped.clear()
        other.startService()
        other.store_opened()
        self.pass_time(60)
        self.assertEqual((self.dropped, len(self.fatal_errors), self.list_live_boots()), ([], 1, ["aaaa"]))
        self.assertEqual(self.events, ["joined"])
