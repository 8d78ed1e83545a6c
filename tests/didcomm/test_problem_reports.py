"""Problem reports: who can read them, who can verify them, and what they say."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import QueueFull, StoreUnavailable
from mediatord.identity.invitation import build_invitation
from mediatord.protocol.didcomm import json_web_signature
from mediatord.protocol.didcomm.did_document import strip_did_url
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3, resolve_local
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE, encrypt_anoncrypt
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm.message import PLAINTEXT_MEDIA_TYPE
from mediatord.ratelimit.admission import RequestReply
from mediatord.wallet.didcomm_messages import anoncrypt, build_forward, compose_message
from tests.in_memory_mediator import (
    CM3,
    MP,
    PEER,
    PING,
    InMemoryMediator,
    InMemoryWallet,
    code_of,
    pack_forward,
    read_problem_report,
)
from tests.wallet_identities import generate_identity

NOBODY = "did:example:nobody"
NOT_FOUND, NOT_ENROLLED = "e.p.me.res.not-found", "e.p.req.not_enroll"


class SignedReportTests(SynchronousTestCase):
    """Anonymous senders can verify that this mediator refused."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 1000})
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def send_by_general_path(self, raw: bytes) -> RequestReply:
        """Post on the general path and return the reply."""
        return self.successResultOf(
            Deferred.fromCoroutine(self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER)))
        )

    def read_refusal(self, reply: RequestReply, code: str) -> dict[str, Any]:
        """Return the report, signed by the DID of the mediator that was addressed."""
        self.assertEqual((reply.status, reply.media_type), (400, json_web_signature.SIGNED_MEDIA_TYPE))
        report = read_problem_report(reply)
        self.assertEqual(report["body"]["code"], code)
        return report

    def test_all_paths(self) -> None:
        """On either path over HTTP, and as a frame on a socket."""
        raw = pack_forward(self.in_memory, NOBODY, self.bob.make_payload(), id="f-1", thid="t-1")
        socket = self.in_memory.socket()
        for reply in (
            self.in_memory.receive(raw),
            self.send_by_general_path(raw),
            self.in_memory.receive(raw, socket),
        ):
            report = self.read_refusal(reply, NOT_FOUND)
            self.assertEqual(report["body"]["comment"], "Recipient not registered with this mediator")
            self.assertEqual((report["pthid"], report["from"]), ("t-1", self.in_memory.did))

    def test_form(self) -> None:
        """General JSON, one signature, the key id in the unprotected header alone: what all libraries read."""
        jws = json.loads(self.in_memory.receive(pack_forward(self.in_memory, NOBODY, self.bob.make_payload())).body)
        (signature,) = jws["signatures"]
        self.assertEqual(
            (set(jws), set(signature)), ({"payload", "signatures"}, {"protected", "signature", "header"})
        )
        self.assertEqual(signature["header"], {"kid": f"{self.in_memory.did}#key-2"})

    def test_refusals_of_a_forward(self) -> None:
        """All that the sender can act on."""
        payload = self.bob.make_payload()
        linked = {"attachments": [{"data": {"links": ["https://x.example"], "hash": "x"}}]}
        for message, code in (
            (build_forward(self.bob.did, []), "e.p.msg.bad-attachment"),
            ({**build_forward(self.bob.did, [payload]), "body": {}}, "e.p.msg.missing-next"),
            ({**build_forward(self.bob.did, [payload]), "expires_time": 1}, "e.p.req.time.expired"),
            ({**build_forward(self.bob.did, [payload]), **linked}, "e.p.xfer.attachment-links-not-supported"),
            (compose_message("https://didcomm.org/x/1.0/y"), "e.p.msg.unsupported"),
        ):
            self.read_refusal(self.in_memory.receive(anoncrypt(message, self.in_memory.document)), code)

    def test_reports_in_the_clear(self) -> None:
        """Undecryptable messages, temporary failures, and requests that need a sender."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())
        cut = json.loads(raw)
        cut["tag"] = cut["tag"][::-1]
        for body in (b"{}", b"no JSON", json.dumps(cut).encode(), json.dumps(compose_message(PING)).encode()):
            self.assertEqual(self.in_memory.receive(body).media_type, PLAINTEXT_MEDIA_TYPE)
        self.assertEqual(
            self.in_memory.receive(
                anoncrypt(compose_message(f"{CM3}/mediate-request"), self.in_memory.document)
            ).media_type,
            PLAINTEXT_MEDIA_TYPE,
        )
        for error in (StoreUnavailable(), QueueFull()):
            for operation, send in (("enqueue_each", self.in_memory.receive), ("enqueue", self.send_by_general_path)):
                with self.in_memory.failing(operation, error):
                    self.assertEqual(send(raw).media_type, PLAINTEXT_MEDIA_TYPE)

    def test_nothing_is_signed_over_the_limit(self) -> None:
        """An address over its limit has nothing signed."""
        in_memory = InMemoryMediator(self, limits={"ip_per_minute": 5})
        raw = pack_forward(in_memory, NOBODY, self.bob.make_payload())
        replies = [in_memory.receive(raw) for _ in range(8)]
        forms = [(reply.status, reply.media_type) for reply in replies]
        self.assertEqual(forms, [(400, json_web_signature.SIGNED_MEDIA_TYPE)] * 5 + [(429, PLAINTEXT_MEDIA_TYPE)] * 3)

    def test_authenticated_senders_get_encrypted_reports(self) -> None:
        """Authenticated senders get an encrypted report."""
        attachments = [{"data": {"json": json.loads(self.bob.make_payload())}}]
        reply = self.bob.ask(FORWARD, {"next": NOBODY}, attachments=attachments)
        self.assertEqual((reply.status, reply.media_type), (400, ENCRYPTED_MEDIA_TYPE))
        self.assertEqual(code_of(reply, self.bob), NOT_FOUND)

    def test_signed_by_the_addressed_spelling(self) -> None:
        """The key id has the spelling that the sender used and can resolve (reference 8.6)."""
        did, identity = self.in_memory.did, self.in_memory.base.identity.now
        (agreement,) = self.in_memory.document.key_agreement
        (signing,) = resolve_local(did).authentication
        addressed, signer = agreement.key.multibase(), signing.key.multibase()
        for kid, expected in (
            (f"{did}#key-1", f"{did}#key-2"),
            (f"{did}#{addressed}", f"{did}#{signer}"),
            (f"{did}#{addressed[1:]}", f"{did}#{signer[1:]}"),
            (f"{did}#{addressed[1:9]}", f"{did}#{signer[1:9]}"),
            (f"{derive_did_peer_3(did)}#key-1", f"{derive_did_peer_3(did)}#key-2"),
            (f"{identity.web_did}#prekey", f"{identity.web_did}#signing"),
        ):
            raw = self.encrypt_to_kid(kid, agreement.key)
            for send in (self.in_memory.receive, self.send_by_general_path):
                jws = json.loads(send(raw).body)
                self.assertEqual(jws["signatures"][0]["header"]["kid"], expected)
                report = json.loads(json_web_signature.parse_jws(jws).verify(signing.key))
                self.assertEqual(report["from"], strip_did_url(expected))

    def encrypt_to_kid(self, kid: str, key: PublicKey) -> bytes:
        plaintext = json.dumps(build_forward(NOBODY, [self.bob.make_payload()])).encode()
        return encrypt_anoncrypt(plaintext, [(kid, key)])


class CodeTests(SynchronousTestCase):
    """`didcomm.problem_codes`."""

    def test_codes(self) -> None:
        """The code of UC-021, or that of Identus; the log has the same."""
        for setting, code in ((None, NOT_FOUND), ("uc021", NOT_FOUND), ("identus", NOT_ENROLLED)):
            in_memory = InMemoryMediator(self, didcomm={} if setting is None else {"problem_codes": setting})
            bob = InMemoryWallet(in_memory).enrol()
            raw = pack_forward(in_memory, NOBODY, bob.make_payload())
            anonymous = in_memory.receive(raw)
            self.assertEqual((anonymous.status, code_of(anonymous)), (400, code))
            slowly = self.successResultOf(
                Deferred.fromCoroutine(in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER)))
            )
            self.assertEqual((slowly.status, code_of(slowly)), (400, code))
            attachments = [{"data": {"json": json.loads(bob.make_payload())}}]
            authenticated = bob.ask(FORWARD, {"next": NOBODY}, attachments=attachments)
            self.assertEqual((authenticated.status, code_of(authenticated, bob)), (400, code))
            refused = [event for event in in_memory.events("req.done") if event["status"] == 400]
            self.assertEqual([event["code"] for event in refused], [code] * 3)
            self.assertEqual(in_memory.counter("mediator_rejected_total", reason="recipient_unknown"), 3)
            unread = in_memory.receive(b"{}")
            self.assertEqual(code_of(unread), "e.p.msg")


# What each library accepts in headers, where narrower than the specification; others it accepts or passes to the
# application.
STRINGS, NUMBERS, LISTS, OBJECTS = "string", "number", "list of strings", "object"
EXPECTED = {
    "id": STRINGS,
    "typ": STRINGS,
    "type": STRINGS,
    "from": STRINGS,
    "to": LISTS,
    "thid": STRINGS,
    "pthid": STRINGS,
    "created_time": NUMBERS,
    "body": OBJECTS,
}
LIBRARIES: dict[str, dict[str, str]] = {
    # Requires `id`, `type`, `body`, a full `typ` and whole numbers; refuses unknown members of attachments.
    "didcomm (Python)": EXPECTED,
    "didcomm-node": EXPECTED,
    # Expects `ack` to be a string and fails on a list.
    "didcomm-jvm": {**EXPECTED, "ack": STRINGS},
    "didcomm-messaging": EXPECTED,
    "@veramo/did-comm": EXPECTED,
}
ATTACHMENT = {"id", "media_type", "data"}


def kind(value: object) -> str:
    """The kind of a header's value, as libraries distinguish them."""
    if isinstance(value, str):
        return STRINGS
    if isinstance(value, int) and not isinstance(value, bool):
        return NUMBERS
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return LISTS
    return OBJECTS if isinstance(value, dict) else "something else"


