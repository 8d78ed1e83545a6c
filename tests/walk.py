"""
Counts the files, calls and commits that one request of each kind passes in a running daemon: `make walk`.

The daemon is a real one, a process with real sockets and SQLite; :mod:`tests.walk_tracer` records its calls.
Each request is made several times after a warm-up, and of each process the round with its fewest calls counts, which
is one without a timer in between. So the counts are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from treq.client import HTTPClient
from twisted.internet.task import deferLater, react
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, HTTPConnectionPool

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.decentrl_client import DecentrlWallet
from mediatord.wallet.decentrl_client import discover_decentrl_mediator as discover_decentrl
from mediatord.wallet.didcomm_client import DIDCommWallet, discover_mediator
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from mediatord.wallet.didcomm_v1_client import V1Wallet, fetch_v1_invitation
from mediatord.wallet.didcomm_v1_socket import connect_v1_socket
from mediatord.wallet.temporary_daemon import TemporaryDaemon, run_temporary_daemon
from tests.integration.message_load import prepare_forward

ROUNDS = 25
WARM_UP_ROUNDS = 5
# Suffix of the rows of a daemon that does not serve DIDComm v1.
WITHOUT_V1 = ", without DIDComm v1"
# A request is over once there was no call for this time. Short, as several timers of the daemon run every second.
SETTLED_SECONDS = 0.05
# Time for processes to start.
PATIENCE_SECONDS = 120.0
# Tries until the kernel has given two connections to two workers.
MAX_CONNECTIONS = 64
# The function that is entered where a push from another worker arrives, and for no other frame: workers may greet
# each other later.
NOTIFIED = "_OrderedPusher.push"

# Called for each transaction that changes the database.
COMMIT = "StoreConnection.commit_batch"

SETTINGS = {
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "1000000",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "1000000",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "1000000",
    "MEDIATORD_LIMITS__ACCOUNTS_PER_ADDRESS_PER_DAY": "1000000",
    "MEDIATORD_DIDCOMM_V1__CONNECTIONS_PER_MINUTE": "1000000",
    # Some pushes are acknowledged rounds later; they must not be requeued meanwhile.
    "MEDIATORD_QUEUE__DELIVERED_TIMEOUT": "1h",
}

Call = tuple[int, str, str]


@dataclass(frozen=True)
class Walk:
    """
    Calls of one request in one process.

    :param calls: thread, file below `mediatord/` and qualified name of each.
    """

    calls: Sequence[Call]

    @property
    def files(self) -> set[str]:
        """Files that were entered."""
        return {file for _, file, _ in self.calls}

    def enters(self, function: str) -> bool:
        """Whether a function was called."""
        return any(called == function for _, _, called in self.calls)

    @property
    def frames(self) -> int:
        """Number of calls."""
        return len(self.calls)

    @property
    def commits(self) -> int:
        """Number of transactions that change the database."""
        return sum(called == COMMIT for _, _, called in self.calls)

    @property
    def changes(self) -> int:
        """Number of calls in another file than the previous call of the same thread."""
        last: dict[int, str] = {}
        changes = 0
        for thread, file, _ in self.calls:
            changes += last.get(thread, file) != file
            last[thread] = file
        return changes


class Tracers:
    """
    The recorders in the processes of one daemon.

    :param processes: so many are waited for: a daemon may be healthy before the last of its workers runs.
    """

    def __init__(self, directory: Path, processes: int) -> None:
        self._streams: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        self._connect(directory)
        while len(self._streams) < processes:
            assert time.monotonic() < deadline, f"{len(self._streams)} of {processes} processes record their calls"
            time.sleep(0.1)
            self._connect(directory)

    def _connect(self, directory: Path) -> None:
        """Connect to recorders that have started since."""
        for path in sorted(directory.iterdir()):
            if path.suffix or not path.name.isdigit() or int(path.name) in self._streams:
                continue
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                connection.close()
                continue
            self._streams[int(path.name)] = connection.makefile("rw")

    def request(self, command: str) -> dict[int, Any]:
        """Send a command; the response of each process."""
        for stream in self._streams.values():
            stream.write(command + "\n")
            stream.flush()
        return {pid: json.loads(stream.readline()) for pid, stream in self._streams.items()}

    async def record(self, reactor: Any, request: Callable[[], Awaitable[object]]) -> dict[int, Walk]:
        """Make a request; return the calls of each process."""
        self.request("start")
        await request()
        seen = -1
        while (count := sum(self.request("count").values())) != seen:
            seen = count
            await deferLater(reactor, SETTLED_SECONDS)
        return {pid: Walk([tuple(call) for call in calls]) for pid, calls in self.request("stop").items()}

    async def record_fewest(self, reactor: Any, request: Callable[[], Awaitable[object]]) -> dict[int, Walk]:
        """
        Record several rounds; for each process, the round with fewest calls, of those in which another worker had it
        push if there are some: a push may come when the calls of a busy process seem to have ended.
        """
        for _ in range(WARM_UP_ROUNDS):
            await request()
        rounds = [await self.record(reactor, request) for _ in range(ROUNDS)]
        fewest = {}
        for pid in rounds[0]:
            walks = [one[pid] for one in rounds]
            notified = [walk for walk in walks if walk.enters(NOTIFIED)]
            fewest[pid] = min(notified or walks, key=lambda walk: walk.frames)
        return fewest


@contextmanager
def start_traced_daemon(**settings: str) -> Iterator[tuple[TemporaryDaemon, Path]]:
    """A daemon whose processes record their calls, and the directory of their recorders."""
    with tempfile.TemporaryDirectory(prefix="walk-") as temporary:
        directory = Path(temporary)
        (directory / "sitecustomize.py").write_text(
            f"from tests.walk_tracer import install\ninstall({str(directory)!r})\n", encoding="utf-8"
        )
        path = [str(directory), str(Path(__file__).parents[1])]
        former = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(path + ([former] if former else []))
        try:
            with run_temporary_daemon({**SETTINGS, **settings}) as daemon:
                yield daemon, directory
        finally:
            if former is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = former


def persistent_http(reactor: Any) -> HTTPClient:
    """HTTP client with persistent connections."""
    return HTTPClient(Agent(reactor, pool=HTTPConnectionPool(reactor)))


class Sender:
    """Posts forwards over one persistent connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._connection = HTTPConnection(parts.hostname, parts.port, timeout=120)
        self._connection.connect()

    async def post(self, body: bytes, *, chunked: bool = False) -> None:
        """Return when the mediator has answered 202. :param chunked: a form that only the general HTTP path reads."""
        await deferToThread(self._post, body, chunked)

    def _post(self, body: bytes, chunked: bool) -> None:
        headers = {"Content-Type": ENCRYPTED_MEDIA_TYPE}
        if chunked:
            self._connection.request("POST", "/didcomm", iter([body]), headers, encode_chunked=True)
            response = self._connection.getresponse()
        else:
            # In one segment: http.client sends head and body apart, which arrive together or not.
            head = [f"{name}: {value}" for name, value in {**headers, "Content-Length": str(len(body))}.items()]
            lines = ["POST /didcomm HTTP/1.1", f"Host: {self._connection.host}", *head, "", ""]
            self._connection.sock.sendall("\r\n".join(lines).encode("ascii") + body)
            response = HTTPResponse(self._connection.sock, method="POST")
            response.begin()
        response.read()
        assert response.status == 202, response.status


