"""Connections to MongoDB that are cut, delayed or rejected."""

from __future__ import annotations

import atexit
import socket
import struct
from functools import cache
from typing import Any
from unittest import mock

from bson import decode, encode
from twisted.internet import reactor as _reactor  # noqa: TID251  txmongo connects by the global one
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import connectionDone
from twisted.internet.tcp import Server
from twisted.internet.testing import MemoryReactorClock
from twisted.protocols.portforward import ProxyFactory, ProxyServer
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.driver import client as server_module
from mediatord.store.mongo.driver import connection_pool
from mediatord.store.mongo.driver.collection import MongoCommand
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from tests.replica_set import Credentials, ReplicaSet
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    INBOX,
    THINGS,
    TIME_LIMIT,
    MongoTestCase,
    run_coroutine,
    wait_until,
)

reactor: Any = _reactor

WRITE = THINGS.update({"_id": 1}, {"$set": {"there": True}}, upsert=True)


class CuttingProxy(ProxyServer):
    """A proxy that drops all data once a connection begins to authenticate, the first time."""

    factory: Any
    cut = False

    def dataReceived(self, data: bytes) -> None:
        if b"saslStart" in data and not self.factory.used_up:
            self.factory.used_up = self.cut = True
        if not self.cut:
            super().dataReceived(data)


@cache
def guarded_server() -> ReplicaSet:
    servers = ReplicaSet(auth=Credentials("root", "root"))
    servers.open()
    atexit.register(servers.close)
    return servers


