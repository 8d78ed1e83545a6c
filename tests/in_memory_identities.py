"""Decentrl identities of an in-memory mediator, which sign commands and read replies."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from nacl.bindings import crypto_sign_seed_keypair
from twisted.trial.unittest import SynchronousTestCase

from mediatord.decentrl.socket_protocol import DecentrlSocketProtocol
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.contracts import sign_contract, sign_contract_request
from mediatord.protocol.decentrl.crypto import (
    decode_public_key,
    derive_shared_secret,
    encrypt,
    generate_key_pair,
    sign_json,
)
from mediatord.protocol.decentrl.did_decentrl import make_did
from mediatord.protocol.encoding import encode_base64
from mediatord.ratelimit.admission import RequestReply
from tests.in_memory_mediator import PEER, FakeSocket, InMemoryMediator

DIRECT, PRIVATE, PUBLIC = "DIRECT_AUTHENTICATED", "TWO_WAY_PRIVATE", "ONE_WAY_PUBLIC"
YEAR = 31_536_000


def bad_dids(did: str) -> list[str]:
    """Strings that are no DID, or not this one."""
    texts = ["did:x: y", "did:x:é", "did:x:\n", "\0", " ", "did:x:".ljust(2049, "y"), "did:decentrl:" + "y" * 100_000]
    return [*texts, f"{did} ", f" {did}", f"{did}\n", f"{did}é", f"{did}#signing", did.upper(), did.ljust(2049, "=")]


class InMemoryIdentity:
    """
    One identity, which may or may not be registered.

    :param mediator_did: mediator that its DID names; the in-memory mediator unless given.
    """

    def __init__(self, in_memory: InMemoryMediator, name: str, *, mediator_did: str | None = None) -> None:
        self.in_memory = in_memory
        self.seed = secrets.token_bytes(32)
        _, prekey = generate_key_pair()
        self.mediator = in_memory.base.identity.now.web_did
        self.did = make_did(name, crypto_sign_seed_keypair(self.seed)[0], prekey, mediator_did or self.mediator)

    @property
    def key_id(self) -> str:
        """Id of its signing key."""
        return f"{self.did}#signing"

    def header(self, channel: str, to: str, **changes: Any) -> dict[str, Any]:
        """Header of a command with the current time; a change to None removes a member."""
        header = {
            "channel": channel,
            "sender_did": self.did,
            "sender_signing_key_id": self.key_id,
            "recipient_did": to,
            "timestamp": int(self.in_memory.clock.seconds() * 1000),
            "nonce": str(uuid.uuid4()),
            **changes,
        }
        return {name: value for name, value in header.items() if value is not None}

    def command(self, payload: Any, *, to: str | None = None, channel: str = DIRECT, **changes: Any) -> bytes:
        """A signed command."""
        return self.sign_command(self.header(channel, to or self.mediator, **changes), payload)

    def sign_command(self, header: Mapping[str, Any], payload: Any) -> bytes:
        """A command of this header and payload, with a signature."""
        signable = {"header": header, "payload": payload}
        # The standard library's writer also writes JSON that no mediator accepts.
        return json.dumps({**signable, "signature": sign_json(signable, self.seed)}).encode()

    def ask(
        self, type_: str, *, to: str | None = None, channel: str = DIRECT, peer: str = PEER, **members: Any
    ) -> RequestReply:
        """Send a command whose payload has these members; the reply."""
        return self.in_memory.receive_command(self.command({"type": type_, **members}, to=to, channel=channel), peer)

    def send_event(self, recipient: InMemoryIdentity, payload: str = "sealed", peer: str = PEER) -> RequestReply:
        """Send an event to another identity; the reply."""
        return self.in_memory.receive_command(self.command(payload, to=recipient.did, channel=PRIVATE), peer)

    def answer(self, type_: str, **members: Any) -> dict[str, Any]:
        """Send a command, which must succeed; the body of its reply."""
        reply = self.ask(type_, **members)
        body: dict[str, Any] = json.loads(reply.body)
        self.in_memory.test.assertEqual((reply.status, body["type"]), (200, "SUCCESS"), body)
        return body

    def contract_terms(self, peer_did: str, **changes: Any) -> dict[str, Any]:
        """Terms of a contract to request from a peer, without the peer's encryption key."""
        now = int(self.in_memory.clock.seconds())
        return {
            "requestor_did": self.did,
            "recipient_did": peer_did,
            "requestor_signing_key_id": self.key_id,
            "recipient_signing_key_id": f"{peer_did}#signing",
            "requestor_encryption_public_key": encode_base64(generate_key_pair()[1]),
            "expires_at": now + YEAR,
            "timestamp": now,
            **changes,
        }

    def registration_request(self, **changes: Any) -> dict[str, Any]:
        """Members of a registration request; `changes` apply to the terms."""
        terms = self.contract_terms(self.mediator, **changes)
        return self.encrypt_registration(
            {"communication_contract": terms, "requestor_signature": self.request(terms)}
        )

    def request(self, terms: Mapping[str, Any]) -> str:
        """Its signature of a contract request."""
        return sign_contract_request(terms, self.seed)

    def encrypt_registration(self, plaintext: Any) -> dict[str, Any]:
        """Encrypt any value in the way of a registration request."""
        text, key = self._encrypt_to_mediator(encoding.dumps(plaintext))
        return {"encrypted_contract_request": text, "requestor_ephemeral_public_key": key}

    def encrypt_push_device(self, plaintext: bytes) -> dict[str, Any]:
        """Members of SET_PUSH_DEVICE with any text."""
        text, key = self._encrypt_to_mediator(plaintext)
        return {"encrypted_push_device": text, "sender_ephemeral_public_key": key}

    def _encrypt_to_mediator(self, plaintext: bytes) -> tuple[str, str]:
        """Ciphertext and ephemeral key."""
        private, public = generate_key_pair()
        (agreement,) = self.in_memory.base.identity.now.web_document["keyAgreement"][:1]
        secret = derive_shared_secret(private, decode_public_key(agreement["publicKeyMultibase"]))
        return encrypt(plaintext, secret), encode_base64(public)

    def register(self, **changes: Any) -> dict[str, Any]:
        """Register with the mediator; the signed contract."""
        reply = self.answer("REQUEST_COMMUNICATION_CONTRACT", **self.registration_request(**changes))
        signed: dict[str, Any] = reply["payload"]["signed_communication_contract"]
        return signed

    def contract_with(self, peer: InMemoryIdentity, **changes: Any) -> dict[str, Any]:
        """A contract signed by both, with this identity as the requestor."""
        terms = self.contract_terms(peer.did, **changes)
        full = {**terms, "recipient_encryption_public_key": encode_base64(generate_key_pair()[1])}
        return {
            "communication_contract": full,
            "requestor_signature": self.request(terms),
            "recipient_signature": sign_contract(full, peer.seed),
        }

    def save(self, signed: Mapping[str, Any]) -> dict[str, Any]:
        """Save a contract at the mediator."""
        return self.answer("SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=signed)

    def save_contract_with(self, peer: InMemoryIdentity, **changes: Any) -> None:
        """Save a contract by which `peer` may send events to this identity."""
        self.save(peer.contract_with(self, **changes))

    def query(self, what: str, list_: str, **members: Any) -> list[dict[str, Any]]:
        """Items of a page, which must be the only one."""
        payload = self.answer(f"QUERY_{what}", **members)["payload"]
        items: list[dict[str, Any]] = payload[list_]
        self.in_memory.test.assertEqual(payload["pagination"]["total"], len(items))
        return items

    def pending(self) -> list[dict[str, Any]]:
        """Its pending events."""
        return self.query("PENDING_EVENTS", "pending_events")

    def authentication_frame(self, **changes: Any) -> bytes:
        """First frame of a socket, changed after it was signed; a change to None removes a member."""
        signable = {
            "did": self.did,
            "signing_key_id": self.key_id,
            "timestamp": changes.pop("timestamp", int(self.in_memory.clock.seconds() * 1000)),
            "nonce": str(uuid.uuid4()),
        }
        frame = {"type": "AUTHENTICATE", **signable, "signature": sign_json(signable, self.seed), **changes}
        return encoding.dumps({name: value for name, value in frame.items() if value is not None})

    def connect(self) -> InMemoryDecentrlSocket:
        """Open an authenticated socket."""
        socket = InMemoryDecentrlSocket(self.in_memory)
        socket.send(self.authentication_frame())
        self.in_memory.test.assertEqual(socket.take_frames(), [{"type": "AUTH_SUCCESS"}])
        return socket


class InMemoryDecentrlSocket:
    """Client side of a Decentrl socket."""

    def __init__(self, in_memory: InMemoryMediator, **options: Any) -> None:
        self.in_memory = in_memory
        self.socket: FakeSocket = in_memory.socket(**options)
        self.protocol: DecentrlSocketProtocol = in_memory.decentrl.open_socket(self.socket)
        self.protocol.start()

    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send a frame."""
        self.in_memory.run(self.protocol.handle_message(frame, binary))

    def take_frames(self) -> list[dict[str, Any]]:
        """Take the frames received since the last call."""
        frames, self.socket.frames = self.socket.frames, []
        return [json.loads(frame) for frame in frames]

    def disconnect(self) -> None:
        """Close the socket from the client side."""
        self.protocol.stop()
        self.in_memory.base.connections.closed(self.socket)


def code_of(reply: RequestReply) -> tuple[int, str]:
    """Status and error code of a refusal, whose body must contain nothing else."""
    body = json.loads(reply.body)
    assert body == {"type": "ERROR", "code": body["code"]}, body
    return reply.status, body["code"]


def register_two_identities(
    test: SynchronousTestCase, **settings: Any
) -> tuple[InMemoryMediator, InMemoryIdentity, InMemoryIdentity]:
    """An in-memory mediator with two registered identities, Alice and Bob, without a contract between them."""
    in_memory = InMemoryMediator(test, **settings)
    alice, bob = InMemoryIdentity(in_memory, "alice"), InMemoryIdentity(in_memory, "bob")
    alice.register()
    bob.register()
    return in_memory, alice, bob
