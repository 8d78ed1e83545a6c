"""The control socket on a real UNIX socket with a memory store, and its client."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from prometheus_client import CollectorRegistry
from twisted.internet import reactor  # noqa: TID251  the sockets are real
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.internet.threads import deferToThread
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from mediatord.cli.store_access import StoreAccess
from mediatord.config.settings import Config
from mediatord.control import server as server_module
from mediatord.control.client import ControlClient, NoDaemon
from mediatord.control.queue_and_account_operations import ControlOperations
from mediatord.control.server import ControlListener, ControlSite, ControlSocket
from mediatord.errors import ShutdownInProgress, StartupError
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.observability.memory_event_log import MemoryEventLog
from tests.store.builders import ALICE, HOUR, NOON, ImmediateClock, make_payload

T = TypeVar("T")

INBOX = "did:key:z6MkInbox"
OTHER_USER = 65_534


class PeerTransport(StringTransport):
    """In-memory transport with the credentials of a real socket."""

    def __init__(self, peer: socket.socket) -> None:
        super().__init__()
        self._peer = peer

    def getHandle(self) -> socket.socket:  # noqa: N802  Twisted's name
        """As the transport of a real connection."""
        return self._peer


def make_request(operation: str, body: bytes = b"{}") -> bytes:
    """Encode a request."""
    return b"POST /v1/%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        operation.encode(),
        len(body),
        body,
    )


async def run_as_other_user(work: Callable[[], str]) -> str:
    """Run a function in a child process of another user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            os.write(write, work().encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)

    def wait() -> str:
        with open(read, "rb") as output:
            text = output.read().decode()
        os.waitpid(child, 0)
        return text

    return await deferToThread(wait)


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
        self.clock = clock
        self.events = MemoryEventLog()
        self.writable = True
        self.log_dids("plain")

    def log_dids(self, mode: Literal["plain", "keyed"]) -> Pseudonymizer:
        """Log removals in a mode of `log.dids`."""
        pseudonymizer = Pseudonymizer(mode, PseudonymKey(0, b"k" * 32))
        metrics = Metrics(CollectorRegistry(), version="1")
        recorder = EventRecorder(self.clock, self.events, metrics, pseudonymizer)
        self.operations = ControlOperations(self.store, lambda: recorder if self.writable else None)
        self.run_operation: Any = self.operations.run
        return pseudonymizer

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
        """Run a blocking client in a thread."""

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
        """Several operations use one connection; removals are counted and logged."""
        self.serve()
        await self.put("a", "b", "c")

        def work(client: ControlClient) -> list[str]:
            access = StoreAccess(client.call, Config())
            queues, totals = access.list_queues(None, 10)
            self.assertEqual([(element.did, element.messages) for element in queues], [(INBOX, 3)])
            self.assertEqual((totals.queues, totals.messages), (1, 3))
            self.assertEqual(access.find_did(f"{INBOX}#key"), INBOX)
            self.assertIn(ALICE, list(access.list_dids()))
            entries = [entry for entry in access.list_entries(INBOX) if entry.id != "b"]
            self.assertEqual(access.purge(entries), entries)
            return [item.id for item in access.list_entries(INBOX)]

        self.assertEqual(await self.ask(work), ["b"])
        self.assertEqual([event for event, _ in self.events.events], ["msg.remove", "msg.remove"])
        self.assertEqual((await self.store.read_ledger()).didcomm.removed, 2)

    async def test_live_session(self) -> None:
        """A socket of this process counts, and one of another node while the node's lease lasts."""
        connected: set[str] = set()

        async def has_subscriber(did: str) -> bool:
            return did in connected

        self.run_operation = ControlOperations(self.store, lambda: None, has_subscriber).run
        self.serve()

        async def is_live() -> bool:
            return await self.ask(lambda client: StoreAccess(client.call, Config()).has_live_session(INBOX))

        self.assertIs(await is_live(), False)
        connected.add(INBOX)
        self.assertIs(await is_live(), True)
        connected.clear()
        await self.store.cluster.join(ClusterNode("n2", "boot", "tcp:host=127.0.0.1:port=1", b""), 10.0)
        await self.store.cluster.add_presence("boot", [INBOX])
        self.assertIs(await is_live(), True)
        self.clock.advance(11)
        self.assertIs(await is_live(), False)

    async def test_purge_lines(self) -> None:
        """Removals are logged with DIDs and ids or with pseudonyms, as `log.dids` says."""
        self.serve()

        def purge(client: ControlClient) -> None:
            self.assertEqual(client.call("purge", did=INBOX, protocol="didcomm", ids=["a"]), ["a"])

        modes: tuple[Literal["plain", "keyed"], ...] = ("plain", "keyed")
        for mode in modes:
            pseudonymizer = self.log_dids(mode)
            self.events.events.clear()
            await self.put("a")
            await self.ask(purge)
            ((event, fields),) = self.events.events
            self.assertEqual((event, fields["reason"]), ("msg.remove", "purged"))
            if mode == "plain":
                self.assertEqual((fields["rcpt"], fields["msg"]), (INBOX, "a"))
            else:
                expected = pseudonymizer.did(INBOX), pseudonymizer.message("a")
                self.assertEqual((fields["rcpt"], fields["msg"]), expected)
                self.assertNotIn(INBOX, repr(fields))

    async def test_accounts(self) -> None:
        """Accounts are listed, and removed once their registrations and queues are."""
        self.serve()

        def work(client: ControlClient) -> list[bool]:
            access = StoreAccess(client.call, Config())
            accounts, total = access.list_accounts(10)
            self.assertEqual(([item.did for item in accounts], total), ([ALICE], 1))
            self.assertEqual(access.list_recipients(ALICE), [INBOX])
            client.call("unregister_recipients", account=ALICE)
            self.assertEqual(client.call("list_queued_dids", account=ALICE), [])
            return [client.call("remove_account", account=ALICE) for _ in range(2)]

        self.assertEqual(await self.ask(work), [True, False])
        self.assertIsNone(await self.store.get_account(ALICE))

    async def test_refusals(self) -> None:
        """A refused operation has an error line, and the connection stays usable."""
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
            ("list_queues", {"offset": 0, "limit": 1, "protocol": "other"}),
            ("list_entries", {"did": INBOX, "protocol": "didcomm", "after": "x", "limit": 1}),
            ("purge", {"did": INBOX, "protocol": "didcomm", "ids": ids}),
            ("purge", {"did": INBOX, "protocol": "didcomm", "ids": [1]}),
            ("purge", {"did": INBOX, "protocol": None, "ids": []}),
        ]
        for operation, arguments in wrong:
            line = await self.refused(lambda client: client.call(operation, **arguments))  # noqa: B023  called at once
            self.assertNotIn("\n", line)

        def work(client: ControlClient) -> Any:
            with self.assertRaises(StartupError):
                client.call("nothing")
            return client.call("find_did", did=INBOX)

        self.assertEqual(await self.ask(work), INBOX)

    async def test_nothing_is_removed_unlogged(self) -> None:
        """While the event log refuses lines, messages stay."""
        self.serve()
        await self.put("a")
        self.writable = False
        line = await self.refused(lambda client: client.call("purge", did=INBOX, protocol="didcomm", ids=["a"]))
        self.assertEqual(line, "nothing was removed: the event log cannot be written")
        self.assertEqual((await self.store.read_ledger()).didcomm.waiting, 1)

    async def test_unavailable(self) -> None:
        """An unresponsive store and a stopping daemon are reported; other failures are logged."""
        self.serve()
        await self.store.close()
        self.assertEqual(await self.refused(lambda client: client.call("count_accounts")), "the store is unavailable")

        async def stopping(operation: str, arguments: Any) -> Any:
            raise ShutdownInProgress

        async def broken(operation: str, arguments: Any) -> Any:
            raise RuntimeError("secret")

        self.run_operation = stopping
        self.assertEqual(
            await self.refused(lambda client: client.call("count_accounts")), "the daemon is shutting down"
        )
        self.run_operation = broken
        self.assertNotIn("secret", await self.refused(lambda client: client.call("count_accounts")))
        self.assertEqual(len(self.flushLoggedErrors()), 1)