class GuardedTests(MongoTestCase):
    """A server with access control."""

    time_limit = None

    def choose_servers(self) -> ReplicaSet:
        return guarded_server()

    async def test_replaces_connection_cut_during_authentication(self) -> None:
        """A connection that does not become ready is replaced."""
        self.patch(connection_pool, "_READY_TIMEOUT", 0.3)
        host = self.servers.hosts[0]
        proxy: Any = ProxyFactory("127.0.0.1", int(host.rpartition(":")[2]))
        proxy.protocol, proxy.used_up, proxy.noisy = CuttingProxy, False, False
        port = reactor.listenTCP(0, proxy, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        uri = self.servers.uri(self.database).replace(host, f"127.0.0.1:{port.getHost().port}")
        connections = connection_pool.PrimaryConnectionPool(parse_mongo_uri(uri), CLOCK, size=1)
        self.addCleanup(connections.stop)
        connections.start()
        await wait_until(lambda: connections.is_connected)
        self.assertTrue(proxy.used_up)

    async def test_recovers_when_user_exists_again(self) -> None:
        """Operations fail at once while the user does not exist, and work again when it does."""
        self.patch(server_module, "PROBE_TIMEOUT", TIME_LIMIT)
        self.patch(server_module, "REQUEST_TIME_LIMIT", TIME_LIMIT)
        create: dict[str, Any] = {
            "pwd": "p",
            "roles": [{"role": "readWrite", "db": self.database}],
            "mechanisms": ["SCRAM-SHA-1"],
        }
        admin = self.servers.client.admin
        admin.command("createUser", "revoked", **create)
        server = await self.open_client(uri=self.servers.uri(self.database, credentials="revoked:p"), connections=10)
        await server.write("write", WRITE)
        admin.command("dropUser", "revoked")
        dropped = self.count_drops(server)
        deferreds = [run_coroutine(server.write("write", WRITE)) for _ in range(20)]
        for item in deferreds:
            with self.assertRaises(StoreUnavailable):
                await item
        await wait_until(lambda: not server.is_available)
        self.assertEqual(dropped, [])
        admin.command("createUser", "revoked", **create)
        self.addCleanup(admin.command, "dropUser", "revoked")
        await wait_until(lambda: server.is_available)
        await gatherResults([run_coroutine(server.query("read", THINGS.find({}))) for _ in range(20)])
        await gatherResults([run_coroutine(server.write("write", WRITE)) for _ in range(20)])
        self.assertEqual((self.availability_changes, len(dropped)), ([True, False, True], 1))

    async def test_unauthorized_command_affects_no_other(self) -> None:
        """A command that is not authorized affects no other command and no connection."""
        self.patch(server_module, "PROBE_TIMEOUT", TIME_LIMIT)
        self.patch(server_module, "REQUEST_TIME_LIMIT", TIME_LIMIT)
        roles = [{"role": "readWrite", "db": self.database}]
        self.servers.client.admin.command("createUser", "limited", pwd="p", roles=roles, mechanisms=["SCRAM-SHA-1"])
        self.addCleanup(self.servers.client.admin.command, "dropUser", "limited")
        server = await self.open_client(uri=self.servers.uri(self.database, credentials="limited:p"))
        await wait_until(lambda: len(server._pool._protocols()) == 3)
        before, dropped = server._pool._protocols(), self.count_drops(server)
        for _ in range(3):
            with self.assertRaises(StoreUnavailable):
                await server.command("refused", {"replSetGetConfig": 1}, database="admin", has_time_limit=False)
        await server.write("write", WRITE)
        self.assertEqual((server._pool._protocols(), dropped, self.availability_changes), (before, [], [True]))

    def count_drops(self, server: server_module.ReplicaSetClient) -> list[None]:
        """Count how often all connections are dropped."""
        dropped: list[None] = []
        drop = server._pool.drop

        def note() -> None:
            dropped.append(None)
            drop()

        self.patch(server._pool, "drop", note)
        return dropped


class LongReadTests(MongoTestCase):
    """Slow reads, and reads that cannot match."""

    async def test_slow_reads_do_not_delay_writes(self) -> None:
        """Writes, and the lookups before them, are not delayed by slow reads."""
        store = await self.open_store(connections=10)
        namespace = f"{self.database}.messages"
        with self.servers.failpoint("aggregate", blockConnection=True, blockTimeMS=1_500, namespace=namespace):
            with self.with_short_time_limit():
                slow = [store.get_queue_status(ALICE, None) for _ in range(24)]
            for number in range(8):
                await self.enqueue_ids(store, f"m{number}")
                self.assertEqual(await store.find_owner(f"did:key:{number}"), None)
            for one in slow:
                with self.assertRaises(StoreUnavailable):
                    await one
        self.assertEqual(self.availability_changes, [True])
        self.assertEqual((await store.get_queue_status(ALICE, None)).message_count, 8)

    async def test_owner_of_did_outside_unicode_is_none(self) -> None:
        """The owner of a DID that is not Unicode is None without a query, and other queries are not affected."""
        store = await self.open_store()
        answers = await gatherResults([store.find_owner(did) for did in ("did:key:\ud800", "did:key:other", INBOX)])
        self.assertEqual(answers, [None, None, ALICE])


class ExchangeTests(SynchronousTestCase):
    """Commands on a connection to a server that the test plays."""

    def setUp(self) -> None:
        ours, self.server_end = socket.socketpair()
        for end in (ours, self.server_end):
            end.setblocking(False)
            self.addCleanup(end.close)
        self.clock: Any = MemoryReactorClock()
        self.protocol = connection_pool._PrimaryProtocol(self.clock, mock.Mock())
        self.protocol.factory = mock.Mock(instance=self.protocol)
        self.transport: Any = Server(ours, self.protocol, ("127.0.0.1", 1), None, 0, self.clock)  # type: ignore[arg-type]
        self.transport.connected = 1
        self.protocol.makeConnection(self.transport)
        self.clock.advance(connection_pool._READY_TIMEOUT)

    def send(self, *commands: MongoCommand, deadline: float = 60.0) -> Deferred[Any]:
        messages = [connection_pool._encode_message("things", one) for one in commands]
        return run_coroutine(self.protocol.exchange(messages, deadline))

    def receive(self) -> list[tuple[int, bytes]]:
        """Ids and contents of the messages that one read of the server returns."""
        data, found = self.server_end.recv(1 << 20), []
        while data:
            size, id, answered, kind = struct.unpack_from("<iiii", data)
            self.assertEqual((answered, kind), (0, 2013))
            found.append((id, data[16:size]))
            data = data[size:]
        return found

    def reply(self, id: int, **body: Any) -> None:
        data = bytes(5) + encode(body)
        self.server_end.send(struct.pack("<iiii", 16 + len(data), 1, id, 2013) + data)
        self.transport.doRead()

    def test_commands_are_one_write(self) -> None:
        """Commands that are sent together are written at once, in order, without an iteration of the reactor."""
        (insert,) = THINGS.insert([{"_id": 1}, {"_id": 2}])
        answer = self.send(insert, MongoCommand({"commitTransaction": 1}, database="admin"))
        (first, inserted), (second, committed) = self.receive()
        self.assertEqual(self.clock.getWriters(), [])
        self.assertEqual(decode(committed[5:]), {"commitTransaction": 1, "$db": "admin"})
        size = struct.unpack_from("<i", inserted, 5)[0]
        self.assertEqual(decode(inserted[5 : 5 + size]), {"insert": "things", "ordered": True, "$db": "things"})
        kind, length = struct.unpack_from("<bi", inserted, 5 + size)
        self.assertEqual((kind, length), (1, len(inserted) - 5 - size - 1))
        self.assertEqual(inserted[10 + size :], b"documents\0" + encode({"_id": 1}) + encode({"_id": 2}))
        self.reply(second, number=2)
        self.assertNoResult(answer)
        self.reply(first, number=1)
        self.assertEqual(self.successResultOf(answer), [{"number": 1}, {"number": 2}])

    def test_exchanges_share_a_timer(self) -> None:
        """However many commands are sent one after another, one timer watches their deadlines."""
        timers = []
        for number in range(100):
            answer = self.send(MongoCommand({"ping": 1}), deadline=60.0 + number)
            ((id, _),) = self.receive()
            self.reply(id, number=number)
            self.assertEqual(self.successResultOf(answer), [{"number": number}])
            timers += [one for one in self.clock.getDelayedCalls() if one not in timers]
        self.assertEqual(len(timers), 1)
        self.clock.advance(1_000.0)
        self.assertEqual((self.protocol.is_closing, self.clock.getDelayedCalls()), (False, []))

    def test_aborts_at_deadline(self) -> None:
        """A connection is aborted at the deadline of any command without a reply, not at that of one with a reply."""
        answered = self.send(MongoCommand({"ping": 1}), deadline=10.0)
        ((id, _),) = self.receive()
        self.reply(id)
        self.successResultOf(answered)
        late, early = (self.send(MongoCommand({"ping": 1}), deadline=end) for end in (50.0, 30.0))
        self.clock.advance(15.0)
        self.assertFalse(self.protocol.is_closing)
        self.clock.advance(29.9 - self.clock.seconds())
        self.assertFalse(self.protocol.is_closing)
        self.clock.advance(0.2)
        self.assertTrue(self.protocol.is_closing)
        self.protocol.connectionLost(connectionDone)
        self.assertEqual([self.successResultOf(one) for one in (late, early)], [[None], [None]])
        self.assertEqual(
            [one for one in self.clock.getDelayedCalls() if one.func == self.protocol._check_deadlines], []
        )

    def test_moves_timer_to_earlier_deadline(self) -> None:
        """A command with an earlier deadline than those before is not waited for longer."""
        self.send(MongoCommand({"ping": 1}), deadline=50.0)
        self.send(MongoCommand({"ping": 1}), deadline=20.0)
        self.clock.advance(20.0 - self.clock.seconds())
        self.assertTrue(self.protocol.is_closing)

    def test_ids_stay_positive(self) -> None:
        """Ids of commands begin anew before they exceed 32 bits."""
        self.protocol._sent = iter([(1 << 30) - 1, 1 << 30])  # type: ignore[assignment]
        self.send(MongoCommand({"ping": 1}), MongoCommand({"ping": 1}))
        self.assertEqual([id for id, _ in self.receive()], [(1 << 31) - 1, 1 << 30])
