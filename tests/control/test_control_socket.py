"""The control socket: a real UNIX socket with a store in memory behind it, and the client of the command line."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from twisted.internet import reactor  # noqa: TID251  the sockets are real
from twisted.internet.defer import succeed
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.cli.store_access import MessageFilter, StoreAccess
from mediatord.control import server as server_module
from mediatord.control.client import ControlClient, NoDaemon
from mediatord.control.operations import ControlOperations
from mediatord.control.server import ControlListener, ControlSocket
from mediatord.errors import ShutdownInProgress, StartupError
from mediatord.observability.event_recorder import MessageEventRecorder
from mediatord.observability.event_schema import MemoryEventLog
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.memory.memory_store import MemoryStore
from tests.store.builders import ALICE, HOUR, NOON, ImmediateClock, make_payload

T = TypeVar("T")

INBOX = "did:key:z6MkInbox"


class ControlSocketTestCase(TestCase):
    """A store with an account and its recipient, behind a control socket."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        self.path = directory / "control.sock"
        clock = ImmediateClock()
        self.store = MemoryStore(clock, QueueLimits())
        await self.store.open()
        await self.store.grant(ALICE)
        await self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)
        self.events = MemoryEventLog()
        metrics = Metrics(CollectorRegistry(), version="1")
        recorder = MessageEventRecorder(
            clock, self.events, metrics, Pseudonymizer("plain", PseudonymKey(0, b"k" * 32))
        )
        self.writable = True
        self.operations = ControlOperations(self.store, recorder, lambda: self.writable)
        self.run_operation: Any = self.operations.run

    def serve(self, path: Path | None = None) -> ControlSocket:
        """Serve the store until the end of the test."""
        control = ControlSocket(reactor, self.run_once, ControlListener(path or self.path))
        control.privilegedStartService()
        control.startService()
        self.addCleanup(control.stopService)
        return control

    async def run_once(self, operation: str, arguments: Any) -> Any:
        return await self.run_operation(operation, arguments)

    async def ask(self, work: Callable[[ControlClient], T], path: Path | None = None) -> T:
        """What a client gets, in a thread as it blocks."""

        def connect() -> T:
            client = ControlClient(path or self.path)
            try:
                return work(client)
            finally:
                client.close()

        return await deferToThread(connect)

    async def refused(self, work: Callable[[ControlClient], Any]) -> str:
        with self.assertRaises(StartupError) as caught:
            await self.ask(work)
        return str(caught.exception)

    async def put(self, *ids: str) -> None:
        await self.store.enqueue(INBOX, [make_payload(id) for id in ids], expires_at=NOON + HOUR)


class OperationTests(ControlSocketTestCase):
    async def test_list_and_purge(self) -> None:
        """Several operations go over one connection; removals are counted and logged."""
        self.serve()
        await self.put("a", "b", "c")

        def work(client: ControlClient) -> list[str]:
            access = StoreAccess(client.call)
            queues, totals = access.list_queues(None, 10)
            self.assertEqual([(one.did, one.messages) for one in queues], [(INBOX, 3)])
            self.assertEqual((totals.queues, totals.messages), (1, 3))
            self.assertEqual(access.find_did(f"{INBOX}#key"), INBOX)
            self.assertIn(ALICE, list(access.list_dids()))
            entries = access.list_entries(MessageFilter(INBOX, ids=("a", "c")))
            self.assertEqual(access.purge(entries), entries)
            return [one.id for one in access.list_entries(MessageFilter(INBOX))]

        self.assertEqual(await self.ask(work), ["b"])
        self.assertEqual([event for event, _ in self.events.events], ["msg.remove", "msg.remove"])
        self.assertEqual((await self.store.read_ledger()).didcomm.removed, 2)

    async def test_accounts(self) -> None:
        """Accounts are listed, and removed once their registrations and queues are."""
        self.serve()

        def work(client: ControlClient) -> list[bool]:
            access = StoreAccess(client.call)
            accounts, total = access.list_accounts(10)
            self.assertEqual(([one.did for one in accounts], total), ([ALICE], 1))
            self.assertEqual(access.list_recipients(ALICE), [INBOX])
            access.unregister_recipients(ALICE)
            self.assertEqual(access.list_queued_dids(ALICE), [])
            return [access.remove_account(ALICE), access.remove_account(ALICE)]

        self.assertEqual(await self.ask(work), [True, False])
        self.assertIsNone(await self.store.get_account(ALICE))

    async def test_refusals(self) -> None:
        """What is not carried out is refused with a line, and the connection can be used on."""
        self.serve()
        await self.put("a")
        ids = [str(number) for number in range(101)]
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("nothing", {}),
            ("find_did", {"did": 1}),
            ("find_did", {"did": "\udcff"}),
            ("list_queues", {"offset": 0, "limit": 1001}),
            ("list_queues", {"offset": -1, "limit": 1}),
            ("list_queues", {"offset": 0, "limit": True}),
            ("list_queues", {"offset": 0, "limit": 1, "half": "other"}),
            ("purge", {"did": INBOX, "half": "didcomm", "ids": ids}),
            ("purge", {"did": INBOX, "half": "didcomm", "ids": [1]}),
            ("purge", {"did": INBOX, "half": None, "ids": []}),
        ]
        for operation, arguments in wrong:
            line = await self.refused(lambda client: client.call(operation, **arguments))  # noqa: B023  called at once
            self.assertNotIn("\n", line)

        def work(client: ControlClient) -> Any:
            with self.assertRaises(StartupError):
                client.call("nothing")
            return client.call("find_did", did=INBOX)

        self.assertEqual(await self.ask(work), INBOX)

    async def test_nothing_is_removed_that_cannot_be_logged(self) -> None:
        """While the event log takes no lines, entries stay."""
        self.serve()
        await self.put("a")
        self.writable = False
        line = await self.refused(lambda client: client.call("purge", did=INBOX, half="didcomm", ids=["a"]))
        self.assertEqual(line, "the event log cannot be written, so nothing is removed")
        self.assertEqual((await self.store.read_ledger()).didcomm.waiting, 1)

    async def test_unavailable(self) -> None:
        """A store that does not answer and a daemon that stops are reported; other failures are logged."""
        self.serve()
        await self.store.close()
        self.assertEqual(
            await self.refused(lambda client: client.call("count_accounts")), "the store is not available"
        )

        async def stopping(operation: str, arguments: Any) -> Any:
            raise ShutdownInProgress

        async def broken(operation: str, arguments: Any) -> Any:
            raise RuntimeError("secret")

        self.run_operation = stopping
        self.assertEqual(await self.refused(lambda client: client.call("count_accounts")), "the daemon is stopping")
        self.run_operation = broken
        self.assertNotIn("secret", await self.refused(lambda client: client.call("count_accounts")))
        self.assertEqual(len(self.flushLoggedErrors()), 1)