async def enrol_wallet(reactor: Any, http: HTTPClient, url: str) -> DIDCommWallet:
    """A wallet with an account at the daemon."""
    wallet = DIDCommWallet.generate(await discover_mediator(http, url), http, reactor)
    await wallet.enrol()
    assert await wallet.register() == ["success"]
    return wallet


async def open_live_socket(reactor: Any, wallet: DIDCommWallet) -> DIDCommSocket:
    """Open a socket with live delivery."""
    wallet_socket = await connect_didcomm_socket(reactor, wallet)
    await wallet_socket.live()
    return wallet_socket


async def didcomm_walks(reactor: Any, url: str, tracers: Tracers) -> dict[str, Walk]:
    """The rows of a DIDComm forward, its push and its acknowledgement."""
    http = persistent_http(reactor)
    asleep, awake = [await enrol_wallet(reactor, http, url) for _ in range(2)]
    sender = Sender(url)
    numbers = iter(range(1_000_000))

    def post(wallet: DIDCommWallet, chunked: bool = False) -> Callable[[], Awaitable[object]]:
        return lambda: sender.post(prepare_forward(wallet, str(next(numbers))).body, chunked=chunked)

    found = {
        "forward, fast path": await walk_of_single_process(tracers, reactor, post(asleep)),
        "forward, general path": await walk_of_single_process(tracers, reactor, post(asleep, chunked=True)),
    }
    # A separate connection, as for the rows before.
    sender = Sender(url)
    wallet_socket = await open_live_socket(reactor, awake)
    last: list[str] = []

    async def pushed() -> None:
        await post(awake)()
        last.append((await wallet_socket.pushed.get()).id)

    async def acknowledged() -> None:
        await wallet_socket.acknowledge([last.pop()])

    found["forward and live push"] = await walk_of_single_process(tracers, reactor, pushed)
    found["acknowledgement"] = await walk_of_single_process(tracers, reactor, acknowledged)
    return found


async def v1_walks(reactor: Any, url: str, tracers: Tracers) -> dict[str, Walk]:
    """The rows of a DIDComm v1 handshake, a forward, its push and its acknowledgement."""
    http = persistent_http(reactor)
    invitation = await fetch_v1_invitation(http, url)

    async def connected() -> V1Wallet:
        return await V1Wallet.connect(invitation, http, reactor)

    asleep, awake = await connected(), await connected()
    for wallet in (asleep, awake):
        await wallet.enrol()
        await wallet.add_key()
    sender, last = Sender(url), list[str]()

    async def post(wallet: V1Wallet) -> None:
        await sender.post(wallet.make_forward(list(wallet.keys)[-1], "hello"))

    found = {
        "DIDComm v1 handshake": await walk_of_single_process(tracers, reactor, connected),
        "DIDComm v1 forward": await walk_of_single_process(tracers, reactor, lambda: post(asleep)),
    }
    wallet_socket = await connect_v1_socket(reactor, awake)
    await wallet_socket.live()

    async def pushed() -> None:
        await post(awake)
        last.append((await wallet_socket.pushed.get()).id)

    async def acknowledged() -> None:
        await wallet_socket.acknowledge([last.pop()])

    found["DIDComm v1 forward and live push"] = await walk_of_single_process(tracers, reactor, pushed)
    found["DIDComm v1 acknowledgement"] = await walk_of_single_process(tracers, reactor, acknowledged)
    return found


