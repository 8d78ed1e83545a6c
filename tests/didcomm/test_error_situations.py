"""Every situation of reference section 11: its response, nothing stored, its counter."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.didcomm import json_web_signature, jwe
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.ratelimit.admission import MEMORY_WAIT_SECONDS, RequestReply
from mediatord.wallet.didcomm_client import read_delivery
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, build_forward, compose_message
from tests.from_prior import FromPriorClaims, make_from_prior
from tests.in_memory_mediator import (
    CM2,
    CM3,
    MP,
    NOW,
    PING,
    InMemoryMediator,
    InMemoryWallet,
    code_of,
    from_header,
    pack_forward,
    read_problem_report,
)
from tests.protocol.didcomm.foreign_jwe import JWEWriter

PLAIN = "application/didcomm-plain+json"
PACKED = "application/didcomm-encrypted+json"
SIGNED = "application/didcomm-signed+json"


class SituationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 10_000, "did_per_minute": 10_000})
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.alice = InMemoryWallet(self.in_memory)

    def assert_refused(
        self,
        reply: RequestReply,
        status: int,
        code: str,
        reason: str,
        *,
        to: InMemoryWallet | None = None,
        form: str = PLAIN,
    ) -> None:
        """
        The refusal is that of the table, in the clear or encrypted to `to`; it is counted, and nothing is stored.
        """
        self.assertEqual((reply.status, code_of(reply, to)), (status, code))
        self.assertEqual(reply.media_type, PACKED if to else form)
        self.assertEqual(self.in_memory.counter("mediator_rejected_total", reason=reason), 1)
        self.assertEqual(self.in_memory.events("req.done")[-1]["code"], code)
        self.assertEqual(self.in_memory.counter("mediator_messages_forwarded_total"), 0)
        self.assertEqual(self.bob.count_queued(), 0)

    def pack_authenticated_forward(self, **headers: Any) -> RequestReply:
        """Pack an authenticated forward by Alice; `headers` replace the valid ones."""
        attachments = [{"data": {"json": json.loads(self.bob.make_payload())}}]
        body = headers.pop("body", {"next": self.bob.did})
        return self.alice.ask(FORWARD, body, **{"attachments": attachments, **headers})

    def test_out_of_memory(self) -> None:
        """A message that waited too long for memory is refused, and recorded with its socket."""
        memory, socket = self.in_memory.didcomm.dispatcher._requests.memory, self.in_memory.socket()
        for _ in range(9):
            memory.try_acquire(socket.client, 10**9)
        origin = MessageOrigin(socket.client, socket)
        reply = Deferred.fromCoroutine(self.in_memory.didcomm.dispatcher.receive(b"x" * 1_000_000, origin))
        self.in_memory.clock.advance(MEMORY_WAIT_SECONDS)
        self.assertEqual(self.successResultOf(reply).status, 429)
        self.assertEqual(self.in_memory.events("req.done")[-1]["conn"], socket.name)

    def test_row_5_unknown_recipient(self) -> None:
        """400 with code and comment of UC-021 AF-1, encrypted to an authenticated sender."""
        reply = self.pack_authenticated_forward(body={"next": "did:example:nobody"})
        self.assertEqual(self.alice.open(reply.body).body["comment"], "Recipient not registered with this mediator")
        self.assert_refused(reply, 400, "e.p.me.res.not-found", "recipient_unknown", to=self.alice)

    def test_row_5_anonymous_forward_to_unknown_recipient(self) -> None:
        """The same, signed, for an anonymous sender; the report names the thread."""
        reply = self.in_memory.receive(
            pack_forward(self.in_memory, "did:example:nobody", self.bob.make_payload(), id="f-1")
        )
        report = read_problem_report(reply)
        self.assertEqual((report["pthid"], report["from"]), ("f-1", self.in_memory.did))
        self.assert_refused(reply, 400, "e.p.me.res.not-found", "recipient_unknown", form=SIGNED)

    def test_row_5_prefix_of_recipient(self) -> None:
        """`next` is compared as a whole."""
        for next_ in (self.bob.did[:-1], self.bob.did + "x", self.bob.did.upper()):
            reply = self.in_memory.receive(pack_forward(self.in_memory, next_, self.bob.make_payload()))
            self.assertEqual((reply.status, code_of(reply)), (400, "e.p.me.res.not-found"))

    def test_row_7_undecryptable(self) -> None:
        """One text for every cause, without a thread: no oracle (UC-021 AF-3)."""
        good = json.loads(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload()))
        stranger = WalletIdentity.generate()
        texts = set()
        for broken in (
            {**good, "tag": good["tag"][::-1]},
            {**good, "ciphertext": good["ciphertext"][:-4] + "AAAA"},
            {**good, "protected": good["protected"][:-3]},
            {**good, "recipients": [{**good["recipients"][0], "encrypted_key": "AAAA"}]},
            {**good, "recipients": [{**good["recipients"][0], "header": {"kid": stranger.agreement.kid}}]},
            {**good, "recipients": []},
            json.loads(anoncrypt(compose_message(PING), stranger.document)),
        ):
            reply = self.in_memory.receive(json.dumps(broken).encode())
            self.assertEqual((reply.status, code_of(reply)), (400, "e.p.trust.crypto"))
            report = json.loads(reply.body)
            self.assertNotIn("pthid", report)
            texts.add(json.dumps(report["body"]))
        self.assertEqual(len(texts), 1)
        self.assertEqual(self.in_memory.counter("mediator_rejected_total", reason="undecryptable"), 7)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_row_8_not_an_envelope(self) -> None:
        """400, or 415 if the Content-Type is no envelope's either."""
        self.assert_refused(self.in_memory.receive(b"hello"), 400, "e.p.msg", "not_an_envelope")
        for raw in (b"", b"[]", b"7", b"{}", b"\xff\xfe", b'{"a":NaN}', b"[" * 100_000):
            self.assertEqual(code_of(self.in_memory.receive(raw)), "e.p.msg")

    def test_row_9_plaintext(self) -> None:
        """A plaintext message is refused."""
        raw = json.dumps(compose_message(PING)).encode()
        self.assert_refused(self.in_memory.receive(raw), 400, "e.p.trust.not-encrypted", "not_encrypted")

    def test_row_9_signed_only(self) -> None:
        """A message that is only signed is refused."""
        key = self.alice.identity.signing
        raw = json_web_signature.sign(
            json.dumps(compose_message(PING, **from_header(self.alice.did))).encode(), key.kid, key.private
        )
        self.assert_refused(self.in_memory.receive(raw), 400, "e.p.trust.not-encrypted", "not_encrypted")

    def test_row_10_invalid_message(self) -> None:
        """Decrypted, but without `id` or `type`."""
        for inside in (b"{}", b"hello", b"[]", b'{"id":"1"}'):
            raw = jwe.encrypt_anoncrypt(
                inside, [(method.id, method.key) for method in self.in_memory.document.key_agreement]
            )
            self.assertEqual(code_of(self.in_memory.receive(raw)), "e.p.msg")
        self.assertEqual(self.in_memory.counter("mediator_rejected_total", reason="not_a_message"), 4)

    def test_row_11_invalid_next(self) -> None:
        """`next` is missing or not a string."""
        self.assert_refused(
            self.pack_authenticated_forward(body={}), 400, "e.p.msg.missing-next", "next_missing", to=self.alice
        )
        body: Any
        for body in ({"next": [self.bob.did]}, {"next": None}, [], {"next": ""}):
            self.assertEqual(code_of(self.pack_authenticated_forward(body=body), self.alice), "e.p.msg.missing-next")

    def test_row_12_invalid_attachments(self) -> None:
        """No attachments, unreadable ones, or unencrypted ones."""
        self.assert_refused(
            self.pack_authenticated_forward(attachments=None),
            400,
            "e.p.msg.bad-attachment",
            "bad_attachment",
            to=self.alice,
        )
        attachments: Any
        for attachments in ([], [{}], [{"data": {"base64": "?"}}], [{"data": {"json": compose_message(PING)}}]):
            self.assertEqual(
                code_of(self.pack_authenticated_forward(attachments=attachments), self.alice),
                "e.p.msg.bad-attachment",
            )

    def test_row_13_links_are_not_fetched(self) -> None:
        """Nothing that a sender names is fetched."""
        attachments = [{"data": {"links": ["https://example.com/x"], "hash": "1220"}}]
        code = "e.p.xfer.attachment-links-not-supported"
        self.assert_refused(
            self.pack_authenticated_forward(attachments=attachments), 400, code, "linked_attachment", to=self.alice
        )

    def test_row_14_expired_forward(self) -> None:
        """An expired forward is not stored."""
        reply = self.pack_authenticated_forward(expires_time=int(NOW) - 1)
        self.assert_refused(reply, 400, "e.p.req.time.expired", "forward_expired", to=self.alice)

    def nested_forward(self, depth: int) -> bytes:
        """Pack a forward to Bob inside `depth` forwards to the mediator."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload("deep"))
        for _ in range(depth):
            raw = anoncrypt(build_forward(self.in_memory.did, [raw]), self.in_memory.document)
        return raw

    def test_unwraps_forwards_to_itself(self) -> None:
        """The mediator unwraps forwards to itself, up to three levels (reference 4.3)."""
        for depth in (1, 2, 3):
            self.assertEqual(self.in_memory.receive(self.nested_forward(depth)).status, 202)
        texts = [self.bob.open(delivered.payload).text for delivered in self.bob.fetch()]
        self.assertEqual(texts, ["deep"] * 3)

    def test_row_15_forwarding_loop(self) -> None:
        """One level more is a loop."""
        self.assert_refused(
            self.in_memory.receive(self.nested_forward(4)), 400, "e.p.msg.routing-loop", "routing_loop", form=SIGNED
        )

    def test_refuses_request_inside_forward_to_itself(self) -> None:
        """A request inside a forward has no connection for its response."""
        inner = self.bob.pack(f"{MP}/status-request")
        reply = self.in_memory.receive(anoncrypt(build_forward(self.in_memory.did, [inner]), self.in_memory.document))
        self.assert_refused(reply, 400, "e.p.msg.unsupported", "unsupported", form=SIGNED)

    def test_payload_larger_than_queue(self) -> None:
        """413 in place of a 202 for a message that would be evicted at once."""
        in_memory = InMemoryMediator(self, queue={"max_bytes": 1000})
        bob = InMemoryWallet(in_memory).enrol()
        reply = in_memory.receive(pack_forward(in_memory, bob.did, bob.make_payload("x" * 2000)))
        self.assertEqual((reply.status, code_of(reply)), (413, "e.p.me.res.storage.message_too_big"))

    def test_full_queue_refuses(self) -> None:
        """429 with Retry-After, in the clear or encrypted; nothing is stored, nothing evicted."""
        in_memory = InMemoryMediator(self, queue={"max_messages": 2, "when_full": "refuse", "sender_share": 1})
        bob, alice = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory)
        messages = [pack_forward(in_memory, bob.did, bob.make_payload(text)) for text in ("1", "2", "3")]
        replies = [in_memory.receive(raw) for raw in messages]
        self.assertEqual([reply.status for reply in replies], [202, 202, 429])
        self.assertEqual((code_of(replies[2]), replies[2].retry_after), ("e.m.me.res.storage", 600))
        attachments = [{"data": {"json": json.loads(bob.make_payload("4"))}}]
        packed = alice.ask(FORWARD, {"next": bob.did}, attachments=attachments)
        self.assertEqual((packed.status, packed.media_type, packed.retry_after), (429, PACKED, 600))
        self.assertEqual(code_of(packed, alice), "e.m.me.res.storage")
        inner = pack_forward(in_memory, in_memory.did, *messages[:2])
        self.assertEqual(in_memory.receive(inner).status, 429)
        self.assertEqual([bob.open(delivered.payload).text for delivered in bob.fetch()], ["1", "2"])
        self.assertEqual(in_memory.counter("mediator_rejected_total", reason="queue_full"), 3)
        self.assertEqual(in_memory.counter("mediator_messages_forwarded_total"), 2)
        self.assertEqual(in_memory.events("msg.evict"), [])
        codes = [event["code"] for event in in_memory.events("req.done") if "code" in event]
        self.assertEqual(codes, ["e.m.me.res.storage"] * 3)

    def test_nested_forwards_are_atomic(self) -> None:
        """If one inner recipient is unknown, nothing is stored."""
        inner = [
            pack_forward(self.in_memory, next_, self.bob.make_payload()) for next_ in (self.bob.did, "did:example:x")
        ]
        raw = pack_forward(self.in_memory, self.in_memory.did, *inner)
        self.assert_refused(
            self.in_memory.receive(raw), 400, "e.p.me.res.not-found", "recipient_unknown", form=SIGNED
        )

    def test_push_failure_after_commit(self) -> None:
        """The message is durable: the sender gets its 202, and the message stays queued."""
        socket = self.bob.go_live()
        socket.send = _broken  # type: ignore[method-assign]  # a fault of ours
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())).status, 202
        )
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.bob.count_queued(), 1)

    def test_row_17_store_unavailable(self) -> None:
        """503 with Retry-After, never a 202; the same bytes are accepted once the store is back."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())
        with self.in_memory.failing("enqueue_each", StoreUnavailable()):
            reply = self.in_memory.receive(raw)
        self.assertEqual((reply.status, code_of(reply), reply.retry_after), (503, "e.p.me.res.storage", 5))
        self.assertEqual(self.in_memory.receive(raw).status, 202)

    def test_failed_request_may_be_repeated(self) -> None:
        """A request that the store did not accept is no replay."""
        raw = self.bob.pack(f"{MP}/status-request", return_route="all")
        with self.in_memory.failing("get_queue_status", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(raw).status, 503)
        self.assertEqual(self.in_memory.receive(raw).status, 200)

    def test_row_18_from_differs_from_encrypting_key(self) -> None:
        """`from` must be the DID of the encrypting key; no client library checks this (reference 1.8)."""
        for name in (self.bob.did, None, "did:example:x"):
            reply = self.alice.ask(f"{MP}/status-request", **from_header(name))
            self.assertEqual((reply.status, code_of(reply)), (400, "e.p.trust.sender-mismatch"))
            self.assertEqual(reply.media_type, PLAIN)

    def test_row_18_signer_differs_from_sender(self) -> None:
        """The signer inside must be the sender."""
        key = self.bob.identity.signing
        message = compose_message(PING, to=[self.in_memory.did], **from_header(self.alice.did))
        jws = json_web_signature.sign(json.dumps(message).encode(), key.kid, key.private)
        own = self.alice.identity.agreement
        raw = jwe.encrypt_authcrypt(
            jws, (own.kid, own.private), [(m.id, m.key) for m in self.in_memory.document.key_agreement]
        )
        self.assert_refused(self.in_memory.receive(raw), 400, "e.p.trust.sender-mismatch", "sender_mismatch")

    def test_accepts_signed_and_encrypted_messages(self) -> None:
        """authcrypt(sign) by one sender, and authcrypt inside anoncrypt (reference 1.1)."""
        key, own = self.alice.identity.signing, self.alice.identity.agreement
        keys = [(method.id, method.key) for method in self.in_memory.document.key_agreement]
        message = compose_message(PING, to=[self.in_memory.did], return_route="all", **from_header(self.alice.did))
        jws = json_web_signature.sign(json.dumps(message).encode(), key.kid, key.private)
        self.assertEqual(self.in_memory.receive(jwe.encrypt_authcrypt(jws, (own.kid, own.private), keys)).status, 200)
        hidden = jwe.encrypt_anoncrypt(self.alice.pack(PING, return_route="all"), keys)
        self.assertEqual(self.in_memory.receive(hidden).status, 200)
        four = hidden
        for _ in range(2):
            four = jwe.encrypt_anoncrypt(four, keys)
        self.assertEqual(code_of(self.in_memory.receive(four)), "e.p.trust.crypto")

    def test_row_19_anonymous_requests(self) -> None:
        """Coordination and pickup need an authenticated sender."""
        for type_ in (f"{CM3}/mediate-request", f"{CM2}/keylist-query", f"{MP}/status-request"):
            message = compose_message(type_, to=[self.in_memory.did], **from_header(self.bob.did))
            reply = self.in_memory.receive(anoncrypt(message, self.in_memory.document))
            self.assertEqual((reply.status, code_of(reply)), (400, "e.p.trust.authcrypt-required"))

    def pack_with_sender_kid(self, kid: str) -> RequestReply:
        """Pack a message that claims this key id as its sender's."""
        own = self.alice.identity.agreement
        keys = [(method.id, method.key) for method in self.in_memory.document.key_agreement]
        raw = jwe.encrypt_authcrypt(json.dumps(compose_message(PING)).encode(), (kid, own.private), keys)
        return self.in_memory.receive(raw)

    def test_row_20_invalid_sender_dids(self) -> None:
        """Unresolvable DIDs, unknown methods, and documents without the key."""
        for kid, code in (
            ("did:peer:2.Ez6LSbroken#key-1", "e.p.did.unresolvable"),
            ("did:prism:abc#key-1", "e.p.did.unsupported"),
            (f"{self.alice.did}#key-9", "e.p.did.unresolvable"),
            (f"{self.alice.did}#key-2", "e.p.did.unresolvable"),
        ):
            reply = self.pack_with_sender_kid(kid)
            self.assertEqual((reply.status, code_of(reply), reply.media_type), (400, code, PLAIN))

    def test_row_21_unknown_types(self) -> None:
        """200 with a report encrypted to an authenticated sender, else 400 in the clear."""
        for type_ in (
            "https://didcomm.org/unsupported-protocol",
            "https://didcomm.org/basicmessage/100.0/message",
            "https://didcomm.org/coordinate-mediation/1.0/mediate-request",
            "https://didcomm.org/messagepickup/4.0/status-request",
            "https://didcomm.org/routing/3.0/forward",
        ):
            self.assertEqual(code_of(self.alice.ask(type_), self.alice), "e.p.msg.unsupported")
        reply = self.in_memory.receive(
            anoncrypt(compose_message("https://didcomm.org/x/1.0/y"), self.in_memory.document)
        )
        self.assertEqual((reply.status, code_of(reply)), (400, "e.p.msg.unsupported"))

    def test_row_22_malformed_bodies(self) -> None:
        """200 with an encrypted report, whose code names the invalid part."""
        cases: tuple[tuple[str, dict[str, Any], str], ...] = (
            (f"{MP}/delivery-request", {}, "e.p.msg.bad-limit"),
            *((f"{MP}/delivery-request", {"limit": bad}, "e.p.msg.bad-limit") for bad in (0, -1, "2", True, 1.5)),
            (f"{MP}/messages-received", {"message_id_list": "x"}, "e.p.msg.bad-body"),
            (f"{MP}/live-delivery-change", {}, "e.p.msg.bad-body"),
            (f"{CM3}/recipient-update", {}, "e.p.msg.bad-updates"),
            (f"{CM2}/keylist-query", {"paginate": {"limit": 1}}, "e.p.msg.bad-paginate"),
            ("https://didcomm.org/discover-features/2.0/queries", {}, "e.p.msg.bad-body"),
        )
        for type_, body, code in cases:
            reply = self.bob.ask(type_, body)
            self.assertEqual((reply.status, code_of(reply, self.bob)), (200, code))

    def test_row_22_body_is_no_object(self) -> None:
        """For every request."""
        own = self.bob.identity.agreement
        keys = [(method.id, method.key) for method in self.in_memory.document.key_agreement]
        for type_ in (f"{MP}/status-request", f"{CM3}/recipient-update", f"{CM2}/keylist-query", PING):
            message = {**compose_message(type_, to=[self.in_memory.did], **from_header(self.bob.did)), "body": []}
            raw = jwe.encrypt_authcrypt(json.dumps(message).encode(), (own.kid, own.private), keys)
            self.assertEqual(code_of(self.in_memory.receive(raw), self.bob), "e.p.msg.bad-body")

    def test_row_23_not_enrolled(self) -> None:
        """Without a grant, and for another account's DID: the same response (reference 5.4)."""
        for type_, body in (
            (f"{CM3}/recipient-update", {"updates": []}),
            (f"{CM2}/keylist-query", {}),
            (f"{MP}/status-request", {}),
            (f"{MP}/delivery-request", {"limit": 1}),
            (f"{MP}/messages-received", {"message_id_list": []}),
        ):
            reply = self.alice.ask(type_, body)
            self.assertEqual((reply.status, code_of(reply, self.alice)), (200, "e.p.req.not_enroll"))
        carol = InMemoryWallet(self.in_memory).enrol()
        for did in (carol.did, "did:example:unknown", self.bob.did[:-1], self.bob.did + "x"):
            reply = self.bob.ask(f"{MP}/delivery-request", {"limit": 1, "recipient_did": did})
            self.assertEqual((reply.status, code_of(reply, self.bob)), (200, "e.p.req.not_enroll"))

    def test_row_24_replays(self) -> None:
        """The same bytes are refused for an hour; a new message of the same kind is not."""
        raw = self.bob.pack(f"{MP}/status-request", return_route="all")
        self.assertEqual(self.in_memory.receive(raw).status, 200)
        reply = self.in_memory.receive(raw)
        self.assertEqual((reply.status, code_of(reply, self.bob)), (200, "e.p.crypto.message.dejavu"))
        self.assertEqual(len(self.in_memory.events("replay.drop")), 1)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_row_24_modified_replays(self) -> None:
        """Whitespace, entries of other recipients and an anonymous envelope around it do not make a new request."""
        carol = InMemoryWallet(self.in_memory).enrol()
        keys = [(method.id, method.key) for method in self.in_memory.document.key_agreement]
        raw = carol.pack(f"{CM3}/recipient-query", return_route="all")
        self.assertEqual(self.in_memory.receive(raw).status, 200)
        value = json.loads(raw)
        for again in (
            raw + b" ",
            json.dumps(dict(reversed(value.items())), indent=1).encode(),
            json.dumps({**value, "tag": value["tag"] + "="}).encode(),
            jwe.encrypt_anoncrypt(raw, keys),
        ):
            reply = self.in_memory.receive(again, peer="198.51.100.1")
            self.assertEqual(code_of(reply, carol), "e.p.crypto.message.dejavu")

    def test_row_25_live_mode_over_http(self) -> None:
        """The exact comment, in the thread of the request; switching off is accepted."""
        reply = self.bob.ask(f"{MP}/live-delivery-change", {"live_delivery": "true"}, id="live-1")
        report = self.bob.open(reply.body)
        self.assertEqual(report.body["code"], "e.m.live-mode-not-supported")
        self.assertEqual(report.body["comment"], "Connection does not support Live Delivery")
        self.assertEqual(json.loads(report.plaintext)["pthid"], "live-1")
        self.assertNotIn("thid", json.loads(report.plaintext))
        off = self.bob.answer(f"{MP}/live-delivery-change", {"live_delivery": False})
        self.assertEqual(off.body["live_delivery"], False)

    def test_row_26_expired_requests(self) -> None:
        """Expired requests are refused with a report."""
        reply = self.bob.ask(f"{MP}/status-request", expires_time=int(NOW) - 1)
        self.assertEqual((reply.status, code_of(reply, self.bob)), (200, "e.p.req.time.expired"))

    def test_row_30_messages_without_response(self) -> None:
        """Problem reports, empty messages and pings without a requested response."""
        for type_, body in (
            ("https://didcomm.org/report-problem/2.0/problem-report", {"code": "e.p.x"}),
            ("https://didcomm.org/empty/1.0/empty", {}),
            (PING, {"response_requested": False}),
        ):
            reply = self.alice.ask(type_, body)
            self.assertEqual((reply.status, reply.body), (202, b""))
        anonymous = self.in_memory.receive(anoncrypt(compose_message(PING), self.in_memory.document))
        self.assertEqual((anonymous.status, anonymous.body), (202, b""))

    def test_row_31_too_many_reports(self) -> None:
        """One report about it, then silence (reference 7.3)."""
        report = "https://didcomm.org/report-problem/2.0/problem-report"
        replies = [self.alice.ask(report, {"code": "e.p.x"}) for _ in range(13)]
        self.assertEqual([reply.status for reply in replies], [202] * 10 + [200] + [202] * 2)
        self.assertEqual(code_of(replies[10], self.alice), "e.p.req.max-errors-exceeded")

    def test_requests_to_other_recipients(self) -> None:
        """A request replayed from another mediator is refused; a forward is not (reference 1.8)."""
        reply = self.bob.ask(f"{MP}/status-request", to=["did:example:other"])
        self.assertEqual((reply.status, code_of(reply, self.bob)), (200, "e.p.msg.misaddressed"))
        self.assertEqual(self.bob.ask(f"{MP}/status-request", to=self.in_memory.did).status, 200)
        self.assertEqual(self.bob.ask(f"{MP}/status-request", to=None).status, 200)
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload(), to=["did:example:other"])
        self.assertEqual(self.in_memory.receive(raw).status, 202)

    def test_internal_error(self) -> None:
        """500 with a fixed text, logged; the daemon continues."""
        with self.in_memory.failing("get_account", ZeroDivisionError()):
            reply = self.bob.ask(f"{MP}/status-request")
        self.assertEqual((reply.status, code_of(reply)), (500, "e.p.me.fault"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_other_content_types(self) -> None:
        """Row 8: 415 only if the body is no envelope either."""
        deferred = self.in_memory.didcomm.dispatcher.receive(
            b"<html>", MessageOrigin("192.0.2.1", None, has_foreign_content_type=True)
        )
        reply = self.successResultOf(Deferred.fromCoroutine(deferred))
        self.assertEqual((reply.status, code_of(reply)), (415, "e.p.msg"))


class RotationTests(SynchronousTestCase):
    """`from_prior` (reference 2.3)."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.old = InMemoryWallet(self.in_memory).enrol()
        self.new = InMemoryWallet(self.in_memory)

    def token(self, signer: WalletIdentity | None = None, **claims: Any) -> str:
        signer = signer or self.old.identity
        prior = FromPriorClaims(
            kid=claims.pop("kid", signer.signing.kid),
            iss=claims.pop("iss", self.old.did),
            sub=claims.pop("sub", self.new.did),
            iat=int(NOW),
        )
        return make_from_prior(prior, signer.signing.private)

    def test_account_moves_to_new_did(self) -> None:
        """Queue and registrations move, and the old DID is refused from then on."""
        self.in_memory.receive(pack_forward(self.in_memory, self.old.did, self.old.make_payload("moved")))
        status = self.new.answer(f"{MP}/status-request", from_prior=self.token())
        self.assertEqual(status.body["message_count"], 1)
        dids = self.new.answer(f"{CM3}/recipient-query").body["dids"]
        self.assertEqual(dids, [{"recipient_did": self.old.did}])
        reply = self.old.ask(f"{MP}/status-request")
        self.assertEqual(code_of(reply, self.old), "e.p.req.not_enroll")
        denied = self.old.answer(f"{CM3}/mediate-request")
        self.assertTrue(denied.message.type.uri.endswith("mediate-deny"))

    def test_live_socket_stays_live(self) -> None:
        """The socket of the rotation is pushed to under the new DID; older sockets are not."""
        other, socket = self.old.go_live(), self.old.go_live()
        self.new.answer(f"{MP}/status-request", from_prior=self.token(), socket=socket)
        self.in_memory.receive(pack_forward(self.in_memory, self.old.did, self.old.make_payload("still here")))
        (delivered,) = read_delivery(self.new.open(socket.frames[-1]).message)
        self.assertEqual(self.old.open(delivered.payload).text, "still here")
        self.assertEqual(other.frames, [])

    def test_refused_message_moves_nothing(self) -> None:
        """A message that is expired, of unknown type, or for another recipient moves nothing."""
        for type_, headers in (
            (f"{MP}/status-request", {"expires_time": 1}),
            ("https://didcomm.org/x/1.0/y", {}),
            (f"{MP}/status-request", {"to": ["did:example:other"]}),
        ):
            self.new.ask(type_, from_prior=self.token(), **headers)
            self.assertEqual(self.old.count_queued(), 0)

    def test_forged_rotations(self) -> None:
        """Tokens of another signer, for another DID, and invalid ones are refused and move nothing."""
        eve = InMemoryWallet(self.in_memory)
        for token in (
            self.token(eve.identity),
            self.token(eve.identity, kid=self.old.identity.signing.kid),
            self.token(sub=eve.did),
            "nonsense",
            "a.b.c",
        ):
            reply = self.new.ask(f"{MP}/status-request", from_prior=token)
            self.assertEqual((reply.status, code_of(reply)), (400, "e.p.trust.sender-mismatch"))
        self.assertEqual(self.old.count_queued(), 0)


class LimitTests(SynchronousTestCase):
    """UC-021 AF-2 and reference 4.1, 4.2."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.payload = self.bob.make_payload()

    def test_120_forwards_per_minute_and_address(self) -> None:
        """Exactly, enrolment included. The next minute is fresh, and other addresses are not limited."""
        raw = pack_forward(self.in_memory, self.bob.did, self.payload)
        self.in_memory.clock.advance(61)
        statuses = [self.in_memory.receive(raw).status for _ in range(121)]
        self.assertEqual(statuses, [202] * 120 + [429])
        reply = self.in_memory.receive(raw)
        self.assertEqual((code_of(reply), reply.retry_after), ("e.m.req.rate-limited", 60))
        self.assertEqual(self.in_memory.receive(raw, peer="192.0.2.99").status, 202)
        self.in_memory.clock.advance(60)
        self.assertEqual(self.in_memory.receive(raw).status, 202)
        self.assertEqual(len(self.in_memory.events("limit.hit")), 2)

    def test_undecryptable_posts_count(self) -> None:
        """120 get their report, the 121st is refused before decryption."""
        self.in_memory.clock.advance(61)
        statuses = [self.in_memory.receive(b"{}").status for _ in range(121)]
        self.assertEqual(statuses, [400] * 120 + [429])

    def test_all_undecryptable_messages_count(self) -> None:
        """Plaintext, malformed envelopes and unresolvable senders count."""
        own = self.bob.identity.agreement
        keys = [(method.id, method.key) for method in self.in_memory.document.key_agreement]
        unresolvable = jwe.encrypt_authcrypt(b"{}", ("did:prism:x#k", own.private), keys)
        for raw in (json.dumps(compose_message(PING)).encode(), b'{"ciphertext":"x"}', unresolvable):
            self.in_memory.clock.advance(61)
            statuses = [self.in_memory.receive(raw).status for _ in range(120)]
            self.assertEqual(statuses, [400] * 120)
            anonymous = pack_forward(self.in_memory, self.bob.did, self.payload)
            self.assertEqual(self.in_memory.receive(anonymous).status, 429)

    def test_replays_count(self) -> None:
        """Repeated requests count."""
        raw = InMemoryWallet(self.in_memory).pack(PING)
        self.in_memory.clock.advance(61)
        statuses = {self.in_memory.receive(raw).status for _ in range(120)}
        self.assertEqual(statuses, {200})
        self.assertEqual(self.in_memory.receive(raw).status, 429)

    def test_account_fetches_from_flooded_address(self) -> None:
        """Wallets behind one NAT are not locked out by a neighbour (reference section 12)."""
        for _ in range(130):
            self.in_memory.receive(b"{}")
        self.assertEqual(self.bob.count_queued(), 0)

    def test_60_forwards_per_minute_and_sender(self) -> None:
        """From any address; other senders are not limited."""
        alice, carol = InMemoryWallet(self.in_memory), InMemoryWallet(self.in_memory)
        statuses = []
        for number in range(61):
            message = build_forward(self.bob.did, [self.payload], **from_header(alice.did))
            raw = authcrypt(message, alice.identity, self.in_memory.document)
            statuses.append(self.in_memory.receive(raw, peer=f"192.0.2.{number}").status)
        self.assertEqual(statuses, [202] * 60 + [429])
        raw = authcrypt(
            build_forward(self.bob.did, [self.payload], **from_header(carol.did)),
            carol.identity,
            self.in_memory.document,
        )
        self.assertEqual(self.in_memory.receive(raw).status, 202)

    def test_claimed_sender_is_not_charged(self) -> None:
        """Anonymous forwards in the name of a sender count for the address only (reference 4.2)."""
        self.in_memory.clock.advance(61)
        alice = InMemoryWallet(self.in_memory)
        raws = [pack_forward(self.in_memory, self.bob.did, self.payload, **from_header(alice.did)) for _ in range(61)]
        self.assertEqual([self.in_memory.receive(raw).status for raw in raws], [202] * 60 + [429])
        message = build_forward(self.bob.did, [self.payload], **from_header(alice.did))
        genuine = authcrypt(message, alice.identity, self.in_memory.document)
        self.assertEqual(self.in_memory.receive(genuine, peer="198.51.100.7").status, 202)

    def test_repeated_forward_charges_sender_once(self) -> None:
        """Repetitions by somebody else count for their address only."""
        alice = InMemoryWallet(self.in_memory)
        message = build_forward(self.bob.did, [self.payload], **from_header(alice.did))
        raw = authcrypt(message, alice.identity, self.in_memory.document)
        for number in range(70):
            self.assertEqual(self.in_memory.receive(raw + b" " * number, peer=f"192.0.2.{number}").status, 202)

    def test_every_payload_counts(self) -> None:
        """Six forwards of ten payloads count like sixty of one; more than twenty payloads are refused (4.4)."""
        alice, messages = InMemoryWallet(self.in_memory), [self.payload] * 10
        statuses = []
        for _ in range(7):
            message = build_forward(self.bob.did, messages, **from_header(alice.did))
            raw = authcrypt(message, alice.identity, self.in_memory.document)
            statuses.append(self.in_memory.receive(raw, peer="198.51.100.1").status)
        self.assertEqual(statuses, [202] * 6 + [429])
        reply = self.in_memory.receive(
            pack_forward(self.in_memory, self.bob.did, *[self.payload] * 21), peer="198.51.100.2"
        )
        self.assertEqual(code_of(reply), "e.p.msg.bad-attachment")

    def test_nested_forwards_count(self) -> None:
        """Nested payloads count by number and size, and nesting is limited."""
        inner = [pack_forward(self.in_memory, self.bob.did, *[self.payload] * 18) for _ in range(6)]
        raw = pack_forward(self.in_memory, self.in_memory.did, *inner)
        self.assertEqual(self.in_memory.receive(raw, peer="198.51.100.1").status, 202)
        self.assertEqual(self.in_memory.receive(raw, peer="198.51.100.1").status, 429)
        small = [pack_forward(self.in_memory, self.bob.did, self.payload) for _ in range(9)]
        reply = self.in_memory.receive(pack_forward(self.in_memory, self.in_memory.did, *small), peer="198.51.100.2")
        self.assertEqual(code_of(reply), "e.p.msg.bad-attachment")

    def test_unknown_recipient_does_not_charge_sender(self) -> None:
        """The registration is checked first (reference 4.1)."""
        alice = InMemoryWallet(self.in_memory)
        for number in range(70):
            message = build_forward("did:example:nobody", [self.payload], **from_header(alice.did))
            raw = authcrypt(message, alice.identity, self.in_memory.document)
            self.assertEqual(self.in_memory.receive(raw, peer=f"192.0.2.{number}").status, 400)

    def test_accounts_have_their_own_limit(self) -> None:
        """600 a minute by default, 5 in this test."""
        in_memory = InMemoryMediator(self, limits={"account_per_minute": 5})
        bob = InMemoryWallet(in_memory).enrol()
        statuses = [bob.ask(f"{MP}/status-request").status for _ in range(6)]
        self.assertEqual(statuses[-1], 429)
        self.assertEqual(statuses.count(200), 4)


class Draft03Tests(SynchronousTestCase):
    """ECDH-1PU draft 03 as in Veramo (reference 1.10)."""

    def test_disabled_by_default(self) -> None:
        """Such an envelope is undecryptable unless enabled, and is then answered in anoncrypt."""
        for on in (False, True):
            in_memory = InMemoryMediator(self, didcomm={"legacy_draft03": on})
            veramo = InMemoryWallet(in_memory)
            message = compose_message(
                f"{CM3}/mediate-request", to=[in_memory.did], return_route="all", **from_header(veramo.did)
            )
            own = veramo.identity.agreement
            keys = [(method.id, method.key) for method in in_memory.document.key_agreement]
            writing = JWEWriter(sender=(own.kid, own.private), enc="A256GCM", draft03=True)
            reply = in_memory.receive(json.dumps(writing.write(encoding.dumps(message), *keys)).encode())
            if on:
                opened = veramo.open(reply.body)
                self.assertEqual((reply.status, opened.sender, opened.message.sender), (200, None, in_memory.did))
            else:
                self.assertEqual(code_of(reply), "e.p.trust.crypto")


def _broken(frame: bytes) -> bool:
    raise ZeroDivisionError
