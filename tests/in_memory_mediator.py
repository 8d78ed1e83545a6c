"""A whole mediator on the memory store, with a manual clock and fake sockets that record frames."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.core_services import CoreServices
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.app.push import PushSubsystem
from mediatord.config.settings import Config
from mediatord.delivery.connections import MAX_RECEIPTS
from mediatord.didcomm.messages import MessageOrigin, UnpackedMessage
from mediatord.errors import StoreUnavailable
from mediatord.identity.key_file import create_keys
from mediatord.protocol.didcomm import json_web_signature
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.push.devices import DeviceSealer
from mediatord.push.registry import DeviceRegistry
from mediatord.push.requester import PushRequester
from mediatord.push.service import IPushService
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


# Fields of events whose values differ from one mediator, or one message, to another.
VARYING_FIELDS = frozenset("ts seq boot req msg dur_ms crypto_ms latency_ms rcpt sender peer who".split())


class FakeSocket:
    """
    A fake open socket, which records frames and close codes.

    :ivar takes: whether it accepts frames.
    :ivar receipts: callbacks of frames whose receipt is missing.
    """

    def __init__(self, client: str = PEER, *, takes: bool = True) -> None:
        self.client = client
        self.name = f"socket-{id(self):x}"
        self.takes = takes
        self.frames: list[bytes] = []
        self.codes: list[int] = []
        self.receipts: list[Callable[[], None]] = []

    def send(self, frame: bytes) -> bool:
        """Record the frame, unless the socket accepts none; whether it does."""
        if self.takes:
            self.frames.append(frame)
        return self.takes

    def send_with_receipt(self, frame: bytes, on_receipt: Callable[[], None]) -> bool:
        """As :meth:`send`."""
        is_taken = len(self.receipts) < MAX_RECEIPTS and self.send(frame)
        if is_taken:
            self.receipts.append(on_receipt)
        return is_taken

    def confirm(self, number: int | None = None) -> None:
        """Give the oldest missing receipts, all of them by default."""
        now, self.receipts = self.receipts[:number], self.receipts[number:] if number is not None else []
        for on_receipt in now:
            on_receipt()

    def close(self, code: int, reason: str) -> None:
        """Record the code."""
        self.codes.append(code)


class InMemoryReactor(MemoryReactorClock):
    """Reactor that starts no processes, such as compressors of log segments, and whose wall clock can be stepped."""

    def step_wall_clock(self, seconds: float) -> None:
        """Step the wall clock; timers keep their remaining time (:mod:`mediatord.runtime.reactor_clock`)."""
        self.rightNow += seconds
        for call in self.calls:
            call.time += seconds

    def spawnProcess(self, *args: object, **options: object) -> None:  # noqa: N802
        """Do nothing."""


class InMemoryMediator:
    """
    The objects of a mediator, wired as in the daemon, on the memory store.

    :param in_steps: use a memory store that divides operations into steps.
    :param devices: makes the registry of devices for push notifications, of both protocols.
    :param push_service: wakes devices; None for no push notifications.
    :param settings: sections of the configuration as plain values, which override the defaults.
    """

    def __init__(
        self,
        test: SynchronousTestCase,
        *,
        in_steps: bool = False,
        devices: Callable[[CoreServices], DeviceRegistry] | None = None,
        push_service: IPushService[Any] | None = None,
        **settings: Any,
    ) -> None:
        directory = Path(tempfile.mkdtemp())
        test.addCleanup(shutil.rmtree, directory)
        create_keys(directory / "keys.jwks")
        self.test = test
        self.clock = InMemoryReactor()
        self.clock.advance(NOW)
        self.config = Config.model_validate({"storage": {"backend": "memory"}, **settings}).resolved(directory)
        store = MultiStepMemoryStore(self.clock, QueueLimits()) if in_steps else None
        self.base = CoreServices(self.clock, self.config, store=store, monotonic=self.clock.seconds)
        os.utime(directory / "log.key", (NOW, NOW))  # the age of its key
        if push_service is not None:
            sealer = DeviceSealer(lambda: self.base.identity.now.sealing_secrets, os.urandom)
            services: dict[str, IPushService[Any]] = {push_service.name: push_service}
            requester = PushRequester(
                self.clock, services, None, sealer, "mediator", random.uniform, self.clock.seconds
            )
            self.base.push = PushSubsystem(self.base, self.config, (push_service.name,), requester)
        registry = None if devices is None else devices(self.base)
        self.didcomm = DIDCommServices(self.base, self.config, registry)
        self.decentrl = DecentrlServices(self.base, self.config, registry)
        self.store = self.base.store
        self.base.events.startService()
        test.successResultOf(self.store.open())
        self.didcomm.due.startService()
        self.didcomm.lag.startService()
        self.didcomm.housekeeping.startService()
        self.base.connections.startService()
        self.base.gate.startService()
        if self.base.push is not None:
            self.base.push.scheduler.startService()
        test.addCleanup(self.base.events.stopService)
        test.addCleanup(self._check_ledger)
        self.did = self.base.identity.now.did
        self.document: DIDDocument = resolve_local(self.did)

    def receive(self, raw: bytes, socket: FakeSocket | None = None, peer: str = PEER) -> RequestReply:
        """Process a DIDComm message, on the fast path if it takes it; the reply."""
        replies: list[RequestReply] = []
        opened: list[UnpackedMessage | None] = [None]
        origin = MessageOrigin(socket.client if socket else peer, socket)
        if socket is None:
            taken = self.didcomm.forward_fast_path.take(raw, peer, replies.append, lambda: None)
        else:
            taken = self.didcomm.acknowledgement_fast_path.take(raw, origin, replies.append, opened.append)
        if taken:
            self.clock.advance(0)
            if replies:
                (reply,) = replies
                return reply
        return self.run(self.didcomm.receive(raw, origin, opened[-1]))

    def receive_command(self, raw: bytes, peer: str = PEER) -> RequestReply:
        """Process a Decentrl command; the reply."""
        return self.run(self.decentrl.dispatcher.receive(raw, peer))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that finishes without waiting; its result."""
        return self.test.successResultOf(Deferred.fromCoroutine(work))

    def _check_ledger(self) -> None:
        reading: Deferred[StoreLedger] = self.store.read_ledger()
        # The test may have closed the store.
        reading.addCallbacks(assert_ledger_balanced, lambda failure: failure.trap(StoreUnavailable))
        self.test.successResultOf(reading)

    def socket(self, **options: Any) -> FakeSocket:
        """A new fake socket after its handshake."""
        socket = FakeSocket(**options)
        self.base.connections.opened(socket)
        return socket

    @contextmanager
    def failing(self, operation: str, error: Exception) -> Iterator[None]:
        """Make an operation of the store, in any part of it, fail within this context."""
        parts = (self.store, self.store.decentrl, self.store.cluster, self.store.v1_connections)
        store = next(part for part in parts if hasattr(part, operation))
        setattr(store, operation, lambda *args, **options: fail(error))
        yield
        delattr(store, operation)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of one name written so far, in order."""
        self.clock.advance(0)
        # Sorted by sequence number: segments written within one tick of the file system's clock have the same time.
        segments = [path.read_text("utf-8") for path in self.config.log.directory.glob("events*.jsonl")]
        events = [json.loads(line) for segment in segments for line in segment.splitlines()]
        return sorted((event for event in events if event["event"] == name), key=lambda event: event["seq"])

    def counter(self, name: str, **labels: str) -> float:
        """Exported value of a metric; 0 without such a series."""
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{pairs}}}" if labels else name
        for line in self.base.recorder.metrics.render().decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series == wanted:
                return float(value)
        return 0.0


class InMemoryWallet:
    """A DIDComm wallet of the in-memory mediator: packs and sends requests, unpacks replies."""

    def __init__(self, in_memory: InMemoryMediator, identity: WalletIdentity | None = None) -> None:
        self.in_memory = in_memory
        self.identity = identity or WalletIdentity.generate(endpoint=in_memory.did)
        self.documents = DIDDocumentCache()

    @property
    def did(self) -> str:
        """Its DID."""
        return self.identity.did

    def pack(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> bytes:
        """An authcrypted message to the mediator."""
        headers = {"from": self.did, "to": [self.in_memory.did], **headers}
        return authcrypt(compose_message(type_, body, **headers), self.identity, self.in_memory.document)

    def ask(
        self, type_: str, body: dict[str, Any] | None = None, *, socket: FakeSocket | None = None, **headers: Any
    ) -> RequestReply:
        """Send a request with return route `all`; the reply."""
        headers = {"return_route": "all", **headers}
        return self.in_memory.receive(self.pack(type_, body, **headers), socket)

    def answer(self, type_: str, body: dict[str, Any] | None = None, **options: Any) -> OpenedMessage:
        """Send a request and unpack its reply, which must have status 200."""
        reply = self.ask(type_, body, **options)
        self.in_memory.test.assertEqual(reply.status, 200)
        return self.open(reply.body)

    def open(self, raw: bytes) -> OpenedMessage:
        """Unpack an envelope for this wallet."""
        return unpack_message(raw, self.identity, self.documents.resolve)

    def enrol(self, *dids: str) -> InMemoryWallet:
        """Request mediation and register these DIDs; its own unless given."""
        self.answer(f"{CM3}/mediate-request")
        updates = [{"recipient_did": did, "action": "add"} for did in dids or (self.did,)]
        results = self.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.in_memory.test.assertEqual({result["result"] for result in results}, {"success"})
        return self

    def go_live(self) -> FakeSocket:
        """Open a socket and enable live delivery on it."""
        socket = self.in_memory.socket()
        status = self.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        self.in_memory.test.assertIs(status.body["live_delivery"], True)
        return socket

    def make_payload(self, text: str = "hello") -> bytes:
        """An anoncrypted message to this wallet, to be forwarded."""
        message = compose_message("https://didcomm.org/basicmessage/2.0/message", {"content": text}, to=[self.did])
        return anoncrypt(message, self.identity.document)

    def fetch(self, limit: int = 10, **options: Any) -> list[DeliveredMessage]:
        """Fetch the oldest queued messages, of which there must be one."""
        return read_delivery(self.answer(f"{MP}/delivery-request", {"limit": limit}, **options).message)

    def count_queued(self) -> int:
        """Number of messages queued for its account."""
        count: int = self.answer(f"{MP}/status-request").body["message_count"]
        return count


def from_header(did: str | None) -> dict[str, Any]:
    """The header `from`, which is a keyword of Python."""
    return {"from": did}


def pack_forward(in_memory: InMemoryMediator, next_: str, *payloads: bytes, **headers: Any) -> bytes:
    """An anonymous forward to the mediator."""
    return anoncrypt(build_forward(next_, payloads, **headers), in_memory.document)


def read_problem_report(reply: RequestReply) -> dict[str, Any]:
    """Read a plaintext or signed problem report; a signed one must have the media type of one."""
    assert json_web_signature.is_jws(json.loads(reply.body)) == (
        reply.media_type == json_web_signature.SIGNED_MEDIA_TYPE
    )
    return open_problem_report(reply.body, resolve_local)


def code_of(reply: RequestReply, wallet: InMemoryWallet | None = None) -> str:
    """Problem code of a reply that is plaintext, signed, or encrypted for `wallet`."""
    body = wallet.open(reply.body).body if wallet else read_problem_report(reply)["body"]
    code: str = body["code"]
    return code
