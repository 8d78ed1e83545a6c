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
    CLOCK,
    INBOX,
    MAX_OPERATION_SECONDS,
    THINGS,
    MongoTestCase,
    run_coroutine,
    wait_for_recovery,
    wait_until,
)

# Seconds that a request has here, and milliseconds by which a command is delayed: one command is done in time, also
# on a busy machine, and two are not.
REQUEST_SECONDS = 4.0
DELAY_MS = 2_200


class ShiftedClock:
    """Clock that is behind, for a request that began earlier."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return CLOCK.seconds() - self._seconds


def make_deadline(seconds: float) -> Any:
    """Deadline of a request that began some seconds ago."""
    return request_deadline(cast(Any, ShiftedClock(seconds)))


class DeadlineTestCase(MongoTestCase):
    def setUp(self) -> None:
        super().setUp()
        for module in (deadline_module, server_module):
            self.patch(module, "REQUEST_TIME_LIMIT", REQUEST_SECONDS)
        self.operations: list[str] = []

    def observe(self, operation: str, _seconds: float) -> None:
        self.operations.append(operation)

    async def assert_fails_in_time(self, work: Deferred[Any]) -> None:
        """Check that it fails with StoreUnavailable in time."""
        start = CLOCK.seconds()
        with self.assertRaises(StoreUnavailable):
            await work
        self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)


class RequestDeadlineTests(DeadlineTestCase):
    """A request has one deadline for all its operations, each of which alone would be done in time."""

    async def test_limits_sum_of_operations(self) -> None:
        """A request with slow operations fails in time; the same operations without a request do not."""
        store = await self.open_store()

        async def ask() -> None:
            for _ in range(2):
                self.assertFalse(await store.is_retired(ALICE))

        async def request() -> None:
            with request_deadline(CLOCK):
                await ask()

        with self.servers.failpoint("find", "aggregate", blockConnection=True, blockTimeMS=DELAY_MS):
            await self.assert_fails_in_time(run_coroutine(request()))
            await ask()

    async def test_late_commit_is_not_queued(self) -> None:
        """A message whose commit was too slow is not queued, and can be sent again."""
        store = await self.open_store()
        store._owner_cache.clear()

        async def request() -> None:
            with request_deadline(CLOCK):
                self.assertEqual(await store.find_owner(INBOX), ALICE)
                await self.enqueue_ids(store, "a")

        held = {"blockConnection": True, "blockTimeMS": DELAY_MS}
        with self.servers.failpoint("aggregate", "commitTransaction", **held):
            await self.assert_fails_in_time(run_coroutine(request()))
        await wait_for_recovery(store._client)
        await self.enqueue_ids(store, "a")
        self.assertEqual(self.list_queued(), ["a"])

    async def test_late_claim_is_released(self) -> None:
        """A nonce whose request ran out of time can be claimed again."""
        store = await self.open_store()
        later = CLOCK.seconds() + 60
        with make_deadline(0.5):
            self.assertTrue(await store.claim_nonce(b"key", later))
        with make_deadline(REQUEST_SECONDS), self.assertRaises(StoreUnavailable):
            await store.release_nonce(b"key")
        await wait_for_recovery(store._client)
        self.assertTrue(await store.claim_nonce(b"key", later))

    async def test_late_command_is_not_started(self) -> None:
        """A command is not started, and its nonce is not used."""
        store = await self.open_store()
        guard = CommandGuard(b"nonce", CLOCK.seconds() + 60)
        with make_deadline(REQUEST_SECONDS), self.assertRaises(StoreUnavailable):
            await store.decentrl.check_guard(guard)
        await store.decentrl.check_guard(guard)

    async def test_does_not_start_operation_just_before_deadline(self) -> None:
        """Operations with hardly any time left are not started, and the server is not blamed."""
        server = await self.open_client(observe=self.observe)
        batcher = TransactionBatcher(server, at_once=1, bounds=BatchLimits())
        batcher.start()

        async def together(run: Operation, works: Sequence[Any], tries: int | None) -> Sequence[Any]:
            raise AssertionError

        async def work(_: Transaction) -> None:
            raise AssertionError

        with make_deadline(REQUEST_SECONDS - 0.1):
            for deferred in (
                run_coroutine(server.transact("work", work)),
                batcher.submit("batch", together, None, ()),
            ):
                await self.assert_fails_in_time(deferred)
        self.assertEqual(
            (self.operations, self.availability_changes, server.transactions.has_uncertain_commits),
            ([], [True], False),
        )

    async def test_waiting_for_transaction_ends_at_deadline(self) -> None:
        """A request does not wait beyond its deadline when too many transactions are open."""
        server = await self.open_client()
        ended: list[Transaction] = []
        end: Deferred[None] = Deferred()

        async def lasting(transaction: Transaction) -> None:
            await transaction.query(THINGS.find({}))
            await end
            ended.append(transaction)

        lasts = [run_coroutine(server.transact("lasting", lasting)) for _ in range(32)]
        with make_deadline(REQUEST_SECONDS - 0.5):
            waiting = run_coroutine(server.transact("waiting", lasting))
        await self.assert_fails_in_time(waiting)
        self.assertEqual(ended, [])
        end.callback(None)
        await gatherResults(lasts)

    async def test_deadline_of_owner_lookup_is_per_request(self) -> None:
        """Of two lookups of one DID one times out, and the other succeeds."""
        for module in (deadline_module, server_module):
            self.patch(module, "REQUEST_TIME_LIMIT", 2 * REQUEST_SECONDS)
        store = await self.open_store()
        store._owner_cache.clear()
        with self.servers.failpoint("aggregate", blockConnection=True, blockTimeMS=5_000, times=1):
            with make_deadline(REQUEST_SECONDS):
                hasty = store.find_owner(INBOX)
            await deferLater(CLOCK, 0.2)  # the blocked query is its own
            with request_deadline(CLOCK):
                without_deadline = store.find_owner(INBOX)
            self.assertEqual(await without_deadline, ALICE)
            await self.assert_fails_in_time(hasty)


class SharedBatchTests(DeadlineTestCase):
    """Batches with works of several requests, and of none."""

    async def make_batcher(self) -> TransactionBatcher:
        """A batcher that runs one batch at a time; works are the seconds that a batch lasts."""
        batcher = TransactionBatcher(await self.open_client(), at_once=1, bounds=BatchLimits(batch=3))
        batcher.start()
        self.batches: list[tuple[int, float]] = []

        async def last(run: Operation, works: Sequence[float], tries: int | None) -> Sequence[None]:
            self.batches.append((len(works), run.deadline))
            await deferLater(CLOCK, max(works))
            return [None] * len(works)

        self.last: BatchOperation = last
        return batcher

    async def test_batch_has_earliest_deadline(self) -> None:
        """A batch has the deadline of its earliest request."""
        batcher = await self.make_batcher()
        deferreds = [batcher.submit("free", self.last, 0.0, ())]
        before = CLOCK.seconds()
        for ago in (0.2, 0.1):
            with make_deadline(ago):
                deferreds.append(batcher.submit("request", self.last, 0.0, ()))
        after = CLOCK.seconds()
        await gatherResults(deferreds)
        ((number, deadline),) = self.batches
        self.assertEqual(number, 3)
        self.assertTrue(before - 0.2 <= deadline - REQUEST_SECONDS <= after - 0.2)

    async def test_works_with_less_time_get_own_batch(self) -> None:
        """Works with less time are in a batch of their own, in the order of common keys."""
        batcher = await self.make_batcher()
        now = CLOCK.seconds()
        deferreds = [batcher.submit("free", self.last, 0.0, ())]
        with make_deadline(0.6):
            deferreds.append(batcher.submit("request", self.last, 0.0, ["key"]))
        deferreds.append(batcher.submit("after it", self.last, 0.0, ["key"]))
        deferreds.append(batcher.submit("free", self.last, 0.0, ()))
        await gatherResults(deferreds)
        self.assertEqual([number for number, _ in self.batches], [2, 1, 1])
        self.assertEqual([deadline >= now + REQUEST_SECONDS for _, deadline in self.batches], [True, False, True])
        await batcher.drain()

    async def test_late_work_takes_no_time_from_others(self) -> None:
        """A request that has hardly any time left takes none from the others."""
        batcher = await self.make_batcher()
        with make_deadline(REQUEST_SECONDS - 0.5):
            late = batcher.submit("late", self.last, 0.0, ())
        now = CLOCK.seconds()
        free = batcher.submit("free", self.last, 0.0, ())
        await self.assert_fails_in_time(late)
        await free
        ((number, deadline),) = self.batches
        self.assertEqual(number, 1)
        self.assertGreaterEqual(deadline, now + REQUEST_SECONDS)

    async def test_waiting_work_is_rejected_at_deadline(self) -> None:
        """A waiting work is rejected in time even if no batch ends and others are before it."""
        self.patch(server_module, "REQUEST_TIME_LIMIT", 10.0)
        batcher = await self.make_batcher()
        end: Deferred[None] = Deferred()

        async def hang(run: Operation, works: Sequence[float], tries: int | None) -> Sequence[None]:
            self.batches.append((len(works), run.deadline))
            await end
            return [None] * len(works)

        hanging = batcher.submit("hanging", hang, 0.0, ())
        await wait_until(lambda: bool(self.batches))
        free = batcher.submit("free", self.last, 0.0, ())
        removed = []
        for ago in (5.5, 5.7, 5.6):
            with make_deadline(ago):
                removed.append(batcher.submit("late", self.last, 0.0, ()))
        await gatherResults([self.assertFailure(item, StoreUnavailable) for item in removed])
        self.assertNoResult(hanging)
        end.callback(None)
        await gatherResults([hanging, free])
        self.assertEqual([number for number, _ in self.batches], [1, 1])
        await batcher.drain()

    async def test_late_batch_is_stored_not_at_all(self) -> None:
        """Of several payloads that are queued too late none is stored."""
        store = await self.open_store()
        payloads = [Payload(id, b"payload", "json") for id in "abc"]
        with self.servers.failpoint("commitTransaction", blockConnection=True, blockTimeMS=DELAY_MS + 1_000):
            with make_deadline(REQUEST_SECONDS / 2):
                deferred = store.enqueue(INBOX, payloads, expires_at=CLOCK.seconds() + 60)
            await self.assert_fails_in_time(deferred)
        await wait_for_recovery(store._client)
        self.assertEqual(self.list_queued(), [])
