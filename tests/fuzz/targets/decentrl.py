"""Decentrl commands, first frames of sockets, registrations, and queries of public channels."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable

from twisted.internet.defer import Deferred

from mediatord.errors import InvalidCommand, InvalidMessage
from mediatord.protocol.decentrl.commands import parse_authentication_request, parse_command
from mediatord.protocol.decentrl.crypto import sign_event, sign_json
from mediatord.protocol.error_codes import DECENTRL_CLOSE_CODES
from mediatord.ratelimit.admission import RequestReply
from tests.fuzz.fuzz_mediator import DECENTRL_CODES, DECENTRL_STATUSES, FuzzMediator
from tests.fuzz.targets import replace_words
from tests.http.in_memory_site import InMemorySite
from tests.in_memory_identities import InMemoryDecentrlSocket, InMemoryIdentity
from tests.in_memory_mediator import PEER
from tests.protocol.decentrl import samples
from tests.push.registries import APNS, FCM, SUBSCRIPTION, make_core_registry

_SOCKET_CODES = {row.code for row in DECENTRL_CLOSE_CODES.values()} - {"INTERNAL_ERROR"}
_UNSIGNABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


class DecentrlTarget:
    """
    Modes: `r` a command unchanged, `s` signed, `g` a first frame, signed, `e` a registration, `d` a device, `q` DID
    and query.
    """

    words = (
        *(
            b"@ALICE@",
            b"@BOB@",
            b"@MEDIATOR@",
            b"@NONCE@",
            b'"TWO_WAY_PRIVATE"',
            b'"ONE_WAY_PUBLIC"',
            b'"pagination"',
        ),
        *(b'"signed_communication_contract"', b"AUTHENTICATE", b"page_size=", b"tags=", b"after=", b"&page="),
    )
    longest = 8_192
    most_calls = (4_000, 60)
    most_memory = (3_000_000, 1_000)

    def __init__(self) -> None:
        self._mediator = FuzzMediator(self._prepare, devices=make_core_registry)
        self._site_fixture: InMemorySite = None  # type: ignore[assignment]  # likewise
        self._alice: InMemoryIdentity = None  # type: ignore[assignment]  # there is one as soon as there is a mediator
        self._bob: InMemoryIdentity = None  # type: ignore[assignment]  # likewise

    def _prepare(self, site_fixture: InMemorySite) -> None:
        self._alice, self._bob = InMemoryIdentity(site_fixture, "alice"), InMemoryIdentity(site_fixture, "bob")
        for item in (self._alice, self._bob):
            item.register()
        self._alice.save_contract_with(self._bob)

    def close(self) -> None:
        """Stop the mediator."""
        self._mediator.close()

    def run(self, data: bytes) -> None:
        """Send the input, and check the reply and the store."""
        self._site_fixture = self._mediator.enter()
        words = {
            b"@MEDIATOR@": self._alice.mediator,
            b"@ALICE@": self._alice.did,
            b"@BOB@": self._bob.did,
            b"@NONCE@": str(uuid.uuid4()),
            b"@NOW@": str(int(self._site_fixture.clock.seconds() * 1000)),
        }
        way, rest = data[:1], replace_words(data[1:], words)
        kept = self._mediator.store_content()
        if way == b"g":
            self._send_first_frame(self._sign(rest, ("did", "signing_key_id", "timestamp", "nonce")))
            refused = True
        elif way == b"q":
            refused = self._query(rest)
        else:
            refused = self._send(self._build(way, rest))
        self._mediator.assert_no_failures()
        assert not refused or self._mediator.store_content() == kept, "stored, although it was refused"
        self._site_fixture.clock.advance(0)

    def _build(self, way: bytes, rest: bytes) -> bytes:
        if way == b"s":
            return self._sign(rest, ("header", "payload"))
        if way == b"e":
            with contextlib.suppress(*_UNSIGNABLE):
                sealed = self._alice.encrypt_registration(json.loads(rest))
                return self._alice.command({"type": "REQUEST_COMMUNICATION_CONTRACT", **sealed})
        if way == b"d":
            return self._alice.command({"type": "SET_PUSH_DEVICE", **self._alice.encrypt_push_device(rest)})
        return rest

    def _sign(self, raw: bytes, names: tuple[str, ...]) -> bytes:
        """Sign the JSON, or return it unchanged if that is impossible."""
        try:
            document = json.loads(raw)
            payload = document.get("payload")
            if isinstance(payload, dict) and "event_signature" in payload:
                event, tags, time = (payload[name] for name in ("event", "tags", "timestamp"))
                payload["event_signature"] = sign_event(
                    event, tags, time, self._alice.seed, payload.get("channel_id")
                )
            document["signature"] = sign_json({name: document[name] for name in names}, self._alice.seed)
            return json.dumps(document).encode()
        except _UNSIGNABLE:
            return raw

    def _send(self, raw: bytes) -> bool:
        """Return whether the command is refused; an invalid one must be refused as such."""
        reply = self._site_fixture.receive_command(raw)
        refused = self._is_refusal(reply, DECENTRL_STATUSES, "SUCCESS")
        try:
            parse_command(raw)
        except InvalidCommand:
            assert (reply.status, json.loads(reply.body)["code"]) == (400, "INVALID_COMMAND")
        return refused

    def _query(self, rest: bytes) -> bool:
        did, _, query = rest.partition(b"?")
        arguments: dict[bytes, list[bytes]] = {}
        for pair in query.split(b"&"):
            name, _, value = pair.partition(b"=")
            arguments.setdefault(name, []).append(value)
        asked = self._site_fixture.decentrl.dispatcher.public(did.decode("utf-8", "replace"), arguments, PEER)
        return self._is_refusal(
            self._site_fixture.test.successResultOf(Deferred.fromCoroutine(asked)), {200, 400}, None
        )

    def _is_refusal(self, reply: RequestReply, statuses: set[int], type_: str | None) -> bool:
        """Whether the reply is a refusal; a refusal must be one valid error."""
        assert reply.status in statuses, reply.status
        body = json.loads(reply.body)
        if reply.status == 200:
            assert body.get("type") == type_
            return False
        assert set(body) == {"type", "code"} and body["type"] == "ERROR" and body["code"] in DECENTRL_CODES, body
        return True

    def _send_first_frame(self, frame: bytes) -> None:
        """Send it as the first frame of a socket."""
        dialogue = InMemoryDecentrlSocket(self._site_fixture)
        dialogue.send(frame)
        (told,) = dialogue.take_frames()
        try:
            parse_authentication_request(frame)
        except InvalidMessage:
            assert told == {"type": "AUTH_FAILED", "code": "INVALID_MESSAGE"}, told
        assert told == {"type": "AUTH_SUCCESS"} or told["code"] in _SOCKET_CODES, told
        assert bool(dialogue.socket.codes) is (told["type"] == "AUTH_FAILED")
        dialogue.disconnect()

    def seeds(self) -> Iterable[bytes]:
        """Each command, signed, with all members, and other inputs."""
        for name in samples.CHANNELS:
            command = samples.command(
                name,
                sender_did="@ALICE@",
                sender_signing_key_id="@ALICE@#signing",
                recipient_did="@BOB@"
                if name in ("TWO_WAY_PRIVATE", "COMMUNICATION_CONTRACT_RESPONSE")
                else "@MEDIATOR@",
                nonce="@NONCE@",
                timestamp="NOW",
            )
            raw = json.dumps(command).replace('"NOW"', "@NOW@").encode()
            yield b"s" + raw
            if name in ("QUERY_EVENTS", "TWO_WAY_PRIVATE"):
                yield b"r" + raw
        greeting = samples.authenticate(
            did="@ALICE@", signing_key_id="@ALICE@#signing", nonce="@NONCE@", timestamp="NOW"
        )
        yield b"g" + json.dumps(greeting).replace('"NOW"', "@NOW@").encode()
        contract = {**samples.CONTRACT, "requestor_did": "@ALICE@", "recipient_did": "@MEDIATOR@"}
        yield b"e" + json.dumps({"communication_contract": contract, "requestor_signature": samples.SECRET}).encode()
        for service, values in (("fcm", FCM), ("apns", APNS), ("web_push", SUBSCRIPTION)):
            yield b"d" + json.dumps({"service": service, **values}).encode()
        yield from (b"q@ALICE@?tags=a,b&page=0&page_size=10&after=1.5", b"qdid:x?channel_id=&before=1e400&tags=%ff")


def make() -> DecentrlTarget:
    """Create the target."""
    return DecentrlTarget()
