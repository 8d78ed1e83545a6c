"""Counters match the lines of the event log exactly, at all times (analytics contract 2.2, J4)."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.observability.event_schema import build_json_schema
from mediatord.observability.segments import SegmentLimits
from tests.http.in_memory_site import InMemorySite
from tests.in_memory_identities import InMemoryDecentrlSocket, InMemoryIdentity
from tests.in_memory_mediator import MP, PING, InMemoryWallet, pack_forward
from tests.observability.counter_oracle import expected_counters, read_lines, wrong_counter_lines

GARBAGE = b"no envelope"
SCHEMA = jsonschema_rs.validator_for(build_json_schema())


class CountersTests(SynchronousTestCase):
    """A mediator with traffic of both protocols on every transport; counters are computed after each step."""

    def start(self, **settings: Any) -> None:
        limits = {"ip_per_minute": 10_000, "did_per_minute": 10_000, **settings.pop("limits", {})}
        self.in_memory = InMemorySite(self, limits=limits, **settings)
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def check(self) -> dict[str, int]:
        """Metrics, `counters` lines and computed counters all agree."""
        self.in_memory.base.events.rotate()
        lines = read_lines(self.in_memory.config.log.directory)
        self.assertEqual([line["seq"] for line in lines], list(range(1, len(lines) + 1)))
        self.assertEqual([line for line in lines if not SCHEMA.is_valid(line)], [])
        self.assertEqual(wrong_counter_lines(lines), [])
        totals = expected_counters(lines)
        self.assertEqual(self.in_memory.base.recorder.metrics.collect_totals(), totals)
        return totals

    def growth_since(self, before: dict[str, int], **by: int) -> dict[str, int]:
        """Differences of counters from `before`, without those of requests."""
        after = self.check()
        grown = {name: after[name] - before[name] for name in after if not name.startswith("requests")}
        self.assertEqual({name: number for name, number in grown.items() if number}, by)
        return after

    def forward(self, *payloads: bytes, **headers: Any) -> int:
        """Forward a message to Bob; return the status."""
        return self.in_memory.post(pack_forward(self.in_memory, self.bob.did, *payloads, **headers)).status

    def test_didcomm(self) -> None:
        """Queued, fetched, acknowledged, refused, evicted, expired; over HTTP, on either path."""
        self.start(queue={"max_messages": 3, "ttl": "600s"})
        now = self.check()
        self.assertEqual(self.forward(self.bob.make_payload(), self.bob.make_payload()), 202)
        now = self.growth_since(now, forwarded=2, stored=2)
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [self.bob.fetch()[0].id]})
        now = self.growth_since(now, delivered=1)
        self.forward(self.bob.make_payload(), self.bob.make_payload(), self.bob.make_payload())
        now = self.growth_since(now, forwarded=3, stored=3, evicted=1)
        self.forward(self.bob.make_payload(), delay_milli=5_000)
        self.in_memory.clock.advance(6)
        now = self.growth_since(now, forwarded=1, stored=1, evicted=1)
        self.in_memory.clock.pump([15.0] * 45)
        now = self.growth_since(now, expired=3)
        for raw in (GARBAGE, self.bob.pack(PING), pack_forward(self.in_memory, "did:web:nobody.example", b"{}")):
            self.in_memory.post(raw)
            self.in_memory.post(raw, Expect="nothing")  # on the general path
            self.in_memory.request("POST", "/didcomm", raw, {"Content-Type": "text/plain"})
        self.in_memory.request("POST", "/didcomm", b"x" * 2_000_000)
        with self.in_memory.failing("enqueue_each", StoreUnavailable()):
            self.assertEqual(self.forward(self.bob.make_payload()), 503)
        with self.in_memory.failing("enqueue_each", RuntimeError("of ours")):
            self.assertEqual(self.forward(self.bob.make_payload()), 500)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        after = self.growth_since(now)
        self.assertEqual(after["requests_failed"], 2)
        self.assertGreater(after["requests_rejected"], 3)

    def test_pushes(self) -> None:
        """To one socket and two, failed, repeated; with disconnects, and a store that refuses delivery marks."""
        self.start(queue={"delivered_timeout": "60s"})
        now = self.check()
        sockets = [self.bob.go_live(), self.bob.go_live()]
        self.forward(self.bob.make_payload())
        now = self.growth_since(now, forwarded=1)
        self.in_memory.clock.pump([1.0] * 61)
        now = self.growth_since(now, stored=1)
        self.in_memory.clock.pump([1.0] * 122)
        now = self.growth_since(now)
        self.forward(self.bob.make_payload(), self.bob.make_payload())
        for socket in sockets:
            self.in_memory.base.connections.closed(socket)
        now = self.growth_since(now, forwarded=2, stored=2)
        self.bob.go_live()
        self.forward(self.bob.make_payload())
        with self.in_memory.failing("mark_pending", StoreUnavailable()):
            self.in_memory.clock.pump([1.0] * 61)
        now = self.growth_since(now, forwarded=1)
        lost = [line for line in self.lines("msg.push") if not line["ok"]]
        self.assertEqual([line["attempt"] for line in lost], [1, 1, 1])
        self.assertEqual({(line["proto"], line["path"]) for line in lost}, {("didcomm", "live")})
        accepted = {line["msg"]: line["rcpt"] for line in self.lines("msg.accept")}
        self.assertEqual([accepted[line["msg"]] for line in lost], [line["rcpt"] for line in lost])
        self.in_memory.base.recorder.record_remote_push_failures(2)
        self.growth_since(now, stored=2)

    def test_sockets(self) -> None:
        """Sockets count as open until they are closed, whatever was sent on them."""
        self.start()
        now = self.check()
        one, two = self.in_memory.websocket_client(), self.in_memory.websocket_client("/ws")
        now = self.growth_since(now, connections=2)
        one.send(GARBAGE)
        one.send(self.bob.pack(PING, return_route="all"))
        two.send(GARBAGE)
        self.in_memory.run_due_calls()
        one.transport.disconnect()
        two.transport.disconnect()
        now = self.growth_since(now, connections=-2)
        self.in_memory.upgrade(**{"Sec-WebSocket-Version": "7"})
        self.growth_since(now)
        closed = self.lines("conn.close")[0]
        self.assertEqual((closed["did"], closed["n_in"]), (self.in_memory.pseudonym(self.bob.did), 2))

    def test_decentrl(self) -> None:
        """Pushed and polled events, refused commands, sockets that do not authenticate."""
        self.start()
        alice, bob = InMemoryIdentity(self.in_memory, "alice"), InMemoryIdentity(self.in_memory, "bob")
        now = self.check()
        for item in (alice, bob):
            item.register()
        alice.save_contract_with(bob)
        self.assertEqual(bob.send_event(alice).status, 200)
        now = self.growth_since(now, forwarded=1, stored=1)
        (event,) = alice.pending()
        alice.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[event["id"]])
        now = self.growth_since(now, delivered=1)
        alice.connect()
        bob.send_event(alice)
        now = self.growth_since(now, forwarded=1)
        alice.pending()
        pushes = [(line["path"], line["attempt"], line["proto"]) for line in self.lines("msg.push")]
        self.assertEqual(pushes, [("poll", 1, "decentrl"), ("live", 1, "decentrl"), ("poll", 2, "decentrl")])
        command = bob.command({"type": "QUERY_EVENTS"})
        for raw in (command, command, GARBAGE):
            self.in_memory.post(raw, "/")
        InMemoryDecentrlSocket(self.in_memory).send(GARBAGE)
        InMemoryDecentrlSocket(self.in_memory)
        self.in_memory.clock.advance(11)
        self.in_memory.request("GET", f"/public/{bob.did}")
        with self.in_memory.failing("enqueue_event", StoreUnavailable()):
            self.assertEqual(bob.send_event(alice).status, 503)
        after = self.growth_since(now)
        self.assertEqual(after["requests_failed"], 1)
        self.assertLessEqual({line["req"] for line in self.lines("msg.accept")}, self.requests())

    def requests(self) -> set[str]:
        """Ids of all requests."""
        return {line["req"] for line in self.lines("req.done")}

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Lines of one event."""
        self.in_memory.run_due_calls()
        return [line for line in read_lines(self.in_memory.config.log.directory) if line["event"] == event]

    def test_rotation_within_iteration(self) -> None:
        """A segment may end after any line of an iteration."""
        self.start()
        self.in_memory.base.events.limit(SegmentLimits(size=1), "info")
        socket = self.bob.go_live()
        for _ in range(8):
            self.forward(*[self.bob.make_payload() for _ in range(32)])
        self.in_memory.base.connections.closed(socket)
        self.check()
        self.assertGreater(len(self.lines("counters")), 8)

    def test_written_every_minute(self) -> None:
        """With the gauge and the ledger of both protocols, and before the last line of each segment."""
        self.start()
        self.in_memory.clock.pump([60.0] * 3)
        events = [line["event"] for line in read_lines(self.in_memory.config.log.directory)]
        self.assertEqual(events[-12:], ["gauge", "counters", "ledger", "ledger"] * 3)
        self.check()
        events = [line["event"] for line in read_lines(self.in_memory.config.log.directory)]
        self.assertEqual(events[-3:], ["counters", "log.close", "log.open"])

    def test_level(self) -> None:
        """Above info there are no lines to compare with, also when the level is lowered again."""
        self.start(log={"level": "warn"})
        for level in ("warn", "info", "debug"):
            self.in_memory.base.events.limit(SegmentLimits(), level)
            self.forward(self.bob.make_payload())
            self.in_memory.clock.advance(60)
            self.in_memory.base.events.rotate()
        self.assertEqual(self.lines("counters"), [])
        self.assertEqual(len(self.lines("msg.accept")), 2)

    def test_level_above_info_for_a_while(self) -> None:
        """Earlier `counters` lines stay correct."""
        self.start()
        self.forward(self.bob.make_payload())
        self.in_memory.base.events.rotate()
        for level in ("warn", "info"):
            self.in_memory.base.events.limit(SegmentLimits(), level)
            self.forward(self.bob.make_payload())
            self.in_memory.clock.advance(60)
        lines = read_lines(self.in_memory.config.log.directory)
        self.assertEqual(wrong_counter_lines(lines), [])
        self.assertEqual([line["forwarded"] for line in lines if line["event"] == "counters"], [1])


class CryptoTimeTests(SynchronousTestCase):
    """Time of a request spent on cryptography."""

    def test_crypto_time(self) -> None:
        """It is in the request's line, at most its duration, and omitted without cryptography."""
        in_memory = InMemorySite(self)
        bob = InMemoryWallet(in_memory).enrol()
        new_identity = InMemoryIdentity(in_memory, "carol")
        new_identity.register()
        in_memory.request("GET", f"/public/{new_identity.did}")
        in_memory.post(GARBAGE)
        bob.go_live()
        in_memory.post(pack_forward(in_memory, bob.did, bob.make_payload()))
        lines = in_memory.events("req.done")
        self.assertGreater(len([line for line in lines if line["proto"] == "didcomm" and "crypto_ms" in line]), 3)
        (registration,) = [line for line in lines if line.get("mtype") == "REQUEST_COMMUNICATION_CONTRACT"]
        self.assertGreater(registration["crypto_ms"], 0.0)
        (page,) = [line for line in lines if line.get("mtype") == "GET_PUBLIC"]
        self.assertNotIn("crypto_ms", page)
        (garbage,) = [line for line in lines if "code" in line]
        self.assertNotIn("crypto_ms", garbage)
