"""Operations of one request, which share a deadline, on slow servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from mediatord.errors import StoreUnavailable
from mediatord.runtime import request_time as deadline_module
from mediatord.runtime.request_time import request_deadline
from mediatord.store.interfaces.decentrl import CommandGuard
from mediatord.store.interfaces.messages import Payload
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.mongo.driver import client as server_module
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.transaction_batcher import BatchOperation, TransactionBatcher
from tests.store.mongo.mongo_test_case import (
    ALICE,
    AT_MOST,
    CLOCK,
    INBOX,
    THINGS,
    MongoTestCase,
    start_mongod,
    wait_for_recovery,
    wait_until,
)

# Seconds that a request has here, and milliseconds that a command is held up: one is done in time, also on a busy
# machine, and two are not.
PATIENCE = 4.0
SLOW = 2_200


class ShiftedClock:
    """A clock that is behind, for a request that began earlier."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return CLOCK.seconds() - self._seconds


def began(seconds: float) -> Any:
    """A request that began some seconds ago."""
    return request_deadline(cast(Any, ShiftedClock(seconds)))


class DeadlineCase(MongoTestCase):
    def setUp(self) -> None:
        super().setUp()
        for module in (deadline_module, server_module):
            self.patch(module, "REQUEST_TIME_LIMIT", PATIENCE)
        self.asked: list[str] = []

    def observe(self, operation: str, _seconds: float) -> None:
        self.asked.append(operation)

    async def fails(self, work: Deferred[Any]) -> None:
        """Check that it fails with StoreUnavailable in time."""
        begun = CLOCK.seconds()
        with self.assertRaises(StoreUnavailable):
            await work
        self.assertLess(CLOCK.seconds() - begun, AT_MOST)


class RequestTests(DeadlineCase):
    """However many operations it has, though each alone would be done in time."""

    async def test_one_after_the_other(self) -> None:
        """A request with slow operations fails in time; the same operations without a request do not."""
        store = await self.a_store()

        async def ask() -> None:
            for _ in range(2):
                self.assertTrue(await store.get_account(ALICE))

        async def request() -> None:
            with request_deadline(CLOCK):
                await ask()

        with self.servers.failpoint("find", "aggregate", blockConnection=True, blockTimeMS=SLOW):
            await self.fails(start_mongod(request()))
            await ask()

    async def test_forward(self) -> None:
        """A message whose commit was too slow is not queued, and can be sent again."""
        store = await self.a_store()
        store._owner_cache.clear()

        async def request() -> None:
            with request_deadline(CLOCK):
                self.assertEqual(await store.find_owner(INBOX), ALICE)
                await self.put(store, "a")

        held = {"blockConnection": True, "blockTimeMS": SLOW}
        with self.servers.failpoint("aggregate", "commitTransaction", **held):
            await self.fails(start_mongod(request()))
        await wait_for_recovery(store._client)
        await self.put(store, "a")
        self.assertEqual(self.kept(), ["a"])

    async def test_claim(self) -> None:
        """A nonce whose request ran out of time can be claimed again."""
        store = await self.a_store()
        later = CLOCK.seconds() + 60
        with began(0.5):
            self.assertTrue(await store.claim_nonce(b"key", later))
        with began(PATIENCE), self.assertRaises(StoreUnavailable):
            await store.release_nonce(b"key")
        await wait_for_recovery(store._client)
        self.assertTrue(await store.claim_nonce(b"key", later))

    async def test_command(self) -> None:
        """A command is not started, and its nonce is not used."""
        store = await self.a_store()
        guard = CommandGuard(b"nonce", CLOCK.seconds() + 60)
        with began(PATIENCE), self.assertRaises(StoreUnavailable):
            await store.decentrl.check_guard(guard)
        await store.decentrl.check_guard(guard)

    async def test_hardly_any_time(self) -> None:
        """Operations with hardly any time left are not started, and the server is not blamed."""
        server = await self.an_open_server(observe=self.observe)
        gathering = TransactionBatcher(server, at_once=1, bounds=BatchLimits())
        gathering.start()

        async def together(run: Operation, works: Sequence[Any], tries: int | None) -> Sequence[Any]:
            raise AssertionError

        async def work(_: Transaction) -> None:
            raise AssertionError

        with began(PATIENCE - 0.1):
            for asked in (start_mongod(server.transact("work", work)), gathering.submit("batch", together, None, ())):
                await self.fails(asked)
        self.assertEqual((self.asked, self.states, server.transactions.has_uncertain_commits), ([], [True], False))

    async def test_too_much_at_once(self) -> None:
        """A request does not wait beyond its deadline when too many transactions are open."""
        server = await self.an_open_server()
        ended: list[Transaction] = []
        end: Deferred[None] = Deferred()

        async def lasting(transaction: Transaction) -> None:
            await transaction.query(THINGS.find({}))
            await end
            ended.append(transaction)

        lasts = [start_mongod(server.transact("lasting", lasting)) for _ in range(32)]
        with began(PATIENCE - 0.5):
            waiting = start_mongod(server.transact("waiting", lasting))
        await self.fails(waiting)
        self.assertEqual(ended, [])
        end.callback(None)
        await gatherResults(lasts)

    async def test_owner(self) -> None:
        """Of two lookups of one DID one times out, and the other succeeds."""
        for module in (deadline_module, server_module):
            self.patch(module, "REQUEST_TIME_LIMIT", 2 * PATIENCE)
        store = await self.a_store()
        store._owner_cache.clear()
        with self.servers.failpoint("aggregate", blockConnection=True, blockTimeMS=5_000, times=1):
            with began(PATIENCE):
                hasty = store.find_owner(INBOX)
            await deferLater(CLOCK, 0.2)  # its query is the one that is blocked
            with request_deadline(CLOCK):
                patient = store.find_owner(INBOX)
            self.assertEqual(await patient, ALICE)
            await self.fails(hasty)


