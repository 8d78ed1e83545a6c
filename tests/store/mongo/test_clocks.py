"""A host whose clock differs from that of the MongoDB server."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet import reactor  # noqa: TID251  the server's time passes by itself
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW, ClockSkewError
from mediatord.store.interfaces.decentrl import CommandGuard, DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore, ignore_observation
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.store import MongoStore
from tests.mongod import shared_replica_set
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.cluster_base import LONG, ClusterStoreContract, make_node
from tests.store.mongo.mongo_test_case import ShiftedReactor
from tests.store.mongo.test_contract import MongoBackend

DAYS = 4 * 86_400.0
# Time that a query may take before a clock that is nearly right counts as wrong, or the reverse.
QUERY_SECONDS = 5.0


class ClockSkewTests(MongoBackend, ClusterStoreContract, TestCase):
    """The store uses this host's clock; the second store is on a host whose clock is right."""

    short = 0.4

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.hosts: list[ShiftedReactor] = []
        await super().setUp()
        self.host = self.hosts[0]

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        host = ShiftedReactor()
        self.hosts.append(host)
        address = parse_mongo_uri(shared_replica_set().uri(self.database))
        server = ReplicaSetClient(
            address, cast(Any, host), observe=ignore_observation, on_up=lambda up: None, connections=2
        )
        return MongoStore(server, clock, limits, caps=caps, max_nonces=max_nonces)

    def pass_time(self, seconds: float) -> Deferred[None]:
        return deferLater(IReactorTime(reactor), seconds)

    async def set_clock_ahead(self, ahead: float) -> ClockSkewError:
        """Set the clock, and have the store notice."""
        self.host.ahead = ahead
        with self.assertRaises(ClockSkewError) as caught:
            await self.cluster.join(make_node("x"), LONG)
        error: ClockSkewError = caught.exception
        return error

    async def test_join_is_rejected_until_clock_is_right(self) -> None:
        """
        A join is rejected with the difference; other nodes are not disturbed, and it works when the clock is right.
        """
        await self.second_store.cluster.join(make_node("b"), LONG)
        for ahead in (DAYS, MAX_CLOCK_SKEW + QUERY_SECONDS, -MAX_CLOCK_SKEW - QUERY_SECONDS, -DAYS):
            error = await self.set_clock_ahead(ahead)
            self.assertLess(abs(error.ahead - ahead), QUERY_SECONDS)
            self.assertEqual(await self.list_live_boots(), ["B"])
        for ahead in (MAX_CLOCK_SKEW - QUERY_SECONDS, QUERY_SECONDS - MAX_CLOCK_SKEW):
            self.host.ahead = ahead
            await self.join_nodes("a")
        self.assertEqual(await self.list_live_boots(), ["A", "B"])

    async def test_lease_is_kept_but_not_renewed(self) -> None:
        """The lease is not renewed, but lasts."""
        await self.join_nodes("a")
        for ahead in (DAYS, -DAYS):
            self.host.ahead = ahead
            with self.assertRaises(ClockSkewError):
                await self.cluster.renew("A", self.short)
        await self.outlive_lease()
        self.assertEqual(await self.list_live_boots(), ["A"])
        self.host.ahead = 0
        self.assertIs(await self.cluster.renew("A", LONG), True)

    async def test_releases_leader_lease(self) -> None:
        """The host gets no lease, and one that it held is free at once."""
        for ahead in (DAYS, -DAYS):
            self.host.ahead = 0
            self.assertIs(await self.cluster.acquire_lease("turn", "A", LONG), True)
            self.host.ahead = ahead
            self.assertIs(await self.cluster.acquire_lease("turn", "A", LONG), False)
            self.assertIs(await self.cluster.acquire_lease("other", "A", LONG), False)
            for lease_name in ("turn", "other"):
                self.assertIs(await self.second_store.cluster.acquire_lease(lease_name, "B", self.short), True)
                self.assertIs(await self.cluster.acquire_lease(lease_name, "A", LONG), False)
            await self.outlive_lease()
            self.assertIs(await self.cluster.acquire_lease("turn", "A", LONG), False)

    async def test_nothing_expires(self) -> None:
        """No message expires, even before the skew is noticed, as it may have days to live."""
        await self.enqueue_ids("a", ttl=HOUR)
        self.clock.advance(2 * HOUR)
        for ahead in (2 * HOUR, -DAYS):
            self.host.ahead = ahead
            self.assertEqual(await self.store.expire_messages(9), [])
        self.host.ahead = MAX_CLOCK_SKEW - QUERY_SECONDS
        self.assertEqual([message.id for message in await self.store.expire_messages(9)], ["a"])

    async def test_rejects_new_messages(self) -> None:
        """A message would expire at the wrong time, and not be found by others in time."""
        event = PendingEvent("e", ALICE, BOB, "payload", NOON)
        for ahead in (DAYS, -DAYS):
            await self.join_nodes("a")
            await self.set_clock_ahead(ahead)
            for deferred in (
                lambda: self.enqueue_ids("m"),
                lambda: self.store.decentrl.enqueue_event(CommandGuard(b"nonce", NOON + HOUR), event),
                lambda: self.store.take_due_messages(9),
            ):
                with self.assertRaises(StoreUnavailable):
                    await deferred()
            self.host.ahead = 0
            self.assertIs(await self.cluster.renew("A", LONG), True)
            self.assertEqual(await self.list_waiting(), [])
            await self.enqueue_ids("m")
            self.assertEqual(await self.list_waiting(), ["m"])
            self.assertEqual(len(await self.store.acknowledge(ALICE, ["m"])), 1)

    async def test_rejects_queries(self) -> None:
        """
        Queries fail, rather than report queues as empty or parties as unregistered because all seems to have expired.
        """
        await self.enqueue_ids("m")
        store, decentrl = self.store, self.store.decentrl
        for ahead in (DAYS, -DAYS):
            await self.join_nodes("a")
            await self.set_clock_ahead(ahead)
            self.clock.advance(ahead)
            for deferred in (
                self.list_waiting,
                lambda: store.get_queue_status(ALICE, None),
                lambda: store.find_messages(["m"]),
                lambda: decentrl.registered_until(ALICE),
                lambda: decentrl.check_guard(CommandGuard(b"nonce", NOON + HOUR, ALICE)),
            ):
                with self.assertRaises(StoreUnavailable):
                    await deferred()
            self.host.ahead = 0
            self.clock.advance(-ahead)
            self.assertIs(await self.cluster.renew("A", LONG), True)
            self.assertEqual(await self.list_waiting(), ["m"])
            self.assertEqual((await store.get_queue_status(ALICE, None)).message_count, 1)
            self.assertEqual([message.id for message in await store.find_messages(["m"])], ["m"])
            self.assertIsNone(await decentrl.registered_until(ALICE))

    async def test_nothing_comes_due(self) -> None:
        """No message comes due, even before the skew is noticed; the call fails only if one seems to be due."""
        await self.enqueue_ids("m", ttl=2 * HOUR, delay=HOUR)
        for ahead in (DAYS, -DAYS):
            self.host.ahead = ahead
            self.assertEqual(await self.store.take_due_messages(9), [])
        self.clock.advance(HOUR)
        for ahead in (DAYS, -DAYS):
            self.host.ahead = ahead
            with self.assertRaises(StoreUnavailable):
                await self.store.take_due_messages(9)
        self.host.ahead = MAX_CLOCK_SKEW - QUERY_SECONDS
        self.assertEqual([message.id for message in await self.store.take_due_messages(9)], ["m"])

    async def test_compares_clocks_after_step(self) -> None:
        """After a step of the clock it has to be compared once more."""
        await self.join_nodes("a")
        for ahead in (DAYS, -DAYS, MAX_CLOCK_SKEW / 2):
            self.host.ahead = ahead
            with self.assertRaises(StoreUnavailable):
                await self.enqueue_ids("m")
        self.assertIs(await self.cluster.renew("A", LONG), True)
        await self.enqueue_ids("m")
        self.assertEqual(await self.list_waiting(), ["m"])


class SkewTextTests(SynchronousTestCase):
    def test_describes_skew_for_operator(self) -> None:
        """One line with the direction, and the difference in two units at most."""
        for ahead, text in (
            (4320.4, "1 h 12 min ahead of"),
            (-61.0, "1 min 1 s behind"),
            (DAYS + 3 * 3600 + 59, "4 days 3 h ahead of"),
            (-7200.0, "2 h behind"),
        ):
            self.assertEqual(str(ClockSkewError(ahead)), f"the clock of this host is {text} the MongoDB server's")