class ListenerTests(ControlSocketTestCase):
    async def test_file_mode(self) -> None:
        """Only the owner may use the file, and it is removed when the daemon stops."""
        control = self.serve()
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o600)
        control.stopService()
        self.assertFalse(self.path.exists())
        with self.assertRaises(NoDaemon):
            await self.ask(lambda client: client.call("count_accounts"))

    async def test_long_path(self) -> None:
        """The path may be longer than a socket address."""
        directory = self.path.parent / ("x" * 120)
        directory.mkdir()
        path = directory / "control.sock"
        control = self.serve(path)
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts"), path), 1)
        control.stopService()
        self.assertEqual(list(directory.iterdir()), [])

    async def test_stale_file(self) -> None:
        """The file of a killed daemon is replaced; nothing listens on it before."""
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(self.path))
        with self.assertRaises(NoDaemon):
            await self.ask(lambda client: client.call("count_accounts"))
        self.serve()
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_live_socket(self) -> None:
        """If another daemon listens, this one does not start and does not affect the other."""
        self.serve()
        other = ControlListener(self.path)
        with self.assertRaisesRegex(StartupError, f"control_socket: another daemon listens on {self.path}"):
            other.bind()
        other.close()
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_no_socket(self) -> None:
        """A file that is no socket, or a symbolic link, is neither replaced nor followed."""
        precious = self.path.with_name("precious")
        precious.write_text("precious")
        self.path.write_text("precious")
        links = [precious, self.path.with_name("gone"), self.path.with_name("live")]
        self.serve(links[-1])
        with self.assertRaisesRegex(StartupError, "exists and is not a socket"):
            ControlListener(self.path).bind()
        self.assertEqual(self.path.read_text(), "precious")
        for target in links:
            self.path.unlink()
            self.path.symlink_to(target)
            with self.assertRaisesRegex(StartupError, "exists and is not a socket"):
                ControlListener(self.path).bind()
            self.assertEqual(self.path.readlink(), target)
        self.assertEqual((precious.read_text(), links[1].exists()), ("precious", False))

    async def test_cannot_bind(self) -> None:
        """If no socket can be bound, one line says why, and the daemon starts without it."""
        file = self.path.with_name("file")
        file.write_text("")
        for directory, reason in (
            (self.path.with_name("gone"), "No such file or directory"),
            (file, "Not a directory"),
            (Path("/proc"), "No such file or directory"),
            (self.path.with_name("x" * 300), "File name too long"),
        ):
            path = directory / "control.sock"
            with capturedLogs() as logged:
                control = self.serve(path)
            self.assertEqual(
                [(event["log_level"].name, formatEvent(event)) for event in logged],
                [
                    (
                        "error",
                        f"control_socket: cannot listen on {path}: {reason}; commands cannot connect to this daemon",
                    )
                ],
            )
            self.assertNotIn("log_failure", logged[0])
            control.stopService()

    @pytest.mark.system
    async def test_read_only_directory(self) -> None:
        """The daemon starts in an unwritable directory, with or without a stale file."""
        directory = self.path.parent
        names = ["control.sock", "stale", "another-user's"]
        for name in names[1:]:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(directory / name))
        if os.geteuid() == 0:
            os.chown(directory / "stale", OTHER_USER, OTHER_USER)
        directory.chmod(0o555)

        def bind() -> str:
            with capturedLogs() as logged:
                results = [ControlListener(directory / name).bind() for name in names]
            return f"{results} {[formatEvent(event) for event in logged]}"

        output = await run_as_other_user(bind) if os.geteuid() == 0 else bind()
        directory.chmod(0o700)
        self.assertTrue(output.startswith("[False, False, False] "), output)
        self.assertEqual(output.count(": Permission denied; commands cannot connect to this daemon"), 3, output)

    async def test_mode_is_set_before_accepting(self) -> None:
        """The file has its mode before connections are accepted; the umask does not matter and stays."""
        modes = []

        class ObservedSocket(socket.socket):
            def listen(self, backlog: int = 0, /) -> None:
                modes.append(stat.S_IMODE(os.stat(self.getsockname()).st_mode))
                super().listen(backlog)

            def bind(self, address: Any, /) -> None:
                masks.append(os.umask(0))
                super().bind(address)

        masks: list[int] = []
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        self.patch(socket, "socket", ObservedSocket)
        listener = ControlListener(self.path)
        listener.bind()
        listener.close()
        self.assertEqual((modes, masks), ([0o600], [0]))

    async def test_file_that_cannot_be_removed(self) -> None:
        """The daemon stops nevertheless."""
        control = self.serve()

        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError

        self.patch(Path, "unlink", refuse)
        control.stopService()
        self.assertTrue(self.path.is_socket())


