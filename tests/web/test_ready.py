"""`/ready` as it is answered, and what the daemon sends to itself: served like anything else, counted by nobody."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.metrics import Metrics
from mediatord.protocol import jsontext
from mediatord.readiness import Failed, Readiness, Surroundings
from mediatord.synthetic import HEADER
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediation import PICKUP
from mediatord.wallet.packing import anoncrypt, compose, unpack
from mediatord.wallet.packing import forward as a_forward
from mediatord.web.openapi import OPENAPI
from mediatord.wiring import build_site
from tests.house import PEER, Guest, sealed_forward
from tests.web.premises import Answered, Premises

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
            raise Failed(self.stage)


class AnswerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.premises = Premises(self)

    def with_cycles(self, stage: str = "") -> None:
        """Have the site say that cycles end like this."""
        house = self.premises
        metrics: Metrics = house.base.journal.metrics
        around = Surroundings(lambda: house.base.gate.is_open, lambda: "", house.clock.seconds, metrics)
        readiness = Readiness(house.clock, Outcome(stage), around, 3.0)
        readiness.startService()
        self.addCleanup(readiness.stopService)
        decentrl: Any = house.decentrl
        house.site = build_site(house.base, house.half, decentrl, house.config, None, lambda: readiness)

    def ready(self, method: str = "GET") -> Answered:
        return self.premises.request(method, "/ready")

    def test_ready(self) -> None:
        """200, how long it took, and how long ago that was."""
        self.with_cycles()
        answered = self.ready()
        self.assertEqual((answered.status, answered.headers["content-type"]), (200, "application/json"))
        self.assertEqual(answered.json, {"status": "ok", "cycle_ms": 0, "age_ms": 0})
        self.premises.clock.advance(1.5)
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
            plain = self.premises.request("GET", "/metrics", peer="127.0.0.1")
            self.assertNotIn(b"\nmediator_ready ", plain.body)
            asked = self.premises.request("GET", "/metrics?ready=1", peer="127.0.0.1")
            self.assertEqual(asked.status, 200)
            self.assertIn(shown, asked.body.decode().splitlines())

    def test_scraped_by_others(self) -> None:
        """Who may not see the metrics has nothing sent by it."""
        self.with_cycles()
        self.assertEqual(self.premises.request("GET", "/metrics?ready=1", peer="192.0.2.1").status, 403)
        self.assertIsNone(self.premises.base.journal.metrics.ready_now())

    def test_stopping(self) -> None:
        """As soon as the gate is closed."""
        self.with_cycles()
        self.ready()
        self.premises.base.gate.stopService()
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
        described = jsontext.loads_object(OPENAPI)["paths"]["/ready"]["get"]["responses"]
        self.assertEqual(set(described), {"200", "500", "503"})


class OwnTrafficTests(SynchronousTestCase):
    """All that a cycle does, by the bytes that it sends; how it is sent over real connections is tested elsewhere."""

    def setUp(self) -> None:
        self.premises = Premises(
            self,
            limits={"did_per_minute": 1, "ip_per_minute": 1, "account_per_minute": 1, "max_connections_per_ip": 1},
            didcomm={"registration": "allow-list", "allow": ["did:web:a.example"], "require_registered_sender": True},
            queue={"max_messages": 2},
        )
        own = self.premises.base.own
        self.headers = {HEADER: own.token.decode("ascii")}
        self.guest = Guest(self.premises, own.kin.identity("a node"))

    def ask(self, type_: str, body: dict[str, Any] | None = None, *, way: str = "/didcomm") -> dict[str, Any]:
        """The answer to a message of our own, over twisted.web if the way is not the plain one."""
        answered = self.premises.post(self.guest.pack(type_, body), way, **self.headers)
        self.assertEqual(answered.status, 200, answered.body)
        return dict(self.guest.open(answered.body).body)

    def forward(self, **headers: Any) -> Answered:
        """A forward of our own to ourselves, as an account sends it."""
        note = anoncrypt(compose(NOTE), self.guest.identity.document)
        message = a_forward(self.guest.did, [note], **headers)
        packed = self.guest.pack(message["type"], message["body"], attachments=message["attachments"], **headers)
        return self.premises.post(packed, **self.headers)

    def enrol(self) -> None:
        """Get an account and register."""
        self.ask(f"{COORDINATION}/mediate-request")
        entries = [{"recipient_did": self.guest.did, "action": "add"}]
        updated = self.ask(f"{COORDINATION}/recipient-update", {"updates": entries})["updated"]
        self.assertEqual(updated[0]["result"], "success")

    def assert_nothing_is_told(self) -> None:
        """No event, and nothing counted but in the sum of all queues, which agrees with the ledger."""
        self.assertEqual([one for name in EVENTS for one in self.premises.events(name)], [])
        self.assertEqual([self.premises.counter(f"mediator_{name}_total") for name in MESSAGES], [0.0] * 5)
        self.assertEqual(self.premises.counter("mediator_active_connections"), 0)
        page = self.premises.base.journal.metrics.render().decode()
        # What waits for it is in the sum of all queues, as it is in the ledger.
        page = page.replace('mediator_message_queue_size{did="other"}', "")
        for name in ("mediator_requests_total{", "mediator_rejected_total{", "mediator_message_queue_size{"):
            self.assertNotIn(name, page)

    def test_by_post(self) -> None:
        """Many times the limits, by both ways, on the allow-list of nobody: served, and told to nobody."""
        self.enrol()
        for _ in range(3):
            self.assertEqual(self.forward().status, 202)
            self.premises.request("GET", "/metrics", peer="127.0.0.1")
            waiting = self.ask(f"{PICKUP}/status-request", way="/didcomm/?by=twisted.web")
            self.assertGreater(waiting["message_count"], 0)
        self.assert_nothing_is_told()

    def test_by_socket(self) -> None:
        """As many sockets as it likes, none of which is counted; the push is taken back with an acknowledgement."""
        self.enrol()
        visitors = [self.premises.visitor(**self.headers) for _ in range(3)]
        self.assertEqual(len(self.premises.base.connections), 0)
        visitor = visitors[0]
        visitor.send(self.guest.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        (answer,) = visitor.texts()
        self.assertTrue(self.guest.open(answer).body["live_delivery"])
        self.assertEqual(self.forward().status, 202)
        (push,) = visitor.texts()
        (attachment,) = self.guest.open(push).message.attachments or ()
        acknowledged = {"message_id_list": [attachment["id"]]}
        visitor.send(self.guest.pack(f"{PICKUP}/messages-received", acknowledged))
        (answer,) = visitor.texts()
        self.assertEqual(self.guest.open(answer).body["message_count"], 0)
        for one in visitors:
            one.line.hang_up()
        self.premises.settle()
        self.assert_nothing_is_told()
        # Whose place has not been taken by them.
        self.premises.visitor()

    def test_what_is_left_behind(self) -> None:
        """A push that was never acknowledged, a message that made room, and one that has expired."""
        self.enrol()
        visitor = self.premises.visitor(**self.headers)
        visitor.send(self.guest.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        for _ in range(3):
            self.forward(expires_time=int(self.premises.clock.seconds()) + 30)
        self.assertEqual(len(visitor.texts()), 4)
        visitor.line.hang_up(cleanly=False)
        for _ in range(40):
            self.premises.clock.advance(10)
        self.assertEqual(self.ask(f"{PICKUP}/status-request")["message_count"], 0)
        self.assert_nothing_is_told()

    def test_the_token_is_needed(self) -> None:
        """Without it, or with another one, whoever sends pays, and it stands in the log."""
        self.enrol()
        for number, headers in enumerate(({}, {HEADER: "0" * 64}, {HEADER: ""}, {HEADER: "\xe4"}), 1):
            peer = f"203.0.113.{number}"
            statuses = [
                self.premises.request(
                    "POST", "/didcomm", self.guest.pack("https://a.example/1.0/x"), headers, peer=peer
                ).status
                for _ in range(3)
            ]
            self.assertIn(429, statuses)
            self.assertEqual(len(self.premises.events("req.done")), 3 * number)
        line, response, _ = self.premises.upgrade(**{HEADER: "0" * 64})
        self.assertEqual((response.status, self.premises.counter("mediator_active_connections")), (101, 1))
        line.hang_up()

    def test_a_proxy_cannot_say_so(self) -> None:
        """No address that anybody could have is taken for it."""
        premises = Premises(self, trusted_proxies=[PEER])
        guest = Guest(premises)
        for said in ("itself", "itself, itself", PEER):
            premises.post(guest.pack("https://a.example/1.0/x"), **{"X-Forwarded-For": said})
        self.assertEqual(len(premises.events("req.done")), 3)

    def test_others_are_told_of(self) -> None:
        """With the token, but to a DID that is not ours: the message is a message like any other."""
        other = Guest(self.premises, Identity.fresh())
        premises = Premises(self)
        bob = Guest(premises, other.identity).enrol()
        letter = sealed_forward(premises, bob.did, bob.letter())
        own = {HEADER: premises.base.own.token.decode("ascii")}
        self.assertEqual(premises.post(letter, **own).status, 202)
        self.assertEqual(len(premises.events("msg.accept")), 1)
        self.assertEqual(premises.counter("mediator_messages_forwarded_total"), 1)

    def test_it_is_a_message_indeed(self) -> None:
        """What is fetched is what was sent."""
        self.enrol()
        self.forward()
        (left,) = self.guest.fetch()
        opened = unpack(left.payload, self.guest.identity, lambda did: self.guest.identity.document)
        self.assertEqual(opened.message.type.uri, NOTE)
