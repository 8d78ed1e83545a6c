"""A DIDComm v1 wallet of the in-memory mediator."""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import Any

from mediatord.identity.v1_identity import V1Identity
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.envelope import open_envelope, pack_anoncrypt, pack_authcrypt, parse_envelope
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, V1Message, parse_message
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.v1_connections import V1Connection
from tests.in_memory_mediator import FakeSocket, InMemoryMediator

_ids = count(1)


def make_key(name: str) -> SigningKey:
    """A key of its own for each name."""
    return SigningKey.from_seed(sha256(name.encode()).digest())


def get_identity(in_memory: InMemoryMediator) -> V1Identity:
    """The mediator's keys of v1."""
    return V1Identity(in_memory.base.identity.now.root_secret)


def compose(type_: str, prefix: str = DIDCOMM_ORG, **members: Any) -> bytes:
    """A plaintext message. :param type_: without prefix, unless it is a URN."""
    uri = type_ if ":" in type_ else prefix + type_
    return encoding.dumps({"@type": uri, "@id": f"message-{next(_ids)}", **members})


def compose_forward(to: str, payload: bytes, **members: Any) -> bytes:
    """A plaintext forward."""
    return compose("routing/1.0/forward", to=to, msg=encoding.loads(payload), **members)


def pack_forward(in_memory: InMemoryMediator, to: str, payload: bytes, **members: Any) -> bytes:
    """An anonymous forward to the mediator."""
    return pack_anoncrypt(compose_forward(to, payload, **members), get_identity(in_memory).routing_key.did_key)


def open_answer(raw: bytes, key: SigningKey) -> tuple[V1Message, str | None]:
    """The message in an envelope to this key, and its sender."""
    envelope = parse_envelope(raw)
    (recipient,) = envelope.recipients
    opened = open_envelope(envelope, recipient, key)
    return parse_message(opened.plaintext), opened.sender


class InMemoryV1Wallet:
    """
    A wallet that has connected, as if by a handshake.

    :param key: of the connection; by default one of its name.
    :ivar recipient: the key that it gives to senders.
    """

    def __init__(
        self, in_memory: InMemoryMediator, name: str = "wallet", *, key: SigningKey | None = None, **connection: Any
    ) -> None:
        self.in_memory = in_memory
        self.key, self.recipient = key or make_key(name), make_key(f"{name}, recipient")
        self.own_key = get_identity(in_memory).connection_key(self.key.did_key)
        row = V1Connection(
            account=self.key.did_key,
            own_key=self.own_key.did_key,
            request_id=f"request of {name}",
            **connection,
        )
        in_memory.test.successResultOf(in_memory.store.v1_connections.put_connection(row, max_pending=1000))

    def enrol(self) -> InMemoryV1Wallet:
        """Get an account and register the recipient key, in the store."""
        store, account = self.in_memory.store, self.key.did_key
        self.in_memory.test.successResultOf(store.grant(account))
        updating = store.update_recipients(account, [(self.recipient.did_key, "add")], max_recipients=10)
        self.in_memory.test.assertEqual(self.in_memory.test.successResultOf(updating), ["success"])
        return self

    def pack(self, plaintext: bytes) -> bytes:
        """A message to the mediator."""
        return pack_authcrypt(plaintext, self.own_key.did_key, self.key)

    def ask(
        self, type_: str, *, socket: FakeSocket | None = None, route: str | None = "all", **members: Any
    ) -> RequestReply:
        """Send a request with this return route; the reply."""
        transport: dict[str, Any] = {} if route is None else {"~transport": {"return_route": route}}
        return self.in_memory.receive(self.pack(compose(type_, **transport, **members)), socket)

    def answer(self, type_: str, **options: Any) -> V1Message:
        """Send a request, and open its reply, which must have status 200."""
        reply = self.ask(type_, **options)
        self.in_memory.test.assertEqual(reply.status, 200)
        return self.open(reply.body)

    def open(self, raw: bytes, key: SigningKey | None = None) -> V1Message:
        """Open an envelope of the mediator's to this wallet. :param key: of the wallet."""
        message, sender = open_answer(raw, key or self.key)
        self.in_memory.test.assertEqual(sender, self.own_key.did_key)
        return message

    def make_payload(self, text: str = "hello") -> bytes:
        """An envelope for this wallet, to be forwarded."""
        return pack_anoncrypt(compose("basicmessage/1.0/message", content=text), self.recipient.did_key)

    @property
    def recipient_base58(self) -> str:
        """The recipient key, as most senders spell it."""
        return encode_base58_key(self.recipient.did_key)
