"""Messages of DIDComm v1 that would be expensive to process after the first error, in their envelope or inside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mediatord.protocol.didcomm_v1.did_document import OwnDocument, make_own_document
from mediatord.protocol.didcomm_v1.did_exchange import make_signed_attachment
from mediatord.protocol.didcomm_v1.envelope import is_v1_envelope, pack_anoncrypt, pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.protocol.encoding import dumps, encode_base58
from mediatord.store.interfaces.v1_connections import MAX_CONNECTION_BYTES
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, get_identity, make_key, open_answer
from tests.fuzz.bombs import COPIES, ROOM, BombTestCase
from tests.fuzz.fuzz_mediator import MeasuredCost, measure_cost
from tests.http.in_memory_site import HTTPResponse
from tests.protocol.didcomm_v1.foreign_envelope import EnvelopeWriter, KeyPair, b64

DEEP = 100_000
# Nearly as long as an envelope of 1 MiB, the longest, has room for.
LONG = 700_000
DEEP_TEXTS = (b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP)
ALL = b'"~transport":{"return_route":"all"}'


class V1BombTestCase(BombTestCase):
    """A wallet that has connected."""

    def setUp(self) -> None:
        super().setUp()
        self.wallet = InMemoryV1Wallet(self.site_fixture).enrol()
        self.identity = get_identity(self.site_fixture)

    def refuse(self, raw: bytes, *, most_calls: int = 4_000, status: int = 400) -> HTTPResponse:
        """Post an envelope, which must be refused at a bounded cost, without a body if it is one of v1."""
        work, response = self.measure(raw)
        self.assertEqual(response.status, status)
        if is_v1_envelope(raw):
            self.assertEqual(response.body, b"")
        self.assert_cost(work, most_calls, ROOM + COPIES * len(raw))
        return response

    def measure(self, raw: bytes) -> tuple[MeasuredCost, HTTPResponse]:
        """The cost of an envelope, and its response."""
        responses: list[HTTPResponse] = []
        work = measure_cost(lambda: responses.append(self.site_fixture.post(raw)))
        return work, responses[0]

    def to_routing_key(self, plaintext: bytes) -> bytes:
        """An anonymous message for routing."""
        return pack_anoncrypt(plaintext, self.identity.routing_key.did_key)

    def forward(self, msg: bytes) -> bytes:
        """An anonymous forward to the wallet with any `msg`."""
        return self.to_routing_key(
            b'{"@type":"https://didcomm.org/routing/1.0/forward","@id":"message-1","to":"%b","msg":%b}'
            % (self.wallet.recipient_base58.encode(), msg)
        )


class EnvelopeTests(V1BombTestCase):
    """Outside of the encryption, where anybody can write."""

    def write(self, recipients: list[Any] | None = None, **members: Any) -> bytes:
        """An anoncrypt to the routing key with other members in its header."""
        ours = KeyPair(self.identity.routing_key.secret[:32])

        def change(header: dict[str, Any]) -> None:
            header.update(members)
            header["recipients"] = header["recipients"] if recipients is None else recipients + header["recipients"]

        return json.dumps(EnvelopeWriter(change=change).write(b"{}", ours)).encode()

    def make_entry(self, number: int) -> dict[str, Any]:
        """A valid entry for somebody else."""
        return {"encrypted_key": b64(bytes(80)), "header": {"kid": encode_base58(number.to_bytes(32, "big"))}}

    def test_recipients(self) -> None:
        """At most 100 are read, of which one is opened and three are looked up."""
        self.refuse(self.write([self.make_entry(number) for number in range(1, 100)]), most_calls=20_000)
        others = [self.make_entry(number) for number in range(1, 101)]
        self.refuse(self.write(others), most_calls=4_000)
        self.refuse(self.write(400 * [{"header": {"kid": "1"}}]), most_calls=4_000)

    def test_key_ids(self) -> None:
        """Texts that are far too long for a key cost no arithmetic."""
        for kid in ("z" * 40_000, "1" * 40_000, "did:key:z" + "6" * 40_000, "\ud800" * 40, ["a"] * 1000, DEEP):
            self.refuse(self.write([{"encrypted_key": "", "header": {"kid": kid}}]))

    def test_header_size(self) -> None:
        """A header of more than 64 KiB is not parsed."""
        for size in (60_000, 70_000, LONG):
            self.refuse(self.write(ballast="x" * size), most_calls=4_000)

    def test_depth(self) -> None:
        """In the protected header, and around it."""
        for deep in (b'{"a":' * 9_000, b'{"alg":"Anoncrypt","a":' + b"[" * 40_000):
            self.site_fixture.post(
                json.dumps({"protected": b64(deep), "iv": "", "ciphertext": "", "tag": ""}).encode()
            )
        valid = self.write()
        for deep in (b"[" * DEEP, b'{"a":' * DEEP):
            self.refuse(valid[:-1] + b',"x":' + deep + b"}")

    def test_repeated_names(self) -> None:
        """Many members of the names by which the format is recognised."""
        valid = self.write()
        for name in (b'"protected":"e30"', b'"protected":', b'"alg":"Anoncrypt"', b'"ciphertext":"AAAA"'):
            many = valid[:-1] + (b"," + name) * 20_000 + b"}"
            work, response = self.measure(many)
            self.assertEqual(response.status, 400)
            self.assert_cost(work, 4_000, ROOM + COPIES * len(many))


class PlaintextTests(V1BombTestCase):
    """Inside, where senders and wallets write."""

    def test_depth(self) -> None:
        """In a message, in its decorators, and in what is forwarded."""
        head = b'{"@type":"https://didcomm.org/routing/1.0/forward","@id":"message-1"'
        for deep in DEEP_TEXTS:
            self.refuse(self.to_routing_key(deep))
            self.refuse(self.to_routing_key(head + b',"~timing":' + deep + b"}"))
            self.refuse(self.forward(deep))
            self.refuse(self.forward(b'{"protected":"e30","iv":"","ciphertext":"","tag":"","a":' + deep + b"}"))
            self.refuse(self.forward(json.dumps(deep[: DEEP // 2].decode()).encode()))

    def test_text(self) -> None:
        """Bytes that are no UTF-8, and surrogates without the other half, wherever a text may be."""
        for text in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"):
            self.refuse(self.to_routing_key(b'{"@type":"a","@id":"' + text + b'"}'))
        forward = b'{"@type":"https://didcomm.org/routing/1.0/forward","@id":"m","to":"%b","msg":"%b"}'
        for to in (b"\\ud800", b"did:example:\\ud800", b"did:example:a?\\udfff", b"did:key:z6Mk\\ud800", b"\\u0000"):
            for msg in (b"\\ud800", b'{\\"protected\\":\\"\\ud800\\"}'):
                reply = self.site_fixture.post(self.to_routing_key(forward % (to, msg)))
                self.assertEqual((reply.status, reply.body), (400, b""))
        for members in (b'"@id":"\\ud800"', b'"@id":"a","~thread":{"thid":"\\ud800"}', b'"@id":"\\u0000"'):
            ping = b'{"@type":"https://didcomm.org/trust_ping/1.0/ping",%b,%b}' % (members, ALL)
            self.assertIn(self.site_fixture.post(self.wallet.pack(ping)).status, (200, 400))

    def test_lists(self) -> None:
        """Ten thousand entries of every list of a request, numbers that no counter has, and long patterns."""
        many = 10_000
        for type_, members in (
            (
                "coordinate-mediation/1.0/keylist-update",
                {"updates": many * [{"action": "add"}]},
            ),
            ("coordinate-mediation/1.0/keylist-query", {"paginate": {"limit": 10**30, "offset": 10**30}}),
            ("messagepickup/2.0/messages-received", {"message_id_list": many * ["a"]}),
            ("messagepickup/2.0/delivery-request", {"limit": 10**30}),
            ("messagepickup/1.0/batch-pickup", {"batch_size": 10**30}),
            ("messagepickup/1.0/list-pickup", {"message_ids": many * ["a"]}),
            ("discover-features/2.0/queries", {"queries": many * [{"feature-type": "protocol", "match": "*"}]}),
            ("discover-features/1.0/query", {"query": "*" * LONG}),
        ):
            value = {"@type": f"https://didcomm.org/{type_}", "@id": "message-1", **members}
            raw = self.wallet.pack(json.dumps({**value, "~transport": {"return_route": "all"}}).encode())
            work, response = self.measure(raw)
            self.assertEqual(response.status, 200, type_)
            self.assertLess(len(self.wallet.open(response.body).source), 2_000, type_)
            self.assert_cost(work, 30_000, ROOM + COPIES * len(raw))


class HandshakeTests(V1BombTestCase):
    """Requests to connect, which anybody may send; each is answered by a report, or like any other."""

    def setUp(self) -> None:
        super().setUp()
        self.key = make_key("newcomer")

    def request(self, **members: Any) -> bytes:
        """A request to connect."""
        return self.pack({"@type": "https://didcomm.org/didexchange/1.1/request", **members})

    def pack(self, message: dict[str, Any]) -> bytes:
        decorated = {"@id": "message-1", "~transport": {"return_route": "all"}, **message}
        return pack_authcrypt(json.dumps(decorated).encode(), self.identity.invitation_key.did_key, self.key)

    def attach(self, own: OwnDocument, key: SigningKey | None = None, **changes: Any) -> bytes:
        """A request with a signed document."""
        content = dumps({**(own.document or {}), **changes})
        attachment = make_signed_attachment(content, "application/json", key or self.key)
        return self.request(did=own.did, **{"did_doc~attach": {"@id": "x", **attachment}})

    def assert_refused(self, raw: bytes, *, most_calls: int = 6_000) -> None:
        """No connection is made, at a bounded cost."""
        work, response = self.measure(raw)
        self.assertIn(response.status, (200, 400))
        if response.body:
            message, _ = open_answer(response.body, self.key)
            self.assertEqual(message.type.name, "problem-report")
        self.assert_cost(work, most_calls, ROOM + COPIES * len(raw))
        connections = self.site_fixture.store.v1_connections
        self.assertIsNone(self.successResultOf(connections.get_connection(self.key.did_key)))

    def bombs(self) -> Iterator[bytes]:
        own = make_own_document("did:peer:1", self.key, ["https://wallet.example/"])
        service = {"id": "#s", "type": "did-communication", "recipientKeys": [self.key.did_key]}
        yield self.request(did="did:peer:4zQm" + "1" * 30_000)
        yield self.request(did="did:peer:4zQm" + "z" * LONG)
        yield self.request(did="did:peer:2." + "Ez6LS" * 6_000)
        yield self.request(did="did:peer:2" + ".SeyJ0IjoiZG0ifQ" * 1_900)
        yield self.request(did="did:sov:" + "1" * 30_000)
        yield self.request(did=own.did, **{"did_doc~attach": {"data": {"base64": "A" * LONG, "jws": {}}}})
        jws = make_signed_attachment(b"{}", "a", self.key)["data"]["jws"]
        yield self.request(
            did=own.did, **{"did_doc~attach": {"data": {"base64": "e30", "jws": {"signatures": 50 * [jws]}}}}
        )
        yield self.attach(own, service=300 * [service])
        yield self.attach(own, service=[{**service, "routingKeys": 300 * [make_key("router").did_key]}])
        yield self.attach(own, service=[{**service, "recipientKeys": 300 * [self.key.did_key]}])
        yield self.attach(own, authentication=5_000 * ["#key-1"])
        yield self.attach(own, publicKey=300 * [{"id": "#a", "type": "Ed25519VerificationKey2018"}])
        yield self.attach(own, make_key("somebody else"))
        for deep in ("[" * 8_000, '{"a":' * 3_000):
            attachment = make_signed_attachment(deep.encode(), "application/json", self.key)
            yield self.request(did=own.did, **{"did_doc~attach": attachment})
        connection = {"DID": own.did, "DIDDoc": {"id": own.did, "service": 300 * [service]}}
        yield self.pack({"@type": "https://didcomm.org/connections/1.0/request", "connection": connection})
        connection = {"DID": "a" * 30_000, "DIDDoc": {"id": own.did}}
        yield self.pack({"@type": "https://didcomm.org/connections/1.0/request", "connection": connection})

    def test_documents(self) -> None:
        """DIDs, documents, attachments and signatures that are too many, too long, too deep, or somebody else's."""
        for raw in self.bombs():
            self.assert_refused(raw)

    def test_stored_text_is_bounded(self) -> None:
        """The longest endpoint and all routing keys that are read fit, or nothing is stored."""
        own = make_own_document("did:peer:1", self.key, ["https://wallet.example/"])
        routers = [make_key(str(number)).did_key for number in range(100)]
        service = {
            "id": "#s",
            "type": "did-communication",
            "recipientKeys": [self.key.did_key],
            "routingKeys": routers,
        }
        for endpoint in ("https://wallet.example/" + "x" * 2_000, "https://wallet.example/" + "x" * 9_000):
            self.measure(self.attach(own, service=[{**service, "routingKeys": routers, "serviceEndpoint": endpoint}]))
            connections = self.site_fixture.store.v1_connections
            stored = self.successResultOf(connections.get_connection(self.key.did_key))
            self.assertLess(len(repr(stored)) + len(str(getattr(stored, "endpoint", ""))), MAX_CONNECTION_BYTES)
