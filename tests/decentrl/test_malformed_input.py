"""Any input gets a reply of the protocol; nothing is an internal error or logged as one."""

from __future__ import annotations

import copy
import json
import random
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import InvalidCommand, InvalidMessage
from mediatord.protocol.decentrl.commands import parse_authentication_request, parse_command
from mediatord.protocol.decentrl.contracts import sign_contract
from mediatord.protocol.decentrl.crypto import make_encrypted_tag, sign_event, sign_json
from mediatord.protocol.error_codes import DECENTRL_CLOSE_CODES
from mediatord.ratelimit.admission import RequestReply
from tests.http.in_memory_site import InMemorySite
from tests.in_memory_identities import PRIVATE, PUBLIC, InMemoryDecentrlSocket, InMemoryIdentity
from tests.in_memory_mediator import PEER, InMemoryMediator
from tests.integration.daemon import PLENTY
from tests.protocol.decentrl.mutations import paths_of, replaced, to_json, value_at, variants, without

# Numbers, near-numbers, and numbers for Python only.
NUMBERS = (
    *("0", "-0", "-1", "1.0", "1.5", "1e3", "1e400", "-1e400", "1e-400", "9" * 400, "0." + "9" * 400),
    *("9007199254740991", "9007199254740992", "18446744073709551616"),
    *("", "+1", "0x1", "1_0", " 1", "NaN", "inf", "true", "\u0661"),
)
STATUSES = {200, 400, 401, 404, 413, 429}
MEBIBYTE = 1 << 20
# High limits, so that no request is rate limited.
ROOM = dict.fromkeys(
    (
        "max_contract_requests",
        "max_contract_requests_per_sender",
        "max_contracts",
        "max_contracts_per_peer",
        "max_pending_events",
        "max_stored_events",
    ),
    1_000_000,
)
few = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(st.characters(), max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Co"]), max_size=5),
    st.sampled_from(["did:web:x", "did:decentrl:a:b:c:d", "DIRECT_AUTHENTICATED", "TWO_WAY_PRIVATE", "SAVE_EVENTS"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


class FuzzTestCase(SynchronousTestCase):
    """
    Alice and Bob, registered and permitted to write to each other.

    :ivar nonces: nonces of the valid commands.
    """

    nonces: set[str] = set()

    def setUp(self) -> None:
        self.in_memory = self.build()
        self.alice, self.bob = InMemoryIdentity(self.in_memory, "alice"), InMemoryIdentity(self.in_memory, "bob")
        for item in (self.alice, self.bob):
            item.register()
        self.alice.save_contract_with(self.bob)
        self.bob.save_contract_with(self.alice)

    def build(self) -> InMemoryMediator:
        """Build the mediator."""
        return InMemoryMediator(self, **PLENTY, decentrl=ROOM)

    def check(self, reply: RequestReply) -> RequestReply:
        """The reply is one of the protocol's, and no error is logged."""
        body = json.loads(reply.body)
        self.assertIn(reply.status, STATUSES, body)
        self.assertEqual(body["type"], "SUCCESS" if reply.status == 200 else "ERROR")
        if reply.status != 200:
            self.assertEqual(set(body), {"type", "code"})
        self.assertEqual(self.flushLoggedErrors(), [])
        return reply

    def send(self, raw: bytes) -> RequestReply:
        """Return the reply to any body."""
        try:
            parse_command(raw)
        except InvalidCommand:
            reply = self.check(self.in_memory.receive_command(raw))
            self.assertEqual((reply.status, json.loads(reply.body)["code"]), (400, "INVALID_COMMAND"))
            return reply
        return self.check(self.in_memory.receive_command(raw))

    def commands(self) -> list[dict[str, Any]]:
        """All commands, valid, by Alice."""
        alice, bob = self.alice, self.bob
        event = {
            "sender_did": bob.did,
            "recipient_did": alice.did,
            "contract_id": "contract",
            "timestamp": 1_700_000_000,
            "payload": "c2VhbGVk",
            "encrypted_tags": [make_encrypted_tag("chat", alice.seed), "two"],
        }
        pages = {"page": 0, "page_size": 10}
        public = {"event": '{"type":"blog.post"}', "tags": ["blog", "é"], "timestamp": 1_760_000_000.5}
        signature = sign_event("", [], 0, alice.seed)
        request = {"encrypted_contract_request": "AAAA", "requestor_ephemeral_public_key": "AAAA"}
        contract = {"signed_communication_contract": alice.contract_with(bob)}
        asked = "COMMUNICATION_CONTRACT"
        direct: list[tuple[str, dict[str, Any], str | None]] = [
            (f"REQUEST_{asked}", request, bob.did),
            (f"REQUEST_{asked}", alice.registration_request(), None),
            (f"{asked}_RESPONSE", contract, bob.did),
            (f"QUERY_PENDING_{asked}_REQUESTS", {"pagination": pages}, None),
            (f"ACKNOWLEDGE_PENDING_{asked}_REQUESTS", {"communication_contract_ids": ["a", "b"]}, None),
            (f"SAVE_{asked}", contract, None),
            (
                f"QUERY_{asked}S",
                {"filter": {"did": bob.did, "expires_at_before": 2e9, "expires_at_after": 1}, "pagination": pages},
                None,
            ),
            ("QUERY_PENDING_EVENTS", {"filter": {"sender_did": bob.did}, "pagination": pages}, None),
            ("ACKNOWLEDGE_PENDING_EVENTS", {"event_ids": ["a", "b"]}, None),
            ("SAVE_EVENTS", {"events": [event, {**event, "sender_did": alice.did}]}, None),
            (
                "QUERY_EVENTS",
                {
                    "filter": {
                        "after_timestamp": 1,
                        "before_timestamp": 2e9,
                        "participant_did": bob.did,
                        "encrypted_tags": ["two"],
                        "unprocessed_only": True,
                    },
                    "pagination": pages,
                },
                None,
            ),
            ("UPDATE_EVENT_TAGS", {"events": [{"event_id": "a", "encrypted_tags": ["one"]}]}, None),
        ]
        found = [alice.command({"type": name, **members}, to=to) for name, members, to in direct]
        found.append(alice.command("c2VhbGVk", to=bob.did, channel=PRIVATE))
        for payload in (
            {"type": "PUBLISH_PUBLIC_EVENT", **public, "event_signature": signature, "channel_id": "blog"},
            {"type": "DELETE_PUBLIC_EVENT", "public_event_id": "a"},
        ):
            found.append(alice.command(payload, channel=PUBLIC))
        return [json.loads(raw) for raw in found]

    def sign_again(self, document: Any) -> Any:
        """Replace the nonce, unless that was changed, and sign as Alice as far as possible."""
        try:
            header, payload = document["header"], document["payload"]
            if header["nonce"] in self.nonces:
                header["nonce"] = str(uuid.uuid4())
            if "event_signature" in payload:
                payload["event_signature"] = self.event_signature(payload)
            document["signature"] = sign_json({"header": header, "payload": payload}, self.alice.seed)
        except (KeyError, TypeError, ValueError):
            pass
        return document

    def event_signature(self, payload: dict[str, Any]) -> str:
        """Signature of an event to publish."""
        event, tags, timestamp = (payload[name] for name in ("event", "tags", "timestamp"))
        return sign_event(event, tags, timestamp, self.alice.seed, payload.get("channel_id"))


class BodyTests(FuzzTestCase):
    """Bodies of POST requests."""

    def setUp(self) -> None:
        super().setUp()
        self.good = self.commands()
        self.nonces = {item["header"]["nonce"] for item in self.good}

    def test_valid_commands(self) -> None:
        """The commands on which the other tests are based succeed, except deleting what does not exist."""
        replies = [self.send(to_json(self.sign_again(item))) for item in self.good]
        self.assertEqual([reply.status for reply in replies], [200] * 14 + [404])

    def test_oddities(self) -> None:
        """Every oddity at every path of every command, signed."""
        seen = set()
        for good, part in self.distinct_parts():
            for variant in variants(part):
                document = {**copy.deepcopy(good), **variant} if part is not good else variant
                seen.add(self.send(to_json(self.sign_again(document))).status)
        self.assertEqual(seen, {200, 400, 401, 404})

    def test_long_strings(self) -> None:
        """A megabyte in place of every string."""
        for good, part in self.distinct_parts():
            for path in paths_of(part):
                if isinstance(value_at(good, path), str):
                    self.send(to_json(self.sign_again(replaced(good, path, "x" * MEBIBYTE))))

    def distinct_parts(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """All commands, each with the part that is specific to it."""
        channels = set()
        for good in self.good:
            channel = good["header"]["channel"]
            yield good, {"payload": good["payload"]} if channel in channels else good
            channels.add(channel)

    def test_long_lists(self) -> None:
        """Ten thousand items in every list."""
        for good in self.good:
            for path in paths_of(good):
                found = value_at(good, path)
                if isinstance(found, list):
                    reply = self.send(to_json(self.sign_again(replaced(good, path, found[:1] * 10_000))))
                    self.assertEqual(reply.status, 400, path)

    def test_lists_of_maximum_length(self) -> None:
        """A thousand items are accepted."""
        for good in self.good:
            for path in paths_of(good):
                found = value_at(good, path)
                if isinstance(found, list):
                    reply = self.send(to_json(self.sign_again(replaced(good, path, found[:1] * 1000))))
                    self.assertEqual(reply.status, 200, path)

    def test_depth(self) -> None:
        """Endless nesting of arrays and objects, closed or not, anywhere."""
        for raw in (
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"header":' * 50_000 + b"1" + b"}" * 50_000,
            b'{"header":{"channel":"DIRECT_AUTHENTICATED"},"payload":{"type":"SAVE_EVENTS","events":%b%b},"signature":""}'
            % (b"[" * 5000, b"]" * 5000),
        ):
            self.assertEqual(self.send(raw).status, 400)

    def test_duplicate_members(self) -> None:
        """An object with a duplicate name is refused at any path."""
        for good in self.good:
            for path in paths_of(good):
                if isinstance(path[-1], str):
                    doubled = replaced(good, (*path[:-1], "\0twin\0"), value_at(good, path))
                    raw = to_json(doubled).replace(b'"\\u0000twin\\u0000"', to_json(path[-1]))
                    self.assertEqual(self.send(raw).status, 400, path)

    def test_surrogates(self) -> None:
        """A lone surrogate is refused anywhere; a pair of escapes is one character."""
        for good in self.good:
            raw = to_json({**good, "unknown": "HERE"})
            for half in (b"\\ud800", b"\\udc00", b"\\ud800x", b"\\udc00\\ud800", b"\xed\xa0\x80"):
                self.assertEqual(self.send(raw.replace(b"HERE", half)).status, 400)
        whole = to_json({**self.encode_payload({"type": "QUERY_EVENTS", "note": "\U0001f600"}), "unknown": 1})
        self.assertIn(b"\\ud83d\\ude00", whole)
        self.assertEqual(self.send(whole).status, 200)

    def encode_payload(self, payload: Any) -> Any:
        """Encode a command by Alice with this payload."""
        return json.loads(self.alice.command(payload))

    def test_contract_is_returned_unchanged(self) -> None:
        """A contract that both have signed is returned unchanged, or refused."""
        terms = self.alice.contract_with(self.bob)["communication_contract"]
        kept = set()
        for variant in variants({**terms, "unknown": {"a": [1.0]}}):
            signed = self.countersign(variant)
            if signed is None:
                continue
            reply = self.send(
                self.encode_leniently("SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=signed)
            )
            if reply.status == 200:
                kept.add(self.comparable(self.newest_contract()))
                self.assertIn(self.comparable(signed), kept)
        self.assertGreater(len(kept), 50)

    def countersign(self, terms: dict[str, Any]) -> dict[str, Any] | None:
        """Sign by both, if possible."""
        try:
            signature = sign_json(terms, self.alice.seed)
            return {
                "communication_contract": terms,
                "requestor_signature": signature,
                "recipient_signature": sign_contract(terms, self.bob.seed),
            }
        except ValueError:
            return None

    def encode_leniently(self, type_: str, **members: Any) -> bytes:
        """Encode a command by Alice without restrictions on its JSON."""
        signable = {"header": self.alice.header("DIRECT_AUTHENTICATED", self.alice.mediator)}
        signable["payload"] = {"type": type_, **members}
        return to_json({**signable, "signature": sign_json(signable, self.alice.seed)})

    def newest_contract(self) -> Any:
        """The contract that Alice stored last."""
        total = self.contracts(0)["pagination"]["total"]
        (newest,) = self.contracts(total - 1)["communication_contracts"]
        return newest["signed_communication_contract"]

    def contracts(self, page: int) -> Any:
        """A page of one contract."""
        return self.alice.answer("QUERY_COMMUNICATION_CONTRACTS", pagination={"page": page, "page_size": 1})[
            "payload"
        ]

    def comparable(self, value: Any) -> str:
        """The value with the numbers of a JavaScript engine, in which zero has no sign."""

        def number(text: str) -> float:
            return float(text) + 0.0

        return json.dumps(json.loads(json.dumps(value), parse_int=number, parse_float=number), sort_keys=True)

    def test_registrations(self) -> None:
        """Every oddity inside a request for registration, encrypted and signed correctly."""
        carol = InMemoryIdentity(self.in_memory, "carol")
        plain = {"communication_contract": carol.contract_terms(carol.mediator), "requestor_signature": ""}
        granted = 0
        for variant in variants(plain):
            terms = variant.get("communication_contract")
            if isinstance(terms, dict) and variant.get("requestor_signature") == "":
                variant["requestor_signature"] = self.request(carol, terms)
            if (sealed := self.encrypt(carol, variant)) is not None:
                command = carol.command({"type": "REQUEST_COMMUNICATION_CONTRACT", **sealed})
                granted += self.send(command).status == 200
        self.assertGreater(granted, 5)
        for garbage in (b"", b"\xff", b"[" * 10_000, b"null", b'{"a":1,"a":2}', b"x" * MEBIBYTE):
            sealed = carol.encrypt_registration(garbage.decode("latin-1"))
            command = carol.command({"type": "REQUEST_COMMUNICATION_CONTRACT", **sealed})
            self.assertEqual(self.send(command).status, 400)

    def request(self, new_identity: InMemoryIdentity, terms: dict[str, Any]) -> str:
        try:
            return new_identity.request(terms)
        except ValueError:
            return ""

    def encrypt(self, new_identity: InMemoryIdentity, plaintext: Any) -> dict[str, Any] | None:
        try:
            return new_identity.encrypt_registration(plaintext)
        except ValueError:
            return None  # orjson cannot write it

    @few
    @given(st.binary(max_size=300))
    def test_arbitrary_bytes(self, raw: bytes) -> None:
        """Arbitrary bytes."""
        self.send(raw)

    @few
    @given(anything)
    def test_arbitrary_values(self, value: Any) -> None:
        """Arbitrary JSON."""
        self.send(to_json(value))

    @few
    @given(st.data())
    def test_random_changes(self, data: st.DataObject) -> None:
        """Valid commands with up to three changed values, signed."""
        document = data.draw(st.sampled_from(self.good))
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from(list(paths_of(document))))
            document = (
                replaced(document, path, data.draw(anything)) if data.draw(st.booleans()) else without(document, path)
            )
            if not document:
                break
        self.send(to_json(self.sign_again(document)))

    @few
    @given(st.data())
    def test_random_damage(self, data: st.DataObject) -> None:
        """Valid commands with changed, missing or repeated bytes."""
        raw = bytearray(to_json(self.sign_again(data.draw(st.sampled_from(self.good)))))
        rng = random.Random(data.draw(st.integers(0, 1 << 32)))
        for _ in range(data.draw(st.integers(1, 4))):
            start = rng.randrange(len(raw))
            end = min(len(raw), start + rng.randrange(1, 20))
            raw[start:end] = rng.choice([b"", raw[start:end] * 2, rng.randbytes(2), b'"', b"{", b"\\u0000"])
            raw = raw or bytearray(b"{")
        self.send(bytes(raw))


class SocketTests(FuzzTestCase):
    """First frames of sockets."""

    def reply_to_first_frame(self, frame: bytes, *, binary: bool = False) -> str:
        """Return the reply to a first frame."""
        dialogue = InMemoryDecentrlSocket(self.in_memory)
        dialogue.send(frame, binary=binary)
        (outcomes,) = dialogue.take_frames()
        self.assertEqual(self.flushLoggedErrors(), [])
        if outcomes == {"type": "AUTH_SUCCESS"}:
            self.assertEqual(dialogue.socket.codes, [])
        else:
            self.assertEqual((set(outcomes), outcomes["type"]), ({"type", "code"}, "AUTH_FAILED"))
            self.assertEqual(dialogue.socket.codes, [self.close_code(outcomes["code"])])
        dialogue.disconnect()
        return str(outcomes.get("code", outcomes["type"]))

    def close_code(self, code: str) -> int:
        """The close code of an error code."""
        (close,) = {row.close_code for row in DECENTRL_CLOSE_CODES.values() if row.code == code}
        self.assertIn(close, range(4002, 4008))
        return close

    def authentication(self) -> dict[str, Any]:
        """A valid authentication."""
        return dict(json.loads(self.alice.authentication_frame()))

    def sign(self, message: Any) -> bytes:
        """Sign the message as it is."""
        try:
            signable = {name: message[name] for name in ("did", "signing_key_id", "timestamp", "nonce")}
            message = {**message, "signature": sign_json(signable, self.alice.seed)}
        except (KeyError, TypeError, ValueError):
            pass
        return to_json(message)

    def test_oddities(self) -> None:
        """Every oddity in every member, signed if possible."""
        outcomes = set()
        for path in paths_of(self.authentication()):
            for variant in self.variants_at(path):
                outcomes.add(self.reply_to_first_frame(self.sign(variant)))
        self.assertGreaterEqual(
            outcomes, {"AUTH_SUCCESS", "INVALID_MESSAGE", "DID_NOT_FOUND", "SIGNING_KEY_NOT_FOUND"}
        )

    def variants_at(self, path: Any) -> Iterator[Any]:
        """Valid authentications with every oddity at one path."""
        for variant in variants({path[0]: self.authentication()[path[0]]}):
            message = self.authentication()
            del message[path[0]]
            yield {**message, **variant}

    @few
    @given(st.binary(max_size=200) | anything.map(to_json), st.booleans())
    def test_arbitrary_frames(self, frame: bytes, binary: bool) -> None:
        """Arbitrary bytes and JSON."""
        self.assertEqual(self.reply_to_first_frame(frame, binary=binary), "INVALID_MESSAGE")

    @few
    @given(st.data())
    def test_random_changes(self, data: st.DataObject) -> None:
        """Valid authentications with one changed member."""
        message = self.authentication()
        name = data.draw(st.sampled_from(sorted(message)))
        raw = self.sign({**message, name: data.draw(anything)})
        try:
            parse_authentication_request(raw)
        except InvalidMessage:
            self.assertEqual(self.reply_to_first_frame(raw), "INVALID_MESSAGE")
        else:
            self.reply_to_first_frame(raw)

    @few
    @given(st.lists(st.binary(max_size=100) | anything.map(to_json), max_size=5))
    def test_frames_after_authentication(self, frames: list[bytes]) -> None:
        """Further frames get no reply, and pushes continue."""
        dialogue = self.alice.connect()
        for frame in frames:
            dialogue.send(frame)
        self.assertEqual(dialogue.take_frames(), [])
        self.check(self.bob.send_event(self.alice, "sealed"))
        self.assertEqual([outcomes["type"] for outcomes in dialogue.take_frames()], ["PENDING_EVENTS"])
        dialogue.disconnect()


class PublicTests(FuzzTestCase):
    """Queries of public channels."""

    def build(self) -> InMemoryMediator:
        """Build the mediator with its HTTP site."""
        self.site_fixture = InMemorySite(self, **PLENTY, decentrl=ROOM)
        return self.site_fixture

    def read(self, did: str, arguments: dict[bytes, list[bytes]]) -> int:
        """Return the status of a query."""
        asked = self.in_memory.decentrl.dispatcher.public(did, arguments, PEER)
        reply: RequestReply = self.successResultOf(Deferred.fromCoroutine(asked))
        self.assertIn(reply.status, (200, 400))
        body = json.loads(reply.body)
        expected = {"publisher_did", "events", "pagination"} if reply.status == 200 else {"type", "code"}
        self.assertEqual(set(body), expected)
        self.assertEqual(self.flushLoggedErrors(), [])
        return reply.status

    @few
    @given(
        st.text(max_size=30) | st.text(max_size=30).map("did:".__add__),
        st.dictionaries(
            st.sampled_from([b"tags", b"after", b"before", b"channel_id", b"page", b"page_size", b"other"]),
            st.lists(
                st.binary(max_size=10)
                | st.integers().map(lambda number: b"%d" % number)
                | st.floats().map(lambda number: repr(number).encode())
                | st.text(max_size=10).map(str.encode),
                max_size=3,
            ),
        ),
    )
    def test_arguments(self, did: str, arguments: dict[bytes, list[bytes]]) -> None:
        """Any DID and any values."""
        self.read(did, arguments)

    def test_oddities(self) -> None:
        """Boundary numbers in every parameter."""
        did = self.alice.did
        for name in (b"after", b"before", b"page", b"page_size", b"tags", b"channel_id"):
            for text in NUMBERS:
                self.read(did, {name: [text.encode()]})
        for status, arguments in (
            (200, {b"page": [b"9007199254740991"], b"page_size": [b"1000"]}),
            (400, {b"page": [b"9007199254740992"]}),
            (400, {b"page_size": [b"1001"]}),
            (200, {b"tags": [b"," * 100_000]}),
            (400, {b"tags": [b"a," * 1001]}),
            (400, {b"tags": [b"\xff"]}),
            (400, {b"channel_id": [b""]}),
            (200, {b"channel_id": [b"\0"], b"tags": [b"\0"]}),
        ):
            self.assertEqual(self.read(did, arguments), status, arguments)

    @few
    @given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60), st.booleans())
    def test_paths_and_queries(self, rest: str, is_did: bool) -> None:
        """Any characters allowed in a URL, in path and query."""
        path = f"/public/{self.alice.did}?{rest}" if is_did else f"/public/{rest}"
        answered = self.site_fixture.request("GET", path)
        self.assertIn(answered.status, (200, 400))
        self.assertEqual(answered.headers["content-type"], "application/json")
        self.assertIsInstance(answered.json, dict)
        self.assertEqual(self.flushLoggedErrors(), [])

    @few
    @given(st.binary(max_size=40))
    def test_percent_encoded_bytes(self, raw: bytes) -> None:
        """Any percent-encoded bytes, as a DID and as a tag."""
        escaped = quote(raw, safe="")
        for path in (f"/public/{escaped}", f"/public/did:{escaped}?tags={escaped}&channel_id=x{escaped}"):
            self.assertIn(self.site_fixture.request("GET", path).status, (200, 400))
        self.assertEqual(self.flushLoggedErrors(), [])
