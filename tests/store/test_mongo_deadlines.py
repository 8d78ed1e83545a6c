"""Operations that are done for one request, which has one deadline, on servers that are slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from mediatord import deadline as deadline_module
from mediatord.deadline import one_request
from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Payload
from mediatord.interfaces.decentrl import Guard
from mediatord.store.batches import Bounds
from mediatord.store.mongo import server as server_module
from mediatord.store.mongo.gathering import Gathering, Together
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.server import Transaction
from tests.store.mongo import ALICE, AT_MOST, CLOCK, INBOX, MongoCase, begin, until

# Seconds that a request has here, and milliseconds that a command is held up: one is done in time, two are not.
PATIENCE = 1.5
SLOW = 900


class Ago:
    """The time that it was, for a request that began then."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return CLOCK.seconds() - self._seconds


def began(seconds: float) -> Any:
    """Within a request that began so many seconds ago."""
    return one_request(cast(Any, Ago(seconds)))


class DeadlineCase(MongoCase):
    def setUp(self) -> None:
        super().setUp()
        for module in (deadline_module, server_module):
            self.patch(module, "PATIENCE", PATIENCE)
        self.asked: list[str] = []

    def observe(self, operation: str, _seconds: float) -> None:
        self.asked.append(operation)

    async def fails(self, work: Deferred[Any]) -> None:
        """See it fail for lack of a store, in time."""
        begun = CLOCK.seconds()
        with self.assertRaises(StoreUnavailable):
            await work
        self.assertLess(CLOCK.seconds() - begun, AT_MOST)


class RequestTests(DeadlineCase):
    """However many operations there are, and though each would be done in time."""

    async def test_one_after_the_other(self) -> None:
        """A request whose operations are slow fails in time; the same without a request does not."""
        store = await self.a_store()

        async def ask() -> None:
            for _ in range(2):
                self.assertTrue(await store.account(ALICE))

        async def request() -> None:
            with one_request(CLOCK):
                await ask()

        with self.servers.failpoint("find", "aggregate", blockConnection=True, blockTimeMS=SLOW):
            await self.fails(begin(request()))
            await ask()

    async def test_forward(self) -> None:
        """What a slow commit had no time for after a slow question is not there, and can be sent once more."""
        store = await self.a_store()
        store._ownership.clear()

        async def request() -> None:
            with one_request(CLOCK):
                self.assertEqual(await store.owner(INBOX), ALICE)
                await self.put(store, "a")

        held = {"blockConnection": True, "blockTimeMS": SLOW}
        with self.servers.failpoint("aggregate", "commitTransaction", **held):
            await self.fails(begin(request()))
        await until(lambda: not store._server.doubtful)
        await self.put(store, "a")
        self.assertEqual(self.kept(), ["a"])

    async def test_claim(self) -> None:
        """What was claimed before there was no more time can be claimed again: it was not done."""
        store = await self.a_store()
        later = CLOCK.seconds() + 60
        with began(0.5):
            self.assertTrue(await store.claim(b"key", later))
        with began(PATIENCE), self.assertRaises(StoreUnavailable):
            await store.release(b"key")
        await until(lambda: not store._server.doubtful)
        self.assertTrue(await store.claim(b"key", later))

    async def test_command(self) -> None:
        """Nor is a command begun, nor its nonce used up."""
        store = await self.a_store()
        guard = Guard(b"nonce", CLOCK.seconds() + 60)
        with began(PATIENCE), self.assertRaises(StoreUnavailable):
            await store.decentrl.admit(guard)
        await store.decentrl.admit(guard)

    async def test_hardly_any_time(self) -> None:
        """What could only be left in doubt is not begun, of any kind; and that is no fault of the server."""
        server = await self.an_open_server(observe=self.observe)
        gathering = Gathering(server, at_once=1, bounds=Bounds())
        gathering.start()

        async def together(
            operations: Operations, works: Sequence[Any], deadline: float, tries: int | None
        ) -> Sequence[Any]:
            raise AssertionError

        async def work(_: Transaction) -> None:
            raise AssertionError

        with began(PATIENCE - 0.1):
            for asked in (begin(server.transact("work", work)), gathering.submit("batch", together, None, ())):
                await self.fails(asked)
        self.assertEqual((self.asked, self.states, server.doubtful), ([], [True], False))

    async def test_too_much_at_once(self) -> None:
        """Nor does a request wait longer for its turn when the server has more to do than it may at a time."""
        server = await self.an_open_server()
        ended: list[Transaction] = []

        async def lasting(transaction: Transaction) -> None:
            await transaction.find("things", {})
            await deferLater(CLOCK, 2.0)
            ended.append(transaction)

        lasts = [begin(server.transact("lasting", lasting)) for _ in range(32)]
        with began(PATIENCE - 0.5):
            waiting = begin(server.transact("waiting", lasting))
        await self.fails(waiting)
        self.assertEqual(ended, [])
        await gatherResults(lasts)

    async def test_owner(self) -> None:
        """Two that ask for the same: one gives up when it has to, and the other one is answered."""
        store = await self.a_store()
        store._ownership.clear()
        with self.servers.failpoint("aggregate", blockConnection=True, blockTimeMS=SLOW, times=1):
            with began(PATIENCE - 0.5):
                hasty = store.owner(INBOX)
            with one_request(CLOCK):
                patient = store.owner(INBOX)
            await self.fails(hasty)
            self.assertNoResult(patient)
            self.assertEqual(await patient, ALICE)


class TogetherTests(DeadlineCase):
    """Works of several requests, and of none."""

    async def a_gathering(self) -> Gathering:
        """One that does one batch at a time; works are the seconds that a batch lasts."""
        gathering = Gathering(await self.an_open_server(), at_once=1, bounds=Bounds(batch=3))
        gathering.start()
        self.batches: list[tuple[int, float]] = []

        async def last(
            operations: Operations, works: Sequence[float], deadline: float, tries: int | None
        ) -> Sequence[None]:
            self.batches.append((len(works), deadline))
            await deferLater(CLOCK, max(works))
            return [None] * len(works)

        self.last: Together = last
        return gathering

    async def test_the_earliest_counts(self) -> None:
        """Those that are done together are done by the deadline of the first of their requests."""
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
        """Those with less time left are apart, and still in the order of what they have in common."""
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
        """Whoever waits is told when it is too late for it, though nothing ends and others wait before it."""
        self.patch(server_module, "PATIENCE", 4.0)
        gathering = await self.a_gathering()
        hanging = gathering.submit("hanging", self.last, 1.5, ())
        await until(lambda: bool(self.batches))
        free = gathering.submit("free", self.last, 0.0, ())
        late = []
        for ago in (2.0, 2.2, 2.1):
            with began(ago):
                late.append(gathering.submit("late", self.last, 0.0, ()))
        await gatherResults([self.assertFailure(one, StoreUnavailable) for one in late])
        self.assertNoResult(hanging)
        await gatherResults([hanging, free])
        self.assertEqual([number for number, _ in self.batches], [1, 1])
        await gathering.drain()

    async def test_half_written(self) -> None:
        """Of several payloads that are deposited too late none is there."""
        store = await self.a_store()
        payloads = [Payload(id, b"payload", "json") for id in "abc"]
        with self.servers.failpoint("commitTransaction", blockConnection=True, blockTimeMS=1_500):
            with began(PATIENCE - 0.7):
                asked = store.deposit(INBOX, payloads, expires_at=CLOCK.seconds() + 60)
            await self.fails(asked)
        await until(lambda: not store._server.doubtful)
        self.assertEqual(self.kept(), [])
