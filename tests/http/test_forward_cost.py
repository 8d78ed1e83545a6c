"""
What a forward costs between the socket and the store, counted: no clock is asked, so a busy machine changes nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.public_site import build_site
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, StoredMessage
from tests.in_memory_mediator import NOW, InMemoryMediator, InMemoryWallet, pack_forward

# Functions of Python that are called for one message: 93 when this was written, about 330 without the fast path.
MOST_CALLS = 100
TOGETHER = 16


class Store:
    """Deposits that are done at once, so that only what is around them is counted."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def enqueue_each(self, deposits: Sequence[EnqueueRequest], early: Any) -> Deferred[list[EnqueueResult]]:
        """All of them."""
        self.asked.append(len(deposits))
        return succeed([EnqueueResult((self._stored(one),), ()) for one in deposits])

    def _stored(self, one: EnqueueRequest) -> StoredMessage:
        (payload,) = one.payloads
        return StoredMessage(
            id=payload.id,
            recipient_did=one.recipient_did,
            account=one.recipient_did,
            payload=payload.data,
            form=payload.form,
            received_at=NOW,
            expires_at=one.expires_at,
        )


class ForwardCostTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 1_000}, listen=["tcp:0"])
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.site = build_site(
            self.in_memory.base, self.in_memory.didcomm, self.in_memory.decentrl, self.in_memory.config
        )
        self.store = Store()
        self.patch(self.in_memory.store, "enqueue_each", self.store.enqueue_each)
        self.lines = [StringTransport() for _ in range(TOGETHER)]
        self.channels: list[Any] = [self.site.buildProtocol(line.getPeer()) for line in self.lines]
        for channel, line in zip(self.channels, self.lines, strict=True):
            channel.makeConnection(line)

        raw = pack_forward(self.in_memory, self.bob.did, self.bob.letter())
        self.request = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)

    def post(self) -> None:
        """One forward on each connection, all in one turn of the reactor."""
        for channel in self.channels:
            channel.dataReceived(self.request)
        self.in_memory.clock.advance(0)

    def test_what_comes_in_one_turn_is_stored_together(self) -> None:
        """One question to the store, whatever the number, and one write for each answer."""
        self.post()
        self.assertEqual(self.store.asked, [TOGETHER])
        for line in self.lines:
            self.assertEqual(line.value().count(b"HTTP/1.1 202 "), 1)

    def test_calls(self) -> None:
        """A message leads through few functions."""
        self.post()  # what is only done once is done now
        calls = counted(self.post)
        total = sum(calls.values()) / TOGETHER
        self.assertLess(total, MOST_CALLS, sorted(calls.items(), key=lambda one: -one[1])[:40])

    def test_two_lines(self) -> None:
        """And nothing else in the event log."""
        self.in_memory.clock.advance(0)
        before = [len(self.in_memory.events(name)) for name in ("msg.accept", "req.done")]
        whole = self._lines()
        self.post()
        after = [len(self.in_memory.events(name)) for name in ("msg.accept", "req.done")]
        self.assertEqual([b - a for a, b in zip(before, after, strict=True)], [TOGETHER] * 2)
        self.assertEqual(self._lines() - whole, 2 * TOGETHER)

    def _lines(self) -> int:
        return sum(
            path.read_bytes().count(b"\n") for path in self.in_memory.config.log.directory.glob("events*.jsonl")
        )


def counted(work: Callable[[], object]) -> dict[str, int]:
    """How often each function of mediatord and of Twisted was called, by name; those of the tests are left out."""
    calls: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and ("/mediatord/" in code.co_filename or "/twisted/" in code.co_filename):
            if code.co_filename.endswith(("twisted/internet/task.py", "twisted/internet/base.py")):
                return  # the clock of the test
            name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
            calls[name] = calls.get(name, 0) + 1

    # What other tests have left would else be finalized whenever the collector happens to run.
    gc.collect()
    gc.freeze()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.unfreeze()
    return calls
