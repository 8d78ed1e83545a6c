"""Numbers of commands and of round trips that operations take, alone and together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from mediatord.store.interfaces.devices import Device, FinishedWakeup, WakeupPolicy, WakeupRequest
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.mongo.driver.collection import MongoCommand
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.store import MongoStore
from tests.store.mongo.mongo_test_case import ALICE, INBOX, MongoTestCase

TOGETHER = 32


class CommandCountTests(MongoTestCase):
    """Of a store that has served the same recipient before."""

    async def prepare(self) -> MongoStore:
        """An open store; from then on commands are counted."""
        store = await self.open_store()
        await self.enqueue_ids(store, "before")
        await store.acknowledge(ALICE, ["before"])
        self.commands: Counter[str] = Counter()
        self.round_trips = 0
        exchange = PrimaryConnectionPool.exchange

        async def count(pool: PrimaryConnectionPool, commands: Sequence[MongoCommand], *args: Any, **kw: Any) -> Any:
            names = [next(iter(command.body)) for command in commands]
            if not {"dbStats", "hello"} & set(names):
                self.commands.update(names)
                self.round_trips += 1
            return await exchange(pool, commands, *args, **kw)

        self.patch(PrimaryConnectionPool, "exchange", count)
        return store

    async def assert_costs(self, round_trips: int, works: Sequence[Deferred[Any]], **commands: int) -> list[Any]:
        """Wait for works, and compare what they took all together; what they return."""
        results = await gatherResults(list(works))
        self.assertEqual((self.round_trips, dict(self.commands)), (round_trips, commands))
        self.round_trips = 0
        self.commands.clear()
        return results

    async def test_forward(self) -> None:
        """A message for a known recipient takes two round trips, and as many messages as arrive together no more."""
        store = await self.prepare()
        costs = {"insert": 1, "update": 2, "commitTransaction": 1}
        await self.assert_costs(2, [self.enqueue_ids(store, "alone")], **costs)
        together = [self.enqueue_ids(store, f"m{number}") for number in range(TOGETHER)]
        await self.assert_costs(2, together, **costs)

    async def test_forward_to_unknown_state(self) -> None:
        """A queue whose state is not known is read before."""
        store = await self.prepare()
        other = await self.open_store()
        await self.enqueue_ids(other, "elsewhere")
        self.commands.clear()
        self.round_trips = 0
        costs = {"insert": 1, "update": 2, "commitTransaction": 1}
        await self.assert_costs(2, [self.enqueue_ids(store, "known")], **costs)
        store._enqueue_batch.finder.forget([INBOX])
        costs |= {"find": 3}
        await self.assert_costs(4, [self.enqueue_ids(store, "unknown")], **costs)

    async def test_acknowledgement(self) -> None:
        """An acknowledgement takes two round trips, and those that arrive together no more."""
        store = await self.prepare()
        ids = [f"m{number}" for number in range(TOGETHER)]
        await self.enqueue_ids(store, "alone", *ids)
        self.commands.clear()
        self.round_trips = 0
        costs = {"update": 2, "delete": 1, "commitTransaction": 1}
        await self.assert_costs(2, [store.acknowledge(ALICE, ["alone"])], **costs)
        await self.assert_costs(2, [store.acknowledge(ALICE, [id]) for id in ids], **costs)

    async def test_acknowledgement_of_unknown_message(self) -> None:
        """A message that another node has queued is read before."""
        store = await self.prepare()
        other = await self.open_store()
        await self.enqueue_ids(other, "elsewhere")
        self.commands.clear()
        self.round_trips = 0
        costs = {"find": 3, "update": 2, "delete": 1, "commitTransaction": 1}
        await self.assert_costs(3, [store.acknowledge(ALICE, ["elsewhere"])], **costs)

    async def test_account(self) -> None:
        """Accounts that are looked up together take one query, and a known one none."""
        store = await self.prepare()
        dids = [f"did:example:{number}" for number in range(TOGETHER)]
        await gatherResults([store.grant(did) for did in dids])
        self.commands.clear()
        self.round_trips = 0
        await self.assert_costs(1, [store.get_account(did) for did in dids], find=1)
        await self.assert_costs(0, [store.get_account(did) for did in dids])

    async def test_wakeups(self) -> None:
        """Wake-ups that are decided together take as many commands as one, as do polls and what was sent."""
        store = await self.prepare()
        owners = [f"did:example:{number}" for number in range(TOGETHER)]
        for number, did in enumerate(owners):
            await store.grant(did)
            await store.update_recipients(did, [(f"did:key:{number}", "add")], max_recipients=1)
            await store.devices.set_device(did, Device(number.to_bytes(16, "big"), "fcm", b"sealed"), 1)
            await self.enqueue_ids(store, f"m{number}", to=f"did:key:{number}")
        self.commands.clear()
        self.round_trips = 0
        devices, policy = store.devices, WakeupPolicy(20.0, 10.0)
        for some in (owners[:1], owners[1:]):
            requests = [WakeupRequest(did) for did in some]
            read = {"find": 4, "aggregate": 2, "abortTransaction": 1}
            costs = read | {"find": 5, "update": 1}
            (decisions,) = await self.assert_costs(6, [devices.claim_wakeups(requests, policy)], **costs)
            # Of those that are claimed nothing is written.
            await self.assert_costs(4, [devices.claim_wakeups(requests, policy)], **read)
            finished = [FinishedWakeup(one.owner, one.claim) for one in decisions]
            await self.assert_costs(2, [devices.finish_wakeups(finished)], find=1, update=1)
            await self.assert_costs(2, [devices.record_polls(dict.fromkeys(some, 0.0))], find=1, update=1)
        costs = {"find": 2, "aggregate": 1, "abortTransaction": 1}
        await self.assert_costs(3, [devices.find_owed_wakeups("", TOGETHER, policy)], **costs)

    async def test_v1_connections(self) -> None:
        """Connections that are looked up together take one read; those that were found lately none."""
        store = await self.prepare()
        connections = store.v1_connections
        keys = [f"did:key:z6MkOwn{number}" for number in range(TOGETHER)]
        new = [V1Connection(f"did:key:z6Mk{number}", key, "r") for number, key in enumerate(keys)]
        costs = {"find": 2, "aggregate": 1, "insert": 1, "delete": 1, "update": 1, "commitTransaction": 1}
        await self.assert_costs(4, [connections.put_connection(new[0], max_pending=TOGETHER)], **costs)
        for one in new[1:]:
            await connections.put_connection(one, max_pending=TOGETHER)
        self.commands.clear()
        self.round_trips = 0
        await self.assert_costs(1, [connections.find_connection(key) for key in keys], find=1)
        await self.assert_costs(0, [connections.find_connection(key) for key in keys])

    async def test_grant(self) -> None:
        """A grant takes three round trips, with or without a connection of DIDComm v1."""
        store = await self.prepare()
        connection = V1Connection("did:key:z6Mk", "did:key:z6MkOwn", "r")
        await store.v1_connections.put_connection(connection, max_pending=1)
        self.commands.clear()
        self.round_trips = 0
        costs = {"find": 2, "insert": 1, "update": 1, "commitTransaction": 1}
        for did in (connection.account, "did:example:new"):
            await self.assert_costs(3, [store.grant(did)], **costs)
