"""`/ready` as it is answered, and what the daemon sends to itself: served like anything else, counted by nobody."""

from __future__ import annotations

from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.public_site import build_site
from mediatord.http.openapi import OPENAPI_JSON
from mediatord.observability.metrics import Metrics
from mediatord.probe.cycle import ProbeCycle, ProbeError
from mediatord.probe.readiness import ReadinessMonitor
from mediatord.protocol import encoding
from mediatord.protocol.probe_markers import PROBE_HEADER
from mediatord.wallet.didcomm_client import PICKUP
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, compose_message, unpack_message
from mediatord.wallet.didcomm_messages import build_forward as a_forward
from tests.http.in_memory_site import HTTPResponse, InMemorySite
from tests.in_memory_mediator import PEER, InMemoryWallet, pack_forward

COORDINATION = "https://didcomm.org/coordinate-mediation/3.0"
NOTE = "https://didcomm.org/empty/1.0/empty"
MESSAGES = "messages_forwarded", "messages_stored", "messages_delivered", "messages_expired", "messages_evicted"
EVENTS = (
    *("req.done", "msg.accept", "msg.push", "msg.ack", "msg.expire", "msg.evict", "limit.hit"),
    *("acct.grant", "acct.deny", "acct.update", "conn.open", "conn.auth", "conn.close"),
)


class Outcome:
    """Cycles that all end like this; a stage or nothing."""

    def __init__(self, stage: str = "") -> None:
        self.stage = stage

    async def run(self) -> None:
        if self.stage:
            raise ProbeError(self.stage)


class AnswerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self)

    def with_cycles(self, stage: str = "") -> None:
        """Have the site say that cycles end like this."""
        in_memory = self.site_fixture
        metrics: Metrics = in_memory.base.recorder.metrics
        readiness = ReadinessMonitor(
            in_memory.clock,
            cast(ProbeCycle, Outcome(stage)),
            3.0,
            metrics,
            is_open=lambda: in_memory.base.gate.is_open,
            get_trouble=lambda: "",
            steady=in_memory.clock.seconds,
        )
        readiness.startService()
        self.addCleanup(readiness.stopService)
        decentrl: Any = in_memory.decentrl
        in_memory.site = build_site(
            in_memory.base, in_memory.didcomm, decentrl, in_memory.config, None, lambda: readiness
        )

    def ready(self, method: str = "GET") -> HTTPResponse:
        return self.site_fixture.request(method, "/ready")

    def test_ready(self) -> None:
        """200, how long it took, and how long ago that was."""
        self.with_cycles()
        answered = self.ready()
        self.assertEqual((answered.status, answered.headers["content-type"]), (200, "application/json"))
        self.assertEqual(answered.json, {"status": "ok", "cycle_ms": 0, "age_ms": 0})
        self.site_fixture.clock.advance(1.5)
        self.assertEqual(self.ready().json["age_ms"], 1500)

    def test_not_ready(self) -> None:
        """503 with the stage that failed, and when to come again."""
        self.with_cycles("push")
        answered = self.ready()
        self.assertEqual(answered.status, 503)
        self.assertEqual(answered.json, {"status": "error", "detail": "push"})
        self.assertGreater(int(answered.headers["retry-after"]), 0)

    def test_scraped(self) -> None:
        """Whoever scrapes the metrics may ask as well: from the first time on there is a verdict among them."""
        for stage, shown in (("", "mediator_ready 1.0"), ("push", "mediator_ready 0.0")):
            self.with_cycles(stage)
            plain = self.site_fixture.request("GET", "/metrics", peer="127.0.0.1")
            self.assertNotIn(b"\nmediator_ready ", plain.body)
            asked = self.site_fixture.request("GET", "/metrics?ready=1", peer="127.0.0.1")
            self.assertEqual(asked.status, 200)
            self.assertIn(shown, asked.body.decode().splitlines())

    def test_scraped_by_others(self) -> None:
        """Who may not see the metrics has nothing sent by it."""
        self.with_cycles()
        self.assertEqual(self.site_fixture.request("GET", "/metrics?ready=1", peer="192.0.2.1").status, 403)
        self.assertIsNone(self.site_fixture.base.recorder.metrics.read_readiness())

    def test_stopping(self) -> None:
        """As soon as the gate is closed."""
        self.with_cycles()
        self.ready()
        self.site_fixture.base.gate.stopService()
        answered = self.ready()
        self.assertEqual((answered.status, answered.json["detail"]), (503, "stopping"))

    def test_other_methods(self) -> None:
        """HEAD as GET, and POST not at all."""
        self.with_cycles()
        self.assertEqual((self.ready("HEAD").status, self.ready("HEAD").body), (200, b""))
        self.assertEqual(
            (self.ready("POST").status, self.ready("POST").headers["allow"]), (405, "GET, HEAD, OPTIONS")
        )

    def test_a_site_without_listeners(self) -> None:
        """Nobody has looked, and that is what it says."""
        self.assertEqual((self.ready().status, self.ready().json["detail"]), (503, "not looked at"))

    def test_it_is_described(self) -> None:
        """In the OpenAPI document."""
        described = encoding.loads_object(OPENAPI_JSON)["paths"]["/ready"]["get"]["responses"]
        self.assertEqual(set(described), {"200", "500", "503"})


