"""
DIDComm wallets at a daemon and their devices, over real connections and without a reactor.

A device is a socket on which the wallet's messages are pushed; a wallet may have many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from mediatord.bench.raw_clients import PONG_OPCODE, WebSocketClient
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import Message
from mediatord.wallet.didcomm_client import PICKUP, DeliveredMessage, read_delivery
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    OpenedMessage,
    anoncrypt,
    authcrypt,
    build_forward,
    compose_message,
    unpack_message,
)
from tests.http.in_memory_site import HTTPResponse
from tests.integration.raw_decentrl_client import DaemonClient, RawWebSocket

CM3 = "https://didcomm.org/coordinate-mediation/3.0"
# Bytes that the kernel keeps for who does not read.
_NARROW = 65_536
ENVELOPE = {"Content-Type": ENCRYPTED_MEDIA_TYPE}


class DeviceWallet:
    """A wallet, which may or may not have an account."""

    def __init__(self, daemon_client: DaemonClient, identity: WalletIdentity | None = None) -> None:
        self.daemon_client = daemon_client
        self.mediator = resolve_local(daemon_client.ask("GET", "/did").body.decode())
        self.identity = identity or WalletIdentity.generate(endpoint=self.mediator.did)
        self.did = self.identity.did

    def pack(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> bytes:
        """A message to the mediator, authenticated, that wants its answer on the connection."""
        standard = {"from": self.did, "to": [self.mediator.did], "return_route": "all"}
        return authcrypt(compose_message(type_, body, **{**standard, **headers}), self.identity, self.mediator)

    def ask(self, type_: str, body: dict[str, Any] | None = None, *, source: str = "127.0.0.1") -> HTTPResponse:
        """What is answered to a request over HTTP."""
        return self.post(self.pack(type_, body), source=source)

    def post(self, raw: bytes, *, source: str = "127.0.0.1", **headers: str) -> HTTPResponse:
        """What is answered to these bytes."""
        return self.daemon_client.ask("POST", "/didcomm", raw, {**ENVELOPE, **headers}, source=source)

    def get(self, type_: str, body: dict[str, Any] | None = None) -> Message:
        """The answer to a request, which has to be a 200."""
        answered = self.ask(type_, body)
        assert answered.status == 200, answered.body
        return self.open(answered.body).message

    def open(self, raw: bytes) -> OpenedMessage:
        """Open an envelope that is for this wallet."""
        return unpack_message(raw, self.identity, resolve_local)

    def enrol(self, *dids: str) -> DeviceWallet:
        """Have an account with these recipient DIDs, or with its own."""
        self.get(f"{CM3}/mediate-request")
        updates = [{"recipient_did": did, "action": "add"} for did in dids or (self.did,)]
        updated = (self.get(f"{CM3}/recipient-update", {"updates": updates}).body or {})["updated"]
        assert {one["result"] for one in updated} == {"success"}, updated
        return self

    def letter(self, text: str, size: int = 0) -> bytes:
        """A message to this wallet from nobody. :param size: bytes that it has beside the text, about."""
        body = {"content": text, "ballast": "x" * size}
        return anoncrypt(compose_message(BASIC_MESSAGE, body, to=[self.did]), self.identity.document)

    def forward(self, *message_count: bytes, to: str | None = None, **headers: Any) -> bytes:
        """A forward from nobody."""
        return anoncrypt(build_forward(to or self.did, message_count, **headers), self.mediator)

    def tell(self, text: str, size: int = 0, *, to: str | None = None) -> None:
        """Have a letter accepted."""
        answered = self.post(self.forward(self.letter(text, size), to=to))
        assert (answered.status, answered.body) == (202, b""), (answered.status, answered.body)

    def text(self, delivered: DeliveredMessage) -> str:
        """What stands in a delivered letter."""
        return str((self.open(delivered.payload).message.body or {})["content"])

    def fetch(self, limit: int = 100) -> list[DeliveredMessage]:
        """The oldest that wait."""
        message = self.get(f"{PICKUP}/delivery-request", {"limit": limit})
        return read_delivery(message) if message.type.uri == f"{PICKUP}/delivery" else []

    def texts(self) -> list[str]:
        """All that waits, oldest first; there may not be more than fits in a delivery."""
        return [self.text(one) for one in self.fetch()]

    def waiting(self) -> int:
        """How many, as a status has it."""
        return int((self.get(f"{PICKUP}/status-request").body or {})["message_count"])

    def acknowledge(self, *ids: str) -> None:
        """Over HTTP."""
        self.get(f"{PICKUP}/messages-received", {"message_id_list": list(ids)})


class LiveDevice:
    """A socket of a wallet."""

    def __init__(self, owner: DeviceWallet) -> None:
        self.owner = owner
        self.line = RawWebSocket(owner.daemon_client, "/didcomm")
        self._pushed: deque[DeliveredMessage] = deque()

    def ask(self, type_: str, body: dict[str, Any] | None = None) -> Message:
        """What is answered; what is pushed before that is kept."""
        message = compose_message(
            type_, body, return_route="all", to=[self.owner.mediator.did], **{"from": self.owner.did}
        )
        self.line.say(authcrypt(message, self.owner.identity, self.owner.mediator))
        while (came := self._hear()).thid != message["id"]:
            self._pushed.extend(read_delivery(came))
        return came

    def live(self, on: bool = True) -> LiveDevice:
        """Switch live delivery."""
        status = self.ask(f"{PICKUP}/live-delivery-change", {"live_delivery": on})
        assert (status.body or {})["live_delivery"] is on
        return self

    def pushed(self) -> DeliveredMessage:
        """The next message that is pushed."""
        while not self._pushed:
            self._pushed.extend(read_delivery(self._hear()))
        return self._pushed.popleft()

    def silent(self) -> bool:
        """Whether nothing was pushed so far: the answer to a later request comes first."""
        self.ask(f"{PICKUP}/status-request")
        return not self._pushed

    def acknowledge(self, *ids: str) -> None:
        """On this very socket."""
        self.ask(f"{PICKUP}/messages-received", {"message_id_list": list(ids)})

    def close(self) -> None:
        """Without ceremony."""
        self.line.close()

    def _hear(self) -> Message:
        return self.owner.open(self.line.hear_raw()).message


class UnreadDevice:
    """
    A socket that says what it is for and is not read afterwards.

    :param first: what it says, waiting for one answer to each.
    """

    def __init__(self, daemon_client: DaemonClient, path: str, *first: bytes) -> None:
        self._socket = WebSocketClient(f"ws://127.0.0.1:{daemon_client.port}{path}", kernel_bytes=_NARROW)
        for one in first:
            self._socket.send(one)
            self._socket.receive()

    def stay(self) -> None:
        """Send a PONG: the daemon closes a socket that leaves two pings unanswered."""
        self._socket.send(b"", PONG_OPCODE)

    def take(self, number: int) -> list[bytes]:
        """Read again: the first that have come."""
        found: list[bytes] = []
        while len(found) < number:
            found += self._socket.take()
        return found[:number]

    def close(self) -> None:
        """Without ceremony."""
        self._socket.close()


def read_metric(daemon_client: DaemonClient, name: str) -> float:
    """A metric of the daemon, by name and labels."""
    lines = daemon_client.ask("GET", "/metrics").body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def read_next_pushes(devices: Sequence[LiveDevice]) -> list[str]:
    """The text of the next push of each."""
    return [one.owner.text(one.pushed()) for one in devices]