class SharedBatchTests(DeadlineCase):
    """Works of several requests, and of none."""

    async def a_gathering(self) -> TransactionBatcher:
        """A batcher that runs one batch at a time; works are the seconds that a batch lasts."""
        gathering = TransactionBatcher(await self.an_open_server(), at_once=1, bounds=BatchLimits(batch=3))
        gathering.start()
        self.batches: list[tuple[int, float]] = []

        async def last(run: Operation, works: Sequence[float], tries: int | None) -> Sequence[None]:
            self.batches.append((len(works), run.deadline))
            await deferLater(CLOCK, max(works))
            return [None] * len(works)

        self.last: BatchOperation = last
        return gathering

    async def test_the_earliest_counts(self) -> None:
        """A batch has the deadline of its earliest request."""
        gathering = await self.a_gathering()
        asked = [gathering.submit("free", self.last, 0.0, ())]
        before = CLOCK.seconds()
        for ago in (0.2, 0.1):
            with began(ago):
                asked.append(gathering.submit("request", self.last, 0.0, ()))
        after = CLOCK.seconds()
        await gatherResults(asked)
        ((number, deadline),) = self.batches
        self.assertEqual(number, 3)
        self.assertTrue(before - 0.2 <= deadline - PATIENCE <= after - 0.2)

    async def test_others_do_not_hurry(self) -> None:
        """Works with less time are in a batch of their own, in the order of common keys."""
        gathering = await self.a_gathering()
        now = CLOCK.seconds()
        asked = [gathering.submit("free", self.last, 0.0, ())]
        with began(0.6):
            asked.append(gathering.submit("request", self.last, 0.0, ["key"]))
        asked.append(gathering.submit("after it", self.last, 0.0, ["key"]))
        asked.append(gathering.submit("free", self.last, 0.0, ()))
        await gatherResults(asked)
        self.assertEqual([number for number, _ in self.batches], [2, 1, 1])
        self.assertEqual([deadline >= now + PATIENCE for _, deadline in self.batches], [True, False, True])
        await gathering.drain()

    async def test_the_late_are_left_out(self) -> None:
        """A request that has hardly any time left takes none from the others."""
        gathering = await self.a_gathering()
        with began(PATIENCE - 0.5):
            late = gathering.submit("late", self.last, 0.0, ())
        now = CLOCK.seconds()
        free = gathering.submit("free", self.last, 0.0, ())
        await self.fails(late)
        await free
        ((number, deadline),) = self.batches
        self.assertEqual(number, 1)
        self.assertGreaterEqual(deadline, now + PATIENCE)

    async def test_waiting(self) -> None:
        """A waiting work is rejected in time even if no batch ends and others are before it."""
        self.patch(server_module, "REQUEST_TIME_LIMIT", 10.0)
        gathering = await self.a_gathering()
        end: Deferred[None] = Deferred()

        async def hang(run: Operation, works: Sequence[float], tries: int | None) -> Sequence[None]:
            self.batches.append((len(works), run.deadline))
            await end
            return [None] * len(works)

        hanging = gathering.submit("hanging", hang, 0.0, ())
        await wait_until(lambda: bool(self.batches))
        free = gathering.submit("free", self.last, 0.0, ())
        late = []
        for ago in (5.5, 5.7, 5.6):
            with began(ago):
                late.append(gathering.submit("late", self.last, 0.0, ()))
        await gatherResults([self.assertFailure(one, StoreUnavailable) for one in late])
        self.assertNoResult(hanging)
        end.callback(None)
        await gatherResults([hanging, free])
        self.assertEqual([number for number, _ in self.batches], [1, 1])
        await gathering.drain()

    async def test_half_written(self) -> None:
        """Of several payloads that are queued too late none is stored."""
        store = await self.a_store()
        payloads = [Payload(id, b"payload", "json") for id in "abc"]
        with self.servers.failpoint("commitTransaction", blockConnection=True, blockTimeMS=SLOW + 1_000):
            with began(PATIENCE / 2):
                asked = store.enqueue(INBOX, payloads, expires_at=CLOCK.seconds() + 60)
            await self.fails(asked)
        await wait_for_recovery(store._client)
        self.assertEqual(self.kept(), [])