class OwnTrafficTests(SynchronousTestCase):
    """All that a cycle does, by the bytes that it sends; how it is sent over real connections is tested elsewhere."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(
            self,
            limits={"did_per_minute": 1, "ip_per_minute": 1, "account_per_minute": 1, "max_connections_per_ip": 1},
            didcomm={"registration": "allow-list", "allow": ["did:web:a.example"], "require_registered_sender": True},
            queue={"max_messages": 2},
        )
        own = self.site_fixture.base.probe_credentials
        self.headers = {PROBE_HEADER: own.token.decode("ascii")}
        self.wallet = InMemoryWallet(self.site_fixture, own.identities.identity("a node"))

    def ask(self, type_: str, body: dict[str, Any] | None = None, *, way: str = "/didcomm") -> dict[str, Any]:
        """The answer to a message of our own, over twisted.web if the way is not the plain one."""
        answered = self.site_fixture.post(self.wallet.pack(type_, body), way, **self.headers)
        self.assertEqual(answered.status, 200, answered.body)
        return dict(self.wallet.open(answered.body).body)

    def forward(self, **headers: Any) -> HTTPResponse:
        """A forward of our own to ourselves, as an account sends it."""
        note = anoncrypt(compose_message(NOTE), self.wallet.identity.document)
        message = a_forward(self.wallet.did, [note], **headers)
        packed = self.wallet.pack(message["type"], message["body"], attachments=message["attachments"], **headers)
        return self.site_fixture.post(packed, **self.headers)

    def enrol(self) -> None:
        """Get an account and register."""
        self.ask(f"{COORDINATION}/mediate-request")
        entries = [{"recipient_did": self.wallet.did, "action": "add"}]
        updated = self.ask(f"{COORDINATION}/recipient-update", {"updates": entries})["updated"]
        self.assertEqual(updated[0]["result"], "success")

    def assert_nothing_is_told(self) -> None:
        """No event, and nothing counted but in the sum of all queues, which agrees with the ledger."""
        self.assertEqual([one for name in EVENTS for one in self.site_fixture.events(name)], [])
        self.assertEqual([self.site_fixture.counter(f"mediator_{name}_total") for name in MESSAGES], [0.0] * 5)
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 0)
        page = self.site_fixture.base.recorder.metrics.render().decode()
        # What waits for it is in the sum of all queues, as it is in the ledger.
        page = page.replace('mediator_message_queue_size{did="other"}', "")
        for name in ("mediator_requests_total{", "mediator_rejected_total{", "mediator_message_queue_size{"):
            self.assertNotIn(name, page)

    def test_by_post(self) -> None:
        """Many times the limits, by both ways, on the allow-list of nobody: served, and told to nobody."""
        self.enrol()
        for _ in range(3):
            self.assertEqual(self.forward().status, 202)
            self.site_fixture.request("GET", "/metrics", peer="127.0.0.1")
            waiting = self.ask(f"{PICKUP}/status-request", way="/didcomm/?by=twisted.web")
            self.assertGreater(waiting["message_count"], 0)
        self.assert_nothing_is_told()

    def test_by_socket(self) -> None:
        """As many sockets as it likes, none of which is counted; the push is taken back with an acknowledgement."""
        self.enrol()
        visitors = [self.site_fixture.websocket_client(**self.headers) for _ in range(3)]
        self.assertEqual(len(self.site_fixture.base.connections), 0)
        websocket_client = visitors[0]
        websocket_client.send(self.wallet.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        (answer,) = websocket_client.texts()
        self.assertTrue(self.wallet.open(answer).body["live_delivery"])
        self.assertEqual(self.forward().status, 202)
        (push,) = websocket_client.texts()
        (attachment,) = self.wallet.open(push).message.attachments or ()
        acknowledged = {"message_id_list": [attachment["id"]]}
        websocket_client.send(self.wallet.pack(f"{PICKUP}/messages-received", acknowledged))
        (answer,) = websocket_client.texts()
        self.assertEqual(self.wallet.open(answer).body["message_count"], 0)
        for one in visitors:
            one.line.hang_up()
        self.site_fixture.settle()
        self.assert_nothing_is_told()
        # Whose place has not been taken by them.
        self.site_fixture.websocket_client()

    def test_what_is_left_behind(self) -> None:
        """A push that was never acknowledged, a message that made room, and one that has expired."""
        self.enrol()
        websocket_client = self.site_fixture.websocket_client(**self.headers)
        websocket_client.send(self.wallet.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        for _ in range(3):
            self.forward(expires_time=int(self.site_fixture.clock.seconds()) + 30)
        self.assertEqual(len(websocket_client.texts()), 4)
        websocket_client.line.hang_up(cleanly=False)
        for _ in range(40):
            self.site_fixture.clock.advance(10)
        self.assertEqual(self.ask(f"{PICKUP}/status-request")["message_count"], 0)
        self.assert_nothing_is_told()

    def test_the_token_is_needed(self) -> None:
        """Without it, or with another one, whoever sends pays, and it stands in the log."""
        self.enrol()
        for number, headers in enumerate(
            ({}, {PROBE_HEADER: "0" * 64}, {PROBE_HEADER: ""}, {PROBE_HEADER: "\xe4"}), 1
        ):
            peer = f"203.0.113.{number}"
            statuses = [
                self.site_fixture.request(
                    "POST", "/didcomm", self.wallet.pack("https://a.example/1.0/x"), headers, peer=peer
                ).status
                for _ in range(3)
            ]
            self.assertIn(429, statuses)
            self.assertEqual(len(self.site_fixture.events("req.done")), 3 * number)
        line, response, _ = self.site_fixture.upgrade(**{PROBE_HEADER: "0" * 64})
        self.assertEqual((response.status, self.site_fixture.counter("mediator_active_connections")), (101, 1))
        line.hang_up()

    def test_a_proxy_cannot_say_so(self) -> None:
        """No address that anybody could have is taken for it."""
        site_fixture = InMemorySite(self, trusted_proxies=[PEER])
        wallet = InMemoryWallet(site_fixture)
        for said in ("itself", "itself, itself", PEER):
            site_fixture.post(wallet.pack("https://a.example/1.0/x"), **{"X-Forwarded-For": said})
        self.assertEqual(len(site_fixture.events("req.done")), 3)

    def test_others_are_told_of(self) -> None:
        """With the token, but to a DID that is not ours: the message is a message like any other."""
        other = InMemoryWallet(self.site_fixture, WalletIdentity.generate())
        site_fixture = InMemorySite(self)
        bob = InMemoryWallet(site_fixture, other.identity).enrol()
        letter = pack_forward(site_fixture, bob.did, bob.letter())
        own = {PROBE_HEADER: site_fixture.base.probe_credentials.token.decode("ascii")}
        self.assertEqual(site_fixture.post(letter, **own).status, 202)
        self.assertEqual(len(site_fixture.events("msg.accept")), 1)
        self.assertEqual(site_fixture.counter("mediator_messages_forwarded_total"), 1)

    def test_it_is_a_message_indeed(self) -> None:
        """What is fetched is what was sent."""
        self.enrol()
        self.forward()
        (left,) = self.wallet.fetch()
        opened = unpack_message(left.payload, self.wallet.identity, lambda did: self.wallet.identity.document)
        self.assertEqual(opened.message.type.uri, NOTE)