class ListenerTests(ControlSocketTestCase):
    async def test_file(self) -> None:
        """Only the owner may use it, and it goes when the daemon stops."""
        control = self.serve()
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o600)
        control.stopService()
        self.assertFalse(self.path.exists())
        with self.assertRaises(NoDaemon):
            await self.ask(lambda client: client.call("count_accounts"))

    async def test_long_path(self) -> None:
        """A path may be longer than an address."""
        directory = self.path.parent / ("x" * 120)
        directory.mkdir()
        path = directory / "control.sock"
        control = self.serve(path)
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts"), path), 1)
        control.stopService()
        self.assertEqual(list(directory.iterdir()), [])

    async def test_stale(self) -> None:
        """The file of a daemon that was killed is replaced; nobody listens there until then."""
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(self.path))
        with self.assertRaises(NoDaemon):
            await self.ask(lambda client: client.call("count_accounts"))
        self.serve()
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_live(self) -> None:
        """Where another daemon listens, this one does not start, and takes nothing from the other."""
        self.serve()
        other = ControlListener(self.path)
        with self.assertRaisesRegex(StartupError, f"control_socket: another daemon listens on {self.path}"):
            other.bind()
        other.close()
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_not_possible(self) -> None:
        """A file that is no socket, and a directory that is not there, are reported."""
        self.path.write_text("precious")
        with self.assertRaisesRegex(StartupError, "exists and is not a socket"):
            ControlListener(self.path).bind()
        self.assertEqual(self.path.read_text(), "precious")
        with self.assertRaisesRegex(StartupError, "No such file or directory"):
            ControlListener(self.path.parent / "gone" / "control.sock").bind()


class BoundTests(ControlSocketTestCase):
    async def test_other_users(self) -> None:
        """A connection of another user is closed without an answer, whatever the mode of the file."""
        control = self.serve()
        self.patch(server_module, "get_peer_credentials", lambda connection: (1, os.geteuid() + 1))
        self.assertIn("does not answer", await self.refused(lambda client: client.call("count_accounts")))
        self.patch(server_module, "get_peer_credentials", lambda connection: (1, 0))
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)
        control.stopService()

    async def test_own_credentials(self) -> None:
        """The kernel says which process has connected, and of which user it is."""
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            self.assertEqual(server_module.get_peer_credentials(ours), (os.getpid(), os.geteuid()))
        await succeed(None)

    async def test_large_request(self) -> None:
        """A request that is too large is not kept."""
        self.serve()
        self.assertIn(
            "does not answer", await self.refused(lambda client: client.call("find_did", did="x" * 300_000))
        )

    async def test_many_connections(self) -> None:
        """More connections than allowed are closed at once; room is given back when others go."""
        self.serve()

        def work() -> Any:
            clients = [ControlClient(self.path) for _ in range(16)]
            for client in clients:
                self.assertEqual(client.call("count_accounts"), 1)
            one_too_many = ControlClient(self.path)
            with self.assertRaises(StartupError):
                one_too_many.call("count_accounts")
            for client in (*clients, one_too_many):
                client.close()

        await deferToThread(work)
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_not_http(self) -> None:
        """What is no request of the protocol is answered with 400."""
        self.serve()

        def work(raw: bytes) -> bytes:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.path))
                connection.sendall(raw)
                return connection.recv(65_536)

        for raw in (
            b"GET /v1/count_accounts HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /v1/count_accounts HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
            b"POST /v1/count_accounts HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{",
            b"nonsense\r\n\r\n",
        ):
            answer = await deferToThread(work, raw)
            self.assertTrue(answer.startswith(b"HTTP/1.1 400 "), answer)
