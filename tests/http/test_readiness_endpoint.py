"""`/ready`, and the traffic of the probe, which is served like any other and counted nowhere."""

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
from mediatord.wallet.didcomm_messages import anoncrypt, build_forward, compose_message, unpack_message
from tests.http.in_memory_site import HTTPResponse, InMemorySite
from tests.in_memory_mediator import PEER, InMemoryWallet, pack_forward

COORDINATION = "https://didcomm.org/coordinate-mediation/3.0"
NOTE = "https://didcomm.org/empty/1.0/empty"
MESSAGES = "messages_forwarded", "messages_stored", "messages_delivered", "messages_expired", "messages_evicted"
EVENTS = (
    *("req.done", "msg.accept", "msg.push", "msg.ack", "msg.expire", "msg.evict", "limit.hit"),
    *("acct.grant", "acct.deny", "acct.update", "conn.open", "conn.auth", "conn.close"),
)


class FakeProbeCycle:
    """Probe cycle that always succeeds, or fails at `stage`."""

    def __init__(self, stage: str = "") -> None:
        self.stage = stage

    async def run(self) -> None:
        if self.stage:
            raise ProbeError(self.stage)


class ReadinessEndpointTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self)

    def use_cycle(self, stage: str = "") -> None:
        """Have the site run cycles that fail at `stage`, or succeed."""
        in_memory = self.site_fixture
        metrics: Metrics = in_memory.base.recorder.metrics
        readiness = ReadinessMonitor(
            in_memory.clock,
            cast(ProbeCycle, FakeProbeCycle(stage)),
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
        """200 with the duration and the age of the cycle."""
        self.use_cycle()
        response = self.ready()
        self.assertEqual((response.status, response.headers["content-type"]), (200, "application/json"))
        self.assertEqual(response.json, {"status": "ok", "cycle_ms": 0, "age_ms": 0})
        self.site_fixture.clock.advance(1.5)
        self.assertEqual(self.ready().json["age_ms"], 1500)

    def test_not_ready(self) -> None:
        """503 with the failed stage and Retry-After."""
        self.use_cycle("push")
        response = self.ready()
        self.assertEqual(response.status, 503)
        self.assertEqual(response.json, {"status": "error", "detail": "push"})
        self.assertGreater(int(response.headers["retry-after"]), 0)

    def test_metrics_include_verdict_on_request(self) -> None:
        """The verdict is among the metrics once a scrape asks for it."""
        for stage, series in (("", "mediator_ready 1.0"), ("push", "mediator_ready 0.0")):
            self.use_cycle(stage)
            plain = self.site_fixture.request("GET", "/metrics", peer="127.0.0.1")
            self.assertNotIn(b"\nmediator_ready ", plain.body)
            scrape = self.site_fixture.request("GET", "/metrics?ready=1", peer="127.0.0.1")
            self.assertEqual(scrape.status, 200)
            self.assertIn(series, scrape.body.decode().splitlines())

    def test_denied_scrape_runs_no_cycle(self) -> None:
        """A client that may not read the metrics starts no cycle."""
        self.use_cycle()
        self.assertEqual(self.site_fixture.request("GET", "/metrics?ready=1", peer="192.0.2.1").status, 403)
        self.assertIsNone(self.site_fixture.base.recorder.metrics.read_readiness())

    def test_not_ready_while_stopping(self) -> None:
        """503 as soon as the gate is closed."""
        self.use_cycle()
        self.ready()
        self.site_fixture.base.gate.stopService()
        response = self.ready()
        self.assertEqual((response.status, response.json["detail"]), (503, "stopping"))

    def test_methods(self) -> None:
        """HEAD is like GET, POST is refused."""
        self.use_cycle()
        self.assertEqual((self.ready("HEAD").status, self.ready("HEAD").body), (200, b""))
        self.assertEqual(
            (self.ready("POST").status, self.ready("POST").headers["allow"]), (405, "GET, HEAD, OPTIONS")
        )

    def test_site_without_listeners_is_not_ready(self) -> None:
        """Without listeners there are no cycles, and the response says so."""
        self.assertEqual((self.ready().status, self.ready().json["detail"]), (503, "no probe"))

    def test_is_documented(self) -> None:
        """The OpenAPI document has the endpoint."""
        described = encoding.loads_object(OPENAPI_JSON)["paths"]["/ready"]["get"]["responses"]
        self.assertEqual(set(described), {"200", "500", "503"})


class ProbeTrafficTests(SynchronousTestCase):
    """Everything that a probe cycle does, as bytes; `tests/probe` tests real connections."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(
            self,
            limits={"did_per_minute": 1, "ip_per_minute": 1, "account_per_minute": 1, "max_connections_per_ip": 1},
            didcomm={"registration": "allow-list", "allow": ["did:web:a.example"], "require_registered_sender": True},
            queue={"max_messages": 2},
        )
        credentials = self.site_fixture.base.probe_credentials
        self.headers = {PROBE_HEADER: credentials.token.decode("ascii")}
        self.wallet = InMemoryWallet(self.site_fixture, credentials.identities.identity("a node"))

    def ask(self, type_: str, body: dict[str, Any] | None = None, *, path: str = "/didcomm") -> dict[str, Any]:
        """Send a probe message and return the reply; another `path` avoids the fast path."""
        response = self.site_fixture.post(self.wallet.pack(type_, body), path, **self.headers)
        self.assertEqual(response.status, 200, response.body)
        return dict(self.wallet.open(response.body).body)

    def forward(self, **headers: Any) -> HTTPResponse:
        """Send a forward from the probe to itself."""
        note = anoncrypt(compose_message(NOTE), self.wallet.identity.document)
        message = build_forward(self.wallet.did, [note], **headers)
        packed = self.wallet.pack(message["type"], message["body"], attachments=message["attachments"], **headers)
        return self.site_fixture.post(packed, **self.headers)

    def enrol(self) -> None:
        """Get an account and register the DID."""
        self.ask(f"{COORDINATION}/mediate-request")
        entries = [{"recipient_did": self.wallet.did, "action": "add"}]
        updated = self.ask(f"{COORDINATION}/recipient-update", {"updates": entries})["updated"]
        self.assertEqual(updated[0]["result"], "success")

    def assert_nothing_recorded(self) -> None:
        """No events, and nothing counted except in the sum of all queues, which matches the ledger."""
        self.assertEqual([event for name in EVENTS for event in self.site_fixture.events(name)], [])
        self.assertEqual([self.site_fixture.counter(f"mediator_{name}_total") for name in MESSAGES], [0.0] * 5)
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 0)
        page = self.site_fixture.base.recorder.metrics.render().decode()
        # Probe messages are in the sum of all queues, as in the ledger.
        page = page.replace('mediator_message_queue_size{did="other"}', "")
        for name in ("mediator_requests_total{", "mediator_rejected_total{", "mediator_message_queue_size{"):
            self.assertNotIn(name, page)

    def test_requests_exceed_all_limits(self) -> None:
        """Requests beyond all limits and outside the allow-list are served and not recorded, on both paths."""
        self.enrol()
        for _ in range(3):
            self.assertEqual(self.forward().status, 202)
            self.site_fixture.request("GET", "/metrics", peer="127.0.0.1")
            waiting = self.ask(f"{PICKUP}/status-request", path="/didcomm/?by=twisted.web")
            self.assertGreater(waiting["message_count"], 0)
        self.assert_nothing_recorded()

    def test_sockets_exceed_all_limits(self) -> None:
        """Sockets beyond the limit are served and not counted; the acknowledgement removes the push."""
        self.enrol()
        websocket_clients = [self.site_fixture.websocket_client(**self.headers) for _ in range(3)]
        self.assertEqual(len(self.site_fixture.base.connections), 0)
        websocket_client = websocket_clients[0]
        websocket_client.send(self.wallet.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        (response,) = websocket_client.texts()
        self.assertTrue(self.wallet.open(response).body["live_delivery"])
        self.assertEqual(self.forward().status, 202)
        (push,) = websocket_client.texts()
        (attachment,) = self.wallet.open(push).message.attachments or ()
        acknowledged = {"message_id_list": [attachment["id"]]}
        websocket_client.send(self.wallet.pack(f"{PICKUP}/messages-received", acknowledged))
        (response,) = websocket_client.texts()
        self.assertEqual(self.wallet.open(response).body["message_count"], 0)
        for client in websocket_clients:
            client.transport.disconnect()
        self.site_fixture.run_due_calls()
        self.assert_nothing_recorded()
        # Probe sockets do not use up the limit.
        self.site_fixture.websocket_client()

    def test_abandoned_messages(self) -> None:
        """Unacknowledged, evicted and expired probe messages are not recorded."""
        self.enrol()
        websocket_client = self.site_fixture.websocket_client(**self.headers)
        websocket_client.send(self.wallet.pack(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        for _ in range(3):
            self.forward(expires_time=int(self.site_fixture.clock.seconds()) + 30)
        self.assertEqual(len(websocket_client.texts()), 4)
        websocket_client.transport.disconnect(cleanly=False)
        for _ in range(40):
            self.site_fixture.clock.advance(10)
        self.assertEqual(self.ask(f"{PICKUP}/status-request")["message_count"], 0)
        self.assert_nothing_recorded()

    def test_wrong_token_is_limited_and_recorded(self) -> None:
        """Without the right token, requests are limited and logged."""
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
        transport, response, _ = self.site_fixture.upgrade(**{PROBE_HEADER: "0" * 64})
        self.assertEqual((response.status, self.site_fixture.counter("mediator_active_connections")), (101, 1))
        transport.disconnect()

    def test_proxy_cannot_name_probe_address(self) -> None:
        """X-Forwarded-For cannot name the probe."""
        site_fixture = InMemorySite(self, trusted_proxies=[PEER])
        wallet = InMemoryWallet(site_fixture)
        for forwarded_for in ("itself", "itself, itself", PEER):
            site_fixture.post(wallet.pack("https://a.example/1.0/x"), **{"X-Forwarded-For": forwarded_for})
        self.assertEqual(len(site_fixture.events("req.done")), 3)

    def test_message_to_other_did_is_recorded(self) -> None:
        """A message with the token to another DID is recorded like any other."""
        other = InMemoryWallet(self.site_fixture, WalletIdentity.generate())
        site_fixture = InMemorySite(self)
        bob = InMemoryWallet(site_fixture, other.identity).enrol()
        packed = pack_forward(site_fixture, bob.did, bob.make_payload())
        probe_headers = {PROBE_HEADER: site_fixture.base.probe_credentials.token.decode("ascii")}
        self.assertEqual(site_fixture.post(packed, **probe_headers).status, 202)
        self.assertEqual(len(site_fixture.events("msg.accept")), 1)
        self.assertEqual(site_fixture.counter("mediator_messages_forwarded_total"), 1)

    def test_fetched_message_is_the_sent_one(self) -> None:
        """The probe fetches the message that it sent."""
        self.enrol()
        self.forward()
        (left,) = self.wallet.fetch()
        opened = unpack_message(left.payload, self.wallet.identity, lambda did: self.wallet.identity.document)
        self.assertEqual(opened.message.type.uri, NOTE)