async def decentrl_walks(reactor: Any, url: str, tracers: Tracers) -> dict[str, Walk]:
    """The row of a Decentrl TWO_WAY_PRIVATE command."""
    http = persistent_http(reactor)
    alice, bob = [
        DecentrlWallet.generate(name, await discover_decentrl(http, url), http, reactor) for name in ("alice", "bob")
    ]
    for wallet in (alice, bob):
        await wallet.register()
    await alice.request_contract(bob.did)
    (request,) = (await bob.pending_requests()).items
    accepted = bob.accept(request)
    await bob.save_contract(accepted)
    await bob.respond(accepted)
    await bob.acknowledge_requests([request])
    await alice.conclude()
    return {"TWO_WAY_PRIVATE": await walk_of_single_process(tracers, reactor, lambda: alice.send(bob.did, "hello"))}


async def worker_walks(reactor: Any, url: str, tracers: Tracers) -> dict[str, Walk]:
    """
    The rows of a push whose sender and whose recipient's socket are at two workers.

    :raise AssertionError: the kernel gave all connections to one worker.
    """
    http = persistent_http(reactor)
    wallet = await enrol_wallet(reactor, http, url)
    wallet_socket = await open_live_socket(reactor, wallet)
    numbers = iter(range(1_000_000))
    for _ in range(MAX_CONNECTIONS):
        sender = Sender(url)

        async def pushed(sender: Sender = sender) -> None:
            await sender.post(prepare_forward(wallet, str(next(numbers))).body)
            delivered = await wallet_socket.pushed.get()
            await wallet_socket.acknowledge([delivered.id])

        async def only_pushed(sender: Sender = sender) -> None:
            await sender.post(prepare_forward(wallet, str(next(numbers))).body)
            await wallet_socket.pushed.get()

        await pushed()
        # Timers run in both processes: only the worker with the socket serves a push.
        if any(walk.enters(NOTIFIED) for walk in (await tracers.record(reactor, only_pushed)).values()):
            walks = (await tracers.record_fewest(reactor, only_pushed)).values()
            (socket_side,) = [walk for walk in walks if walk.enters(NOTIFIED)]
            sender_side = max((walk for walk in walks if walk is not socket_side), key=lambda walk: walk.frames)
            return {
                "push across workers, sender's side": sender_side,
                "push across workers, socket's side": socket_side,
            }
    raise AssertionError("all connections are at one worker")


async def walk_of_single_process(tracers: Tracers, reactor: Any, request: Callable[[], Awaitable[object]]) -> Walk:
    """The walk in the only process."""
    return max((await tracers.record_fewest(reactor, request)).values(), key=lambda walk: walk.frames)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="make walk", description="Count files and calls of one request of each kind."
    )
    parser.add_argument("--calls", metavar="ROW", help="print the calls of the rows whose name contains ROW")
    parser.add_argument("--json", action="store_true", help="print the numbers of each row as JSON")
    options = parser.parse_args(arguments)

    async def run(reactor: Any) -> None:
        found: dict[str, Walk] = {}
        with start_traced_daemon() as (daemon, directory):
            tracers = Tracers(directory, 1)
            found |= await didcomm_walks(reactor, daemon.url, tracers)
            found |= await v1_walks(reactor, daemon.url, tracers)
            found |= await decentrl_walks(reactor, daemon.url, tracers)
        with start_traced_daemon(MEDIATORD_DIDCOMM_V1__ENABLED="false") as (daemon, directory):
            walks = await didcomm_walks(reactor, daemon.url, Tracers(directory, 1))
            found |= {name + WITHOUT_V1: walk for name, walk in walks.items()}
        with start_traced_daemon(MEDIATORD_WORKERS="2") as (daemon, directory):
            found |= await worker_walks(reactor, daemon.url, Tracers(directory, 1 + 2))
        if options.json:
            numbers = {name: (len(one.files), one.frames, one.changes, one.commits) for name, one in found.items()}
            print(json.dumps(numbers))
            return
        print(f"{'request':46}{'files':>6}{'frames':>8}{'changes':>9}{'commits':>9}")
        for name, walk in found.items():
            print(f"{name:46}{len(walk.files):6}{walk.frames:8}{walk.changes:9}{walk.commits:9}")
            if options.calls and options.calls in name:
                for thread, file, function in walk.calls:
                    print(f"    {thread % 10000:5} {file}:{function}")

    react(run)


if __name__ == "__main__":
    main(sys.argv[1:])
