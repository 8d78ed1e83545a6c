"""Cost of a forward between socket and store, in function calls: independent of the load of the machine."""

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
from mediatord.store.interfaces import messages as stored_messages
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, StoredMessage
from tests.in_memory_mediator import NOW, InMemoryMediator, InMemoryWallet, pack_forward

# Python functions called for one message: 93 when this was written, about 330 without the fast path.
MOST_CALLS = 100
FORWARD_COUNT = 16
ACCOUNT_CHECK, MOST_INSTRUCTIONS_OF_ACCOUNT_CHECK = "connections.py:_finish", 14


class ImmediateStore:
    """Store that enqueues at once, so that only the code around it is counted."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def enqueue_each(self, deposits: Sequence[EnqueueRequest], early: Any) -> Deferred[list[EnqueueResult]]:
        """Enqueue all."""
        self.batch_sizes.append(len(deposits))
        return succeed([EnqueueResult((self._stored(item),), ()) for item in deposits])

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
        self.start()

    def start(self, **settings: Any) -> None:
        """Start a mediator with a wallet, and connections to it."""
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 1_000}, listen=["tcp:0"], **settings)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.site = build_site(
            self.in_memory.base, self.in_memory.didcomm, self.in_memory.decentrl, self.in_memory.config
        )
        self.store = ImmediateStore()
        self.patch(self.in_memory.store, "enqueue_each", self.store.enqueue_each)
        self.transports = [StringTransport() for _ in range(FORWARD_COUNT)]
        self.channels: list[Any] = [self.site.buildProtocol(line.getPeer()) for line in self.transports]
        for channel, line in zip(self.channels, self.transports, strict=True):
            channel.makeConnection(line)

        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())
        self.request = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)

    def post(self) -> None:
        """Post one forward on each connection within one reactor iteration."""
        for channel in self.channels:
            channel.dataReceived(self.request)
        self.in_memory.clock.advance(0)

    def test_one_store_call_per_iteration(self) -> None:
        """All forwards of one iteration take one store call, and each response one write."""
        self.post()
        self.assertEqual(self.store.batch_sizes, [FORWARD_COUNT])
        for transport in self.transports:
            self.assertEqual(transport.value().count(b"HTTP/1.1 202 "), 1)

    def test_function_calls_per_forward(self) -> None:
        """A forward takes few function calls."""
        self.post()  # warm up caches
        calls = count_calls(self.post)
        total = sum(calls.values()) / FORWARD_COUNT
        self.assertLess(total, MOST_CALLS, sorted(calls.items(), key=lambda one: -one[1])[:40])

    def test_didcomm_v1_costs_nothing(self) -> None:
        """
        A forward of v2 executes the same instructions, whether DIDComm v1 is served or not, and therefore allocates
        the same. What could not be pushed takes a few more, which ask whether the account is one of v1.
        """
        costs = []
        for is_enabled in (True, False):
            self.start(didcomm_v1={"enabled": is_enabled})
            # Or the next block of random bytes might be read within one of the counts.
            stored_messages._random_bytes._forget()
            self.post()  # warm up caches
            costs.append((count_calls(self.post), count_instructions(self.post)))
        (calls, instructions), (calls_without, instructions_without) = costs
        self.assertGreater(sum(instructions.values()), sum(calls.values()))
        self.assertEqual(calls, calls_without)
        more = instructions.pop(ACCOUNT_CHECK) - instructions_without.pop(ACCOUNT_CHECK)
        self.assertEqual(instructions, instructions_without)
        self.assertLessEqual(more / FORWARD_COUNT, MOST_INSTRUCTIONS_OF_ACCOUNT_CHECK)

    def test_two_log_lines_per_forward(self) -> None:
        """A forward writes two lines to the event log."""
        self.in_memory.clock.advance(0)
        before = [len(self.in_memory.events(name)) for name in ("msg.accept", "req.done")]
        whole = self._lines()
        self.post()
        after = [len(self.in_memory.events(name)) for name in ("msg.accept", "req.done")]
        self.assertEqual([b - a for a, b in zip(before, after, strict=True)], [FORWARD_COUNT] * 2)
        self.assertEqual(self._lines() - whole, 2 * FORWARD_COUNT)

    def _lines(self) -> int:
        return sum(
            path.read_bytes().count(b"\n") for path in self.in_memory.config.log.directory.glob("events*.jsonl")
        )


def count_calls(work: Callable[[], object]) -> dict[str, int]:
    """Count calls of functions of mediatord and Twisted by name, without those of tests."""
    calls: dict[str, int] = {}

    def record_call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and ("/mediatord/" in code.co_filename or "/twisted/" in code.co_filename):
            if code.co_filename.endswith(("twisted/internet/task.py", "twisted/internet/base.py")):
                return  # the test's clock
            name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
            calls[name] = calls.get(name, 0) + 1

    # Garbage of other tests would otherwise be finalized at any time.
    gc.collect()
    gc.freeze()
    sys.setprofile(record_call)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.unfreeze()
    return calls


def count_instructions(work: Callable[[], object]) -> dict[str, int]:
    """Count instructions of Python by function of mediatord, in which everything it allocates is allocated."""
    instructions: dict[str, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if "/mediatord/" not in code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
            instructions[name] = instructions.get(name, 0) + 1
        return trace

    previous = sys.gettrace()
    gc.collect()
    gc.freeze()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
        gc.unfreeze()
    return instructions