class BoundsTests(ControlSocketTestCase):
    async def test_other_users(self) -> None:
        """A connection of another user is closed without a response, whatever the mode of the file."""
        control = self.serve()
        self.patch(server_module, "get_peer_credentials", lambda connection: (1, os.geteuid() + 1))
        self.assertIn("does not respond", await self.refused(lambda client: client.call("count_accounts")))
        self.patch(server_module, "get_peer_credentials", lambda connection: (1, 0))
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)
        control.stopService()

    @pytest.mark.system
    async def test_other_user_for_real(self) -> None:
        """Another user is refused by the mode of the file, or else by the daemon."""
        if os.geteuid() != 0:
            raise unittest.SkipTest("only root can run a process as another user")
        self.serve()
        self.path.parent.chmod(0o755)

        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(self.path))
                except PermissionError:
                    return "not connected"
                with contextlib.suppress(ConnectionError):
                    connection.sendall(make_request("count_accounts"))
                    return repr(connection.recv(65_536))
                return "b''"

        self.assertEqual(await run_as_other_user(connect), "not connected")
        self.path.chmod(0o666)
        with capturedLogs() as logged:
            self.assertEqual(await run_as_other_user(connect), "b''")
        (line,) = [formatEvent(event) for event in logged]
        self.assertRegex(line, f"^control socket: refused a connection from user {OTHER_USER}, process [0-9]+$")
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_peer_credentials(self) -> None:
        """The kernel reports process and user of the peer."""
        server_end, client_end = socket.socketpair(socket.AF_UNIX)
        with server_end, client_end:
            self.assertEqual(server_module.get_peer_credentials(server_end), (os.getpid(), os.geteuid()))
        await succeed(None)

    async def test_oversized_request(self) -> None:
        """An oversized request is not buffered."""
        self.serve()
        self.assertIn(
            "does not respond", await self.refused(lambda client: client.call("find_did", did="x" * 300_000))
        )

    async def test_endless_request(self) -> None:
        """Endless headers and chunks are not buffered."""
        self.serve()
        chunked = b"POST /v1/count_accounts HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for start, more in ((b"POST /v1/", b"x" * 1000), (chunked, b"3e8\r\n" + b"x" * 1000 + b"\r\n")):

            def send(start: bytes = start, more: bytes = more) -> int:
                sent = 0
                with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(30)
                    connection.connect(str(self.path))
                    connection.sendall(start)
                    while sent < 100_000_000:
                        connection.sendall(more)
                        sent += len(more)
                return sent

            self.assertLess(await deferToThread(send), 10_000_000)
        self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)

    async def test_deep_request(self) -> None:
        """JSON that is nested too deeply is refused."""
        self.serve()

        def send() -> bytes:
            with self.connected() as connection:
                connection.sendall(make_request("count_accounts", b"[" * 200_000))
                return connection.recv(65_536)

        self.assertTrue((await deferToThread(send)).startswith(b"HTTP/1.1 400 "))

    async def test_slow_request(self) -> None:
        """A request must be complete within the timeout, which pieces of it do not prolong."""
        clock = Clock()
        server_end, client_end = socket.socketpair(socket.AF_UNIX)
        with server_end, client_end:
            channel = ControlSite(clock, self.run_once).buildProtocol(None)
            transport = PeerTransport(server_end)
            channel.makeConnection(transport)
            channel.dataReceived(make_request("count_accounts"))
            self.assertIn(b'{"result":1}', transport.value())
            transport.clear()
            for piece in make_request("count_accounts")[:59]:
                channel.dataReceived(bytes([piece]))
                clock.advance(1)
            self.assertFalse(transport.disconnecting)
            channel.dataReceived(b"x")
            clock.advance(1)
            self.assertTrue(transport.disconnecting)
            channel.connectionLost(None)
            self.assertEqual(clock.getDelayedCalls(), [])
        await succeed(None)

    async def test_slow_reader(self) -> None:
        """A client that does not read blocks no other, and gets no second response."""
        self.serve()
        runs = []

        async def list_many(operation: str, arguments: Any) -> Any:
            runs.append(operation)
            return "x" * 8_000_000

        with self.connected() as slow:
            operation, self.run_operation = self.run_operation, list_many
            await deferToThread(slow.sendall, make_request("list_dids"))
            self.assertEqual(len(await self.ask(lambda client: client.call("list_dids"))), 8_000_000)
            self.run_operation = operation
            self.assertEqual(await self.ask(lambda client: client.call("count_accounts")), 1)
            self.run_operation = list_many
            # It is not read from or disconnected; in neither case does the operation run again.
            await deferToThread(slow.sendall, make_request("list_dids"))
            self.assertEqual(len(await self.ask(lambda client: client.call("list_dids"))), 8_000_000)
            self.assertEqual(len(runs), 3)

    async def test_large_responses(self) -> None:
        """A client that reads gets large responses one after the other on one connection."""
        self.serve()

        async def list_many(operation: str, arguments: Any) -> Any:
            return "x" * 1_000_000

        self.run_operation = list_many
        sizes = await self.ask(lambda client: [len(client.call("list_dids")) for _ in range(20)])
        self.assertEqual(sizes, [1_000_000] * 20)

    async def test_pipelined_requests(self) -> None:
        """Of pipelined requests only as many run as there is room for their responses."""
        self.serve()
        runs = []

        async def list_many(operation: str, arguments: Any) -> Any:
            runs.append(operation)
            return "x" * 8_000_000

        self.run_operation = list_many
        with self.connected() as slow:
            await deferToThread(slow.sendall, make_request("list_dids") * 50)
            await self.ask(lambda client: client.call("list_dids"))
            self.assertEqual(len(runs), 2)

    async def test_stop_during_listing(self) -> None:
        """The client is disconnected at once, and a late result is dropped."""
        control = self.serve()
        started: Deferred[None] = Deferred()
        listing: Deferred[Any] = Deferred()

        async def list_slowly(operation: str, arguments: Any) -> Any:
            started.callback(None)
            return await listing

        self.run_operation = list_slowly
        request = Deferred.fromCoroutine(self.refused(lambda client: client.call("list_dids")))
        await started
        control.stopService()
        self.assertIn(f"the daemon at {self.path} does not respond: ", await request)
        self.assertFalse(self.path.exists())
        listing.callback([])
        self.assertEqual(self.flushLoggedErrors(), [])

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self.path))
            yield connection

    async def test_many_connections(self) -> None:
        """Connections over the limit are closed at once; closed ones make room."""
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
        """Anything but a request of the protocol is a 400."""
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
