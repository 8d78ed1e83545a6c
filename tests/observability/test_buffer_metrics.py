"""Gauges of all buffers that grow with what peers do, and their documentation."""

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
# Only in a cluster, or with push notifications.
OPTIONAL = {"cluster_hints", "late_pushes", "presence_lookups", "wakeups"}


class BufferMetricsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)
        self.bob = InMemoryWallet(self.site_fixture).enrol()
        self.websocket_client: InMemoryWebSocketClient = self.site_fixture.websocket_client()
        self.websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        self.websocket_client.texts()

    def gauges_of(self, buffer: str) -> tuple[int | None, int | None]:
        """Entries and bytes of a buffer, by its gauges."""
        page = self.site_fixture.base.recorder.metrics.render().decode()
        found = [
            re.search(rf'^mediator_buffer_{kind}{{buffer="{buffer}"}} (\S+)$', page, re.M)
            for kind in ("entries", "bytes")
        ]
        entries, size = (None if item is None else int(float(item[1])) for item in found)
        return entries, size

    def forward(self, text: str) -> None:
        """Forward a message to Bob."""
        self.site_fixture.receive(pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload(text)))

    def test_all_buffers_are_documented(self) -> None:
        """The documented list has exactly the buffers that exist."""
        listed = LIMITS.read_text("utf-8").partition("## Buffers")[2].partition("\n## ")[0]
        described = set(re.findall(r"^`(\w+)`, ", listed, re.M))
        page = self.site_fixture.base.recorder.metrics.render().decode()
        self.assertEqual(set(re.findall(r'^mediator_buffer_\w+{buffer="(\w+)"}', page, re.M)), described - OPTIONAL)

    def test_peer_that_does_not_read(self) -> None:
        """Its send queue fills up to its limit, and is empty when it is gone."""
        self.assertEqual(self.gauges_of("socket_outboxes"), (0, 0))
        self.websocket_client.transport.peer_stalled = True
        for _ in range(150):
            self.forward("x" * 20_000)
        entries, size = self.gauges_of("socket_outboxes")
        assert entries is not None and size is not None
        self.assertTrue(0 < entries <= 64)
        self.assertTrue(500_000 < size <= 1_048_576 + 65_536 + 40_000)
        self.websocket_client.transport.disconnect()
        self.assertEqual(self.gauges_of("socket_outboxes"), (0, 0))

    def test_incomplete_message(self) -> None:
        """Bytes of fragments and partial frames count as soon as they arrive."""
        self.websocket_client.transport.feed(encode_masked_frame(b"x" * 500, final=False))
        self.assertEqual(self.gauges_of("socket_inboxes"), (0, 500))
        self.websocket_client.transport.feed(encode_masked_frame(b"x" * 300, 0)[:100])
        _, size = self.gauges_of("socket_inboxes")
        assert size is not None
        self.assertTrue(500 < size <= 900)

    def test_requests_in_progress(self) -> None:
        """While the store is slow, requests of one address are parsed up to its limit; others wait."""
        transports = [self.site_fixture.connect() for _ in range(20)]
        with HeldStoreOperation(self.site_fixture, "claim_nonce") as held:
            for transport in transports:
                raw = self.bob.pack(PING, {"response_requested": True, "comment": "x" * 200_000})
                transport.feed(encode_request("POST", "/didcomm", raw, {"Content-Type": ENCRYPTED.decode()}))
            self.site_fixture.run_due_calls()
            entries, size = self.gauges_of("requests_in_progress")
            self.assertEqual(entries, len(held.waiting))
            self.assertEqual(entries, 5)
            assert size is not None
            self.assertLess(size, 67_108_864)
            held.release_all()
        self.assertEqual(
            [response.status for transport in transports for response in parse_responses(transport.take_output())],
            [200] * 20,
        )
        self.site_fixture.request("POST", "/", b"{}", {"Content-Type": "application/json"})
        self.assertEqual(self.gauges_of("requests_in_progress"), (0, 0))

    def test_pushes(self) -> None:
        """Pushes count until they are acknowledged or have failed."""
        self.forward("one")
        self.forward("two")
        self.assertEqual(self.gauges_of("live_pushes"), (2, None))
        self.assertEqual(self.gauges_of("counted_pushes"), (2, None))
        self.websocket_client.transport.disconnect()
        self.assertEqual(self.gauges_of("live_pushes"), (0, None))

    def test_pushes_are_bounded(self) -> None:
        """Above the limit the oldest unacknowledged push becomes pending again."""
        self.patch(pickup, "MAX_UNACKNOWLEDGED_PUSHES", 3)
        for number in range(5):
            self.forward(f"{number}")
        self.assertEqual(self.gauges_of("live_pushes"), (3, None))
        self.assertEqual(self.bob.count_queued(), 5)

    def test_other_buffers(self) -> None:
        """Subscriptions, rate limits and documents are counted."""
        self.assertEqual(self.gauges_of("subscriptions"), (1, None))
        for buffer in ("rate_limits", "did_documents"):
            entries, _ = self.gauges_of(buffer)
            assert entries is not None
            self.assertGreater(entries, 0)
        self.assertEqual(self.gauges_of("store_operations"), (0, 0))


class StoreBufferTests(SynchronousTestCase):
    def test_sqlite(self) -> None:
        """Operations count until the thread has taken them."""
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