def check_headers(message: dict[str, Any]) -> None:
    """Every library can read the message."""
    headers = {name: kind(value) for name, value in message.items() if name != "attachments"}
    for library, takes in LIBRARIES.items():
        wrong = {name: found for name, found in headers.items() if takes.get(name) != found}
        assert not wrong, (library, message["type"], wrong)
    assert {"id", "type", "body"} <= set(message), message
    assert message.get("typ", PLAINTEXT_MEDIA_TYPE) == PLAINTEXT_MEDIA_TYPE, message
    assert "attachments" not in message or message["attachments"], message
    for attachment in message.get("attachments", ()):
        assert set(attachment) == ATTACHMENT, attachment
        (form,) = attachment["data"]
        assert form in ("json", "base64"), attachment
    assert "thid" not in message or "pthid" not in message, message
    assert ("pthid" in message) <= message["type"].endswith("/problem-report"), message


class HeaderTests(SynchronousTestCase):
    """Minimal headers, for libraries stricter than the specification."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, didcomm={"rewrap": True}, limits={"ip_per_minute": 1000})
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.seen: set[str] = set()

    def check(self, message: dict[str, Any]) -> None:
        check_headers(message)
        self.seen.add(message["type"].removeprefix("https://didcomm.org/"))

    def asked(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> None:
        reply = self.bob.ask(type_, body, thid="a-thread", pthid="another", lang="de", please_ack=[""], **headers)
        self.check(json.loads(self.bob.open(reply.body).plaintext))

    def test_all_sent_messages(self) -> None:
        """Each kind of message, to each kind of recipient."""
        cm2 = "https://didcomm.org/coordinate-mediation/2.0"
        update = {"updates": [{"recipient_did": self.bob.did, "action": "add"}]}
        for base, words in (
            (CM3, ("recipient-update", "recipient-query")),
            (cm2, ("keylist-update", "keylist-query")),
        ):
            self.asked(f"{base}/mediate-request")
            self.asked(f"{base}/{words[0]}", update)
            self.asked(f"{base}/{words[1]}", {"paginate": {"limit": 1, "offset": 0}})
        queries = [{"feature-type": "protocol", "match": "*"}]
        self.asked("https://didcomm.org/discover-features/2.0/queries", {"queries": queries})
        self.asked(PING, {})
        self.asked(f"{MP}/status-request")
        socket = self.bob.go_live()
        self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload()))
        pushed = self.bob.open(socket.frames[-1])
        self.check(json.loads(pushed.plaintext))
        wrapped = json.dumps(json.loads(pushed.plaintext)["attachments"][0]["data"]["json"]).encode()
        self.check(json.loads(self.bob.open(wrapped).plaintext))
        self.asked(f"{MP}/delivery-request", {"limit": 1})
        self.asked(f"{MP}/messages-received", {"message_id_list": []})
        self.asked("https://didcomm.org/unknown/1.0/message")
        self.asked(f"{MP}/live-delivery-change", {"live_delivery": True})
        for raw in (b"{}", pack_forward(self.in_memory, NOBODY, self.bob.make_payload())):
            self.check(read_problem_report(self.in_memory.receive(raw)))
        self.check(build_invitation("https://mediator.example", self.in_memory.did))
        denied = InMemoryMediator(self, didcomm={"registration": "allow-list"})
        guest = InMemoryWallet(denied)
        self.check(json.loads(guest.open(guest.ask(f"{CM3}/mediate-request").body).plaintext))
        self.assertEqual(
            self.seen,
            {
                *(f"coordinate-mediation/{version}/mediate-grant" for version in ("2.0", "3.0")),
                "coordinate-mediation/3.0/mediate-deny",
                "coordinate-mediation/3.0/recipient-update-response",
                "coordinate-mediation/3.0/recipient",
                "coordinate-mediation/2.0/keylist-update-response",
                "coordinate-mediation/2.0/keylist",
                "discover-features/2.0/disclose",
                "trust-ping/2.0/ping-response",
                *(f"messagepickup/3.0/{name}" for name in ("status", "delivery")),
                "routing/2.0/forward",
                "report-problem/2.0/problem-report",
                "out-of-band/2.0/invitation",
            },
        )

    def test_account_with_unstorable_long_form(self) -> None:
        """An account whose long form cannot be stored fetches and deletes nevertheless."""
        in_memory = InMemoryMediator(self)
        bob = InMemoryWallet(in_memory, generate_identity("did:peer:4", endpoint=in_memory.did))
        resolver = in_memory.didcomm.dispatcher._context.unpacker._resolver
        full = self.patch(resolver, "_remember", lambda short, long: fail(StoreUnavailable()))
        self.assertEqual(bob.ask(f"{CM3}/mediate-request").status, 503)
        self.assertEqual(bob.count_queued(), 0)
        self.assertEqual(bob.answer(f"{MP}/delivery-request", {"limit": 9}).body["message_count"], 0)
        self.assertEqual(bob.ask(f"{MP}/messages-received", {"message_id_list": ["m"]}).status, 200)
        full.restore()
        bob.enrol()

    def test_ack_header(self) -> None:
        """Left out unless the setting adds it."""
        for setting, ack in ((False, None), (True, ["f-1"])):
            in_memory = InMemoryMediator(self, didcomm={"problem_report_ack": setting})
            bob = InMemoryWallet(in_memory).enrol()
            report = read_problem_report(
                in_memory.receive(pack_forward(in_memory, NOBODY, bob.make_payload(), id="f-1"))
            )
            self.assertEqual((report["pthid"], report.get("ack")), ("f-1", ack))
            packed = bob.open(bob.ask("https://didcomm.org/x/1.0/y", id="f-1").body)
            self.assertEqual(json.loads(packed.plaintext).get("ack"), ack)
            self.assertNotIn("ack", read_problem_report(in_memory.receive(b"{}")))
