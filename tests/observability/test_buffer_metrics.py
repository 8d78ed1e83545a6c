"""How full everything is that grows with what peers do or leave undone: gauges, and their description."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm import pickup
from tests.http.in_memory_site import (
    ENCRYPTED,
    InMemorySite,
    InMemoryWebSocketClient,
    encode_masked_frame,
    encode_request,
    parse_responses,
)
from tests.http.test_websocket import HeldStoreOperation
from tests.in_memory_mediator import MP, PING, InMemoryWallet, pack_forward
from tests.store.builders import NOON, make_database_path, make_payload, make_sqlite_store

LIMITS = Path(__file__).parents[2] / "docs/reference/limits.md"
HIGH_LIMITS = {"ip_per_minute": 100_000, "did_per_minute": 100_000, "account_per_minute": 100_000}
# Only where there are other nodes.
CLUSTERED = {"cluster_hints", "presence_lookups"}


class BuffersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)
        self.bob = InMemoryWallet(self.site_fixture).enrol()
        self.websocket_client: InMemoryWebSocketClient = self.site_fixture.websocket_client()
        self.websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        self.websocket_client.texts()

    def held(self, buffer: str) -> tuple[int | None, int | None]:
        """What the gauges of a buffer say: entries and bytes."""
        page = self.site_fixture.base.recorder.metrics.render().decode()
        found = [
            re.search(rf'^mediator_buffer_{kind}{{buffer="{buffer}"}} (\S+)$', page, re.M)
            for kind in ("entries", "bytes")
        ]
        entries, size = (None if one is None else int(float(one[1])) for one in found)
        return entries, size

    def forward(self, text: str) -> None:
        """Somebody writes to Bob."""
        self.site_fixture.receive(pack_forward(self.site_fixture, self.bob.did, self.bob.letter(text)))

    def test_each_is_described(self) -> None:
        """The table of the documentation has exactly those that there are."""
        table = LIMITS.read_text("utf-8").partition("## Buffers")[2].partition("\n## ")[0]
        described = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
        page = self.site_fixture.base.recorder.metrics.render().decode()
        self.assertEqual(set(re.findall(r'^mediator_buffer_\w+{buffer="(\w+)"}', page, re.M)), described - CLUSTERED)

    def test_a_peer_that_does_not_read(self) -> None:
        """Its outbox fills up to its cap, and is empty when it is gone."""
        self.assertEqual(self.held("socket_outboxes"), (0, 0))
        self.websocket_client.transport.peer_stalled = True
        for _ in range(150):
            self.forward("x" * 20_000)
        entries, size = self.held("socket_outboxes")
        assert entries is not None and size is not None
        self.assertTrue(0 < entries <= 64)
        self.assertTrue(500_000 < size <= 1_048_576 + 65_536 + 40_000)
        self.websocket_client.transport.disconnect()
        self.assertEqual(self.held("socket_outboxes"), (0, 0))

    def test_a_message_that_is_not_complete(self) -> None:
        """Its bytes count as soon as they are there, the fragments as well as the part of a frame."""
        self.websocket_client.transport.feed(encode_masked_frame(b"x" * 500, final=False))
        self.assertEqual(self.held("socket_inboxes"), (0, 500))
        self.websocket_client.transport.feed(encode_masked_frame(b"x" * 300, 0)[:100])
        _, size = self.held("socket_inboxes")
        assert size is not None
        self.assertTrue(500 < size <= 900)

    def test_requests_in_progress(self) -> None:
        """While the store is slow, no more are parsed than may take what an address may have; the others wait."""
        transports = [self.site_fixture.connect() for _ in range(20)]
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            for transport in transports:
                raw = self.bob.pack(PING, {"response_requested": True, "comment": "x" * 200_000})
                transport.feed(encode_request("POST", "/didcomm", raw, {"Content-Type": ENCRYPTED.decode()}))
            self.site_fixture.run_due_calls()
            entries, size = self.held("requests_in_progress")
            self.assertEqual(entries, len(held.waiting))
            self.assertEqual(entries, 5)
            assert size is not None
            self.assertLess(size, 67_108_864)
            held.release_all()
        self.assertEqual(
            [one.status for transport in transports for one in parse_responses(transport.take_output())], [200] * 20
        )
        self.site_fixture.request("POST", "/", b"{}", {"Content-Type": "application/json"})
        self.assertEqual(self.held("requests_in_progress"), (0, 0))

    def test_pushes(self) -> None:
        """They count until they are acknowledged, or have come to nothing."""
        self.forward("one")
        self.forward("two")
        self.assertEqual(self.held("live_pushes"), (2, None))
        self.assertEqual(self.held("counted_pushes"), (2, None))
        self.websocket_client.transport.disconnect()
        self.assertEqual(self.held("live_pushes"), (0, None))

    def test_pushes_are_capped(self) -> None:
        """Who acknowledges nothing does not fill the memory: the oldest is pending again."""
        self.patch(pickup, "MAX_UNACKNOWLEDGED_PUSHES", 3)
        for number in range(5):
            self.forward(f"{number}")
        self.assertEqual(self.held("live_pushes"), (3, None))
        self.assertEqual(self.bob.waiting(), 5)

    def test_others(self) -> None:
        """Subscriptions, limits and documents are counted as they come."""
        self.assertEqual(self.held("subscriptions"), (1, None))
        for buffer in ("rate_limits", "did_documents"):
            entries, _ = self.held(buffer)
            assert entries is not None
            self.assertGreater(entries, 0)
        self.assertEqual(self.held("store_operations"), (0, 0))


class StoreTests(SynchronousTestCase):
    def test_sqlite(self) -> None:
        """What waits for the thread counts, until it is there."""
        clock = Clock()
        store = make_sqlite_store(clock, make_database_path(self))
        self.assertEqual(store.get_buffered(), (0, 0))
        opened = store.open()
        clock.pump([0] * 9)
        self.successResultOf(opened)
        payload = make_payload("a", b"x" * 1000)
        enqueued = store.enqueue("did:example:nobody", [payload], expires_at=NOON)
        entries, size = store.get_buffered()
        self.assertEqual(entries, 1)
        self.assertGreaterEqual(size, 1000)
        clock.pump([0] * 9)
        self.failureResultOf(enqueued)
        self.assertEqual(store.get_buffered(), (0, 0))
        closed = store.close()
        clock.pump([0] * 9)
        self.successResultOf(closed)
