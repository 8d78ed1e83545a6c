"""A whole mediator in memory, with the clock in the test's hand and sockets that only note what they are told."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.core_services import CoreServices
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.config.settings import Config
from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import StoreUnavailable
from mediatord.identity.key_file import create_keys
from mediatord.protocol.didcomm import json_web_signature
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.messages import QueueLimits, StoreLedger
from mediatord.wallet.didcomm_client import DeliveredMessage, read_delivery
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    DIDDocumentCache,
    OpenedMessage,
    anoncrypt,
    authcrypt,
    build_forward,
    compose_message,
    open_problem_report,
    unpack_message,
)
from tests.ledger_checks import assert_ledger_balanced
from tests.store.builders import MultiStepMemoryStore

NOW = 1_800_000_000.0
PEER = "192.0.2.1"

CM3 = "https://didcomm.org/coordinate-mediation/3.0"
CM2 = "https://didcomm.org/coordinate-mediation/2.0"
MP = "https://didcomm.org/messagepickup/3.0"
PING = "https://didcomm.org/trust-ping/2.0/ping"

T = TypeVar("T")


class FakeSocket:
    """An open socket; what is sent to it is kept."""

    def __init__(self, client: str = PEER, *, takes: bool = True) -> None:
        self.client = client
        self.name = f"socket-{id(self):x}"
        self.takes = takes
        self.frames: list[bytes] = []
        self.codes: list[int] = []

    def send(self, frame: bytes) -> bool:
        """Keep the frame, unless this socket is stuck."""
        if self.takes:
            self.frames.append(frame)
        return self.takes

    def close(self, code: int, reason: str) -> None:
        """Keep the code."""
        self.codes.append(code)


class InMemoryReactor(MemoryReactorClock):
    """Starts no processes: nobody compresses the log of a test. Its time can be set as that of a daemon is."""

    def set_by(self, seconds: float) -> None:
        """The clock of the host is set; timers keep their remaining time (:mod:`mediatord.runtime.reactor_clock`)."""
        self.rightNow += seconds
        for call in self.calls:
            call.time += seconds

    def spawnProcess(self, *args: object, **options: object) -> None:  # noqa: N802
        """Do nothing."""


class InMemoryMediator:
    """
    The objects of a mediator, wired as in the daemon, on the memory store.

    :param in_steps: whether the store does in steps what it can do at once.
    :param settings: sections of the configuration as plain values, laid over the defaults.
    """

    def __init__(self, test: SynchronousTestCase, *, in_steps: bool = False, **settings: Any) -> None:
        directory = Path(tempfile.mkdtemp())
        test.addCleanup(shutil.rmtree, directory)
        create_keys(directory / "keys.jwks")
        self.test = test
        self.clock = InMemoryReactor()
        self.clock.advance(NOW)
        self.config = Config.model_validate({"storage": {"backend": "memory"}, **settings}).resolved(directory)
        store = MultiStepMemoryStore(self.clock, QueueLimits()) if in_steps else None
        self.base = CoreServices(self.clock, self.config, store=store, monotonic=self.clock.seconds)
        os.utime(directory / "log.key", (NOW, NOW))  # which is how old its key is
        self.didcomm = DIDCommServices(self.base, self.config)
        self.decentrl = DecentrlServices(self.base, self.config)
        self.store = self.base.store
        self.base.events.startService()
        test.successResultOf(self.store.open())
        self.didcomm.due.startService()
        self.didcomm.lag.startService()
        self.didcomm.housekeeping.startService()
        self.base.connections.startService()
        self.base.gate.startService()
        test.addCleanup(self.base.events.stopService)
        test.addCleanup(self._check_ledger)
        self.did = self.base.identity.now.did
        self.document: DIDDocument = resolve_local(self.did)

    def receive(self, raw: bytes, socket: FakeSocket | None = None, peer: str = PEER) -> RequestReply:
        """What the mediator replies to one message."""
        replies: list[RequestReply] = []
        if socket is None and self.didcomm.forward_fast_path.take(raw, peer, replies.append, lambda: None):
            self.clock.advance(0)
            if replies:
                (reply,) = replies
                return reply
        origin = MessageOrigin(socket.client if socket else peer, socket)
        return self.done(self.didcomm.dispatcher.receive(raw, origin))

    def obey(self, raw: bytes, peer: str = PEER) -> RequestReply:
        """What the mediator replies to one Decentrl command."""
        return self.done(self.decentrl.dispatcher.receive(raw, peer))

    def done(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of work that needs no time."""
        return self.test.successResultOf(Deferred.fromCoroutine(work))

    def _check_ledger(self) -> None:
        looking: Deferred[StoreLedger] = self.store.read_ledger()
        # A store that the test has closed says nothing any more.
        looking.addCallbacks(assert_ledger_balanced, lambda failure: failure.trap(StoreUnavailable))
        self.test.successResultOf(looking)

    def socket(self, **options: Any) -> FakeSocket:
        """A socket that has finished its handshake."""
        socket = FakeSocket(**options)
        self.base.connections.opened(socket)
        return socket

    @contextmanager
    def failing(self, operation: str, error: Exception) -> Iterator[None]:
        """Have one operation of the store fail, in any part of it, which the memory store never does by itself."""
        parts = (self.store, self.store.decentrl, self.store.cluster)
        store = next(part for part in parts if hasattr(part, operation))
        setattr(store, operation, lambda *args, **options: fail(error))
        yield
        delattr(store, operation)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of one name that were written so far, in the order in which they were."""
        self.clock.advance(0)
        # Segments that follow each other within a tick of the file system's clock are of the same time.
        segments = [path.read_text("utf-8") for path in self.config.log.directory.glob("events*.jsonl")]
        events = [json.loads(line) for segment in segments for line in segment.splitlines()]
        return sorted((event for event in events if event["event"] == name), key=lambda event: event["seq"])

    def counter(self, name: str, **labels: str) -> float:
        """The value of a metric as it is exposed, 0 when there is no such series."""
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{pairs}}}" if labels else name
        for line in self.base.recorder.metrics.render().decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series == wanted:
                return float(value)
        return 0.0


class InMemoryWallet:
    """A wallet of the in-memory mediator: packs, sends, and opens replies."""

    def __init__(self, in_memory: InMemoryMediator, identity: WalletIdentity | None = None) -> None:
        self.in_memory = in_memory
        self.identity = identity or WalletIdentity.generate(endpoint=in_memory.did)
        self.documents = DIDDocumentCache()

    @property
    def did(self) -> str:
        """Its DID."""
        return self.identity.did

    def pack(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> bytes:
        """A message to the mediator, authenticated."""
        headers = {"from": self.did, "to": [self.in_memory.did], **headers}
        return authcrypt(compose_message(type_, body, **headers), self.identity, self.in_memory.document)

    def ask(
        self, type_: str, body: dict[str, Any] | None = None, *, socket: FakeSocket | None = None, **headers: Any
    ) -> RequestReply:
        """Send a request that wants its answer on the connection."""
        headers = {"return_route": "all", **headers}
        return self.in_memory.receive(self.pack(type_, body, **headers), socket)

    def answer(self, type_: str, body: dict[str, Any] | None = None, **options: Any) -> OpenedMessage:
        """Send a request and open the answer, which has to be a 200."""
        reply = self.ask(type_, body, **options)
        self.in_memory.test.assertEqual(reply.status, 200)
        return self.open(reply.body)

    def open(self, raw: bytes) -> OpenedMessage:
        """Open an envelope addressed to this wallet."""
        return unpack_message(raw, self.identity, self.documents.resolve)

    def enrol(self, *dids: str) -> InMemoryWallet:
        """Get a grant, and register these DIDs, or its own."""
        self.answer(f"{CM3}/mediate-request")
        updates = [{"recipient_did": did, "action": "add"} for did in dids or (self.did,)]
        results = self.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.in_memory.test.assertEqual({result["result"] for result in results}, {"success"})
        return self

    def go_live(self) -> FakeSocket:
        """Open a socket and switch live delivery on."""
        socket = self.in_memory.socket()
        status = self.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        self.in_memory.test.assertIs(status.body["live_delivery"], True)
        return socket

    def letter(self, text: str = "hello") -> bytes:
        """A message to this wallet from nobody, encrypted."""
        message = compose_message("https://didcomm.org/basicmessage/2.0/message", {"content": text}, to=[self.did])
        return anoncrypt(message, self.identity.document)

    def fetch(self, limit: int = 10, **options: Any) -> list[DeliveredMessage]:
        """The oldest of what waits, which has to be something."""
        return read_delivery(self.answer(f"{MP}/delivery-request", {"limit": limit}, **options).message)

    def waiting(self) -> int:
        """How many messages wait for it."""
        count: int = self.answer(f"{MP}/status-request").body["message_count"]
        return count


def from_header(did: str | None) -> dict[str, Any]:
    """The header `from`, which is a word of Python's."""
    return {"from": did}


def pack_forward(in_memory: InMemoryMediator, next_: str, *payloads: bytes, **headers: Any) -> bytes:
    """An anonymous forward to the mediator."""
    return anoncrypt(build_forward(next_, payloads, **headers), in_memory.document)


def read_problem_report(reply: RequestReply) -> dict[str, Any]:
    """A problem report in the clear, or signed by who it is from, as its media type says."""
    assert json_web_signature.is_jws(json.loads(reply.body)) == (
        reply.media_type == json_web_signature.SIGNED_MEDIA_TYPE
    )
    return open_problem_report(reply.body, resolve_local)


def code_of(reply: RequestReply, guest: InMemoryWallet | None = None) -> str:
    """The problem code of a reply: in the clear, signed, or encrypted to `guest`."""
    body = guest.open(reply.body).body if guest else read_problem_report(reply)["body"]
    code: str = body["code"]
    return code
