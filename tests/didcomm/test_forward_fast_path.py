"""The fast path of a forward does exactly what the general path does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import QueueFull, StoreUnavailable
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.protocol.didcomm.jwe import load_key_exchange
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.messages import EnqueueRequest, StoredMessage
from mediatord.wallet.didcomm_client import read_delivery
from tests.in_memory_mediator import (
    NOW,
    PEER,
    PING,
    VARYING_FIELDS,
    InMemoryMediator,
    InMemoryWallet,
    pack_forward,
    read_problem_report,
)

SMALL = {"queue": {"max_messages": 3, "max_bytes": 20_000}}


class ForwardPath:
    """Mediator with one wallet, whose messages all take one path."""

    def __init__(self, test: SynchronousTestCase, *, is_fast: bool, in_steps: bool = False, **settings: Any) -> None:
        self.test = test
        self.is_fast = is_fast
        self.in_memory = InMemoryMediator(test, in_steps=in_steps, **settings)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.fast_count = 0

    def post(self, raw: bytes, peer: str = PEER) -> RequestReply:
        """Post a message and return the reply."""
        general_calls: list[None] = []
        replies: list[RequestReply] = []
        path = self.in_memory.didcomm.forward_fast_path
        if self.is_fast and path.take(raw, peer, replies.append, lambda: general_calls.append(None)):
            self.in_memory.clock.advance(0)
            self.test.assertEqual(len(replies) + len(general_calls), 1)
        if replies:
            self.fast_count += 1
            return replies[0]
        return self.in_memory.run(self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(peer)))

    def normalized_events(self) -> list[dict[str, Any]]:
        """All events, with values that always differ replaced by their presence."""
        names = ("req.done", "msg.accept", "msg.push", "msg.evict", "limit.hit")
        events = [event for name in names for event in self.in_memory.events(name)]
        return [{name: name in VARYING_FIELDS or value for name, value in event.items()} for event in events]


Forward = Callable[[ForwardPath], bytes]


def _pack_forward_by(path: ForwardPath, text: str = "hello", **headers: Any) -> bytes:
    return pack_forward(path.in_memory, path.bob.did, path.bob.make_payload(text), **headers)


COMMON_FORWARDS: dict[str, Forward] = {
    "plain": _pack_forward_by,
    "to": lambda path: _pack_forward_by(path, to=[path.in_memory.did]),
    "to somebody else": lambda path: _pack_forward_by(path, to=["did:web:nobody.example"]),
    "will expire": lambda path: _pack_forward_by(path, expires_time=int(NOW) + 60),
    "nobody has registered it": lambda path: pack_forward(
        path.in_memory, "did:web:nobody.example", path.bob.make_payload()
    ),
    "it makes room": lambda path: _pack_forward_by(path, "x" * 8_000),
    "to a key": lambda path: pack_forward(path.in_memory, f"{path.bob.did}#key-2", path.bob.make_payload()),
}
OTHER_FORWARDS: dict[str, Forward] = {
    "a claimed sender": lambda path: _pack_forward_by(path, **{"from": path.bob.did}),
    "delayed": lambda path: _pack_forward_by(path, delay_milli=5_000),
    "has expired": lambda path: _pack_forward_by(path, expires_time=int(NOW) - 60),
    "two payloads": lambda path: pack_forward(
        path.in_memory, path.bob.did, path.bob.make_payload(), path.bob.make_payload()
    ),
    "none": lambda path: pack_forward(path.in_memory, path.bob.did),
    "not encrypted": lambda path: pack_forward(path.in_memory, path.bob.did, b"{}"),
    "to a did:peer:3": lambda path: pack_forward(
        path.in_memory, derive_did_peer_3(path.bob.did), path.bob.make_payload()
    ),
    "to ourselves": lambda path: pack_forward(path.in_memory, path.in_memory.did, _pack_forward_by(path)),
    "no queue could keep it": lambda path: _pack_forward_by(path, "x" * 20_000),
    "a request": lambda path: path.bob.pack(PING),
    "garbage": lambda path: b"garbage",
    "damaged": lambda path: _pack_forward_by(path)[:-40] + b"A" * 40,
}


class EquivalenceTests(SynchronousTestCase):
    def both_paths(self, **settings: Any) -> tuple[ForwardPath, ForwardPath]:
        """Return a mediator that uses the fast path and one that uses the general path."""
        return ForwardPath(self, is_fast=True, **settings), ForwardPath(self, is_fast=False, **settings)

    def check(self, forward: Forward, *, times: int = 1, **settings: Any) -> tuple[ForwardPath, list[RequestReply]]:
        """Both paths reply, store, count and log alike; return the fast mediator and its replies."""
        path, other = self.both_paths(**settings)
        replies = [path.post(forward(path)) for _ in range(times)]
        others = [other.post(forward(other)) for _ in range(times)]
        self.assertEqual(list(map(_without_ids, replies)), list(map(_without_ids, others)))
        self.assertEqual(path.bob.count_queued(), other.bob.count_queued())
        self.assertEqual(path.normalized_events(), other.normalized_events())
        self.assertEqual(
            path.in_memory.base.recorder.metrics.collect_totals(),
            other.in_memory.base.recorder.metrics.collect_totals(),
        )
        self.assertEqual(_remaining_quota(path), _remaining_quota(other))
        self.assertEqual(path.in_memory.base.gate._in_flight, 0)
        return path, replies

    def test_common_messages_take_fast_path(self) -> None:
        """Common messages take the fast path, also if refused for an unknown recipient."""
        for name, forward in COMMON_FORWARDS.items():
            with self.subTest(name):
                path, _ = self.check(forward, times=4, **SMALL)
                self.assertEqual(path.fast_count, 4)

    def test_other_messages_take_general_path(self) -> None:
        """All others take the general path."""
        for name, forward in OTHER_FORWARDS.items():
            with self.subTest(name):
                path, _ = self.check(forward, times=2, **SMALL)
                self.assertEqual(path.fast_count, 0)

    def test_limits(self) -> None:
        """An address over its limit is refused alike, at the same message."""
        path, replies = self.check(_pack_forward_by, times=8, limits={"ip_per_minute": 5})
        self.assertEqual([reply.status for reply in replies], [202] * 4 + [429] * 4)  # enrolment used one
        self.assertEqual(path.fast_count, 4)

    def test_settings_that_disable_fast_path(self) -> None:
        """Rewrapping and required senders disable the fast path."""
        for setting in ("rewrap", "require_registered_sender"):
            path, _ = self.check(_pack_forward_by, didcomm={setting: True})
            self.assertEqual(path.fast_count, 0)

    def test_full_queue_refuses(self) -> None:
        """429 with the same Retry-After; nothing is stored or evicted."""
        full = {"max_messages": 3, "when_full": "refuse", "sender_share": 1}
        path, replies = self.check(_pack_forward_by, times=5, queue=full)
        self.assertEqual(
            [(reply.status, reply.retry_after) for reply in replies], [(202, None)] * 3 + [(429, 600)] * 2
        )
        self.assertEqual(path.fast_count, 5)

    def test_fair_share_of_address(self) -> None:
        """An address is one sender on both paths: it is refused when it fills a queue, others are not."""
        half = {"max_messages": 4, "when_full": "refuse", "sender_share": 0.5}
        paths = self.both_paths(queue=half)
        peers = [PEER, PEER, PEER, "192.0.2.2"]
        for path in paths:
            self.assertEqual([path.post(_pack_forward_by(path), peer).status for peer in peers], [202, 202, 429, 202])
        self.assertEqual(paths[0].normalized_events(), paths[1].normalized_events())

    def test_recipient_with_routing_keys(self) -> None:
        """Its payloads take the general path, those of others the fast path."""
        path = ForwardPath(self, is_fast=True, didcomm={"routing_keys": {"did:web:c.example": ["did:key:z6Mk#z6Mk"]}})
        path.post(_pack_forward_by(path))
        path.post(pack_forward(path.in_memory, "did:web:c.example", path.bob.make_payload()))
        self.assertEqual(path.fast_count, 1)


class FaultTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = ForwardPath(self, is_fast=True, in_steps=True)
        self.in_memory = self.path.in_memory

    def test_store_failures(self) -> None:
        """As on the general path: 503 for temporary failures, 500 and a log line for unexpected ones."""
        with self.in_memory.failing("enqueue_all", StoreUnavailable()):
            self.assertEqual(self.path.post(_pack_forward_by(self.path)).status, 503)
        with self.in_memory.failing("enqueue_all", RuntimeError("of ours")):
            self.assertEqual(self.path.post(_pack_forward_by(self.path)).status, 500)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(self.path.fast_count, 2)
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)

    def test_failure_after_commit(self) -> None:
        """The sender gets its 202, and the message stays queued."""
        self.patch(self.in_memory.didcomm.forward_fast_path._router, "dispatch", _broken)
        self.assertEqual(self.path.post(_pack_forward_by(self.path)).status, 500)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.path.bob.count_queued(), 1)

    def test_no_reply_before_commit(self) -> None:
        """No reply precedes the commit; shutdown waits for commits in progress."""
        committed: Deferred[Any] = Deferred()
        self.patch(self.in_memory.store, "enqueue_all", lambda *args, **options: committed)
        replies: list[RequestReply] = []
        self.assertTrue(
            self.in_memory.didcomm.forward_fast_path.take(
                _pack_forward_by(self.path), PEER, replies.append, self.fail
            )
        )
        self.in_memory.clock.advance(1)
        stopped = self.in_memory.base.gate.stopService()
        self.assertFalse(
            self.in_memory.didcomm.forward_fast_path.take(
                _pack_forward_by(self.path), PEER, replies.append, self.fail
            )
        )
        self.assertEqual(replies, [])
        self.assertNoResult(stopped)
        committed.errback(StoreUnavailable())
        self.assertEqual([reply.status for reply in replies], [503])
        self.successResultOf(stopped)

    def test_failed_message_spares_others(self) -> None:
        """Messages of one iteration begin together and fail separately."""
        enqueue, failing = self.in_memory.store.enqueue_all, iter([True, False, True])
        self.patch(
            self.in_memory.store,
            "enqueue_all",
            lambda *args, **options: fail(StoreUnavailable()) if next(failing) else enqueue(*args, **options),
        )
        replies: list[RequestReply] = []
        for _ in range(3):
            self.assertTrue(
                self.in_memory.didcomm.forward_fast_path.take(
                    _pack_forward_by(self.path), PEER, replies.append, self.fail
                )
            )
        self.in_memory.clock.advance(0)
        self.assertEqual([reply.status for reply in replies], [503, 202, 503])

    def post_in_one_iteration(self, count: int, answer: Callable[[RequestReply], None]) -> None:
        """Post `count` messages in one iteration, after which no request may be in progress."""
        for _ in range(count):
            self.assertTrue(
                self.in_memory.didcomm.forward_fast_path.take(_pack_forward_by(self.path), PEER, answer, self.fail)
            )
        self.in_memory.clock.advance(0)
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)

    def test_unexpected_failure_spares_others(self) -> None:
        """Messages stored together with a failed one are accepted, pushed and logged."""
        enqueue, failing = self.in_memory.store.enqueue_all, iter([False, True, False])
        self.patch(
            self.in_memory.store,
            "enqueue_all",
            lambda *args, **options: fail(ZeroDivisionError()) if next(failing) else enqueue(*args, **options),
        )
        replies: list[RequestReply] = []
        self.post_in_one_iteration(3, replies.append)
        self.assertEqual([reply.status for reply in replies], [202, 500, 202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(len(self.in_memory.events("msg.accept")), 2)

    def test_every_failure_point(self) -> None:
        """Whatever fails, every request gets one reply, and the gate is released."""
        half: Any = self.in_memory.didcomm.forward_fast_path
        for owner, name, broken in (
            (self.in_memory.store, "enqueue_each", _broken),
            (self.in_memory.store, "enqueue_each", lambda deposits, early: succeed([])),
            (half._router, "dispatch", _broken),
        ):
            replies: list[RequestReply] = []
            before = getattr(owner, name)
            object.__setattr__(owner, name, broken)  # some objects are frozen
            self.post_in_one_iteration(2, replies.append)
            object.__setattr__(owner, name, before)
            self.assertEqual([reply.status for reply in replies], [500, 500], name)
            self.assertGreater(len(self.flushLoggedErrors(ZeroDivisionError, ValueError)), 0)

    def test_push_failure(self) -> None:
        """If a push fails, the messages are accepted, on either path, as not pushed."""
        self.path.bob.go_live()
        eve, fast_path = InMemoryWallet(self.in_memory).enrol(), self.in_memory.didcomm.forward_fast_path
        forwards = [pack_forward(self.in_memory, did, eve.make_payload()) for did in (eve.did, self.path.bob.did)]
        for owner, name, failures in ((self.in_memory.base.connections, "subscribers", 2), (fast_path, "_push", 1)):
            replies: list[RequestReply] = []
            with mock.patch.object(owner, name, _broken):
                for raw in forwards:
                    self.assertTrue(fast_path.take(raw, PEER, replies.append, self.fail))
                self.in_memory.clock.advance(0)
                receiving = self.in_memory.didcomm.dispatcher.receive(forwards[1], MessageOrigin(PEER))
                replies.append(self.in_memory.run(receiving))
            self.assertEqual([reply.status for reply in replies], [202] * 3)
            self.assertEqual(self.in_memory.base.gate._in_flight, 0)
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), failures)
        accepted = self.in_memory.events("msg.accept")
        self.assertEqual([event["method"] for event in accepted], ["queue"] * 5 + ["live"])

    def test_failure_of_a_push_for_another_process(self) -> None:
        """It fails for nobody: the other process is told that no socket took the message."""
        self.path.bob.go_live()
        message = StoredMessage("m", self.path.bob.did, self.path.bob.did, b"{}", "json", NOW, NOW + 60)
        with mock.patch.object(self.in_memory.base.connections, "subscribers", _broken):
            self.assertNotIn("m", self.in_memory.didcomm.live.push_remote([message]))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertIn("m", self.in_memory.didcomm.live.push_remote([message]))

    def test_recorder_failure(self) -> None:
        """A stored message is accepted although the recorder fails."""
        replies: list[RequestReply] = []
        with mock.patch.object(self.in_memory.base.recorder, "end_request", _broken):
            self.post_in_one_iteration(2, replies.append)
        self.assertEqual([reply.status for reply in replies], [202, 202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_log_failure(self) -> None:
        """A stored message is accepted although the log fails; every sender gets a reply."""
        replies: list[RequestReply] = []
        with mock.patch.object(self.in_memory.base.recorder, "flush_events", _broken):
            self.post_in_one_iteration(2, replies.append)
        self.assertEqual([reply.status for reply in replies], [202, 202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_refusal_failure(self) -> None:
        """If a refusal cannot be made, its sender gets an internal error, others their replies."""
        half: Any = self.in_memory.didcomm.forward_fast_path
        self.patch(
            self.in_memory.store, "enqueue_each", lambda deposits, early: succeed([QueueFull() for _ in deposits])
        )
        replies: list[RequestReply] = []
        with mock.patch.object(type(half._context.packer), "refuse_anonymous", _broken):
            self.post_in_one_iteration(2, replies.append)
        self.assertEqual([reply.status for reply in replies], [500, 500])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_reply_failure(self) -> None:
        """If one reply fails, others are sent."""
        replies: list[RequestReply] = []

        def failing_reply(reply: RequestReply) -> None:
            replies.append(reply)
            raise ZeroDivisionError

        self.post_in_one_iteration(2, failing_reply)
        self.assertEqual(len(replies), 2)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_general_path_failure(self) -> None:
        """If the general path fails for one message, others get their replies."""
        take, replies = self.in_memory.didcomm.forward_fast_path.take, list[RequestReply]()
        self.assertTrue(take(b"garbage", PEER, replies.append, _broken))
        self.post_in_one_iteration(1, replies.append)
        self.assertEqual([reply.status for reply in replies], [202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_replies_before_shutdown_continues(self) -> None:
        """Replies are written before shutdown closes the connections."""
        outcomes: list[object] = []
        committed: Deferred[Any] = Deferred()
        self.patch(self.in_memory.store, "enqueue_each", lambda deposits, early: committed)
        self.assertTrue(
            self.in_memory.didcomm.forward_fast_path.take(
                _pack_forward_by(self.path), PEER, outcomes.append, self.fail
            )
        )
        self.in_memory.clock.advance(0)
        self.in_memory.base.gate.stopService().addCallback(lambda _: outcomes.append("stopped"))
        committed.errback(StoreUnavailable())
        self.assertEqual([getattr(item, "status", item) for item in outcomes], [503, "stopped"])


class SameIterationTests(SynchronousTestCase):
    """Several messages in one reactor iteration."""

    def test_account_requests_do_not_use_up_address_limit(self) -> None:
        """An address at its limit may send as much as if each request came in its own iteration."""
        path = ForwardPath(self, is_fast=True, limits={"ip_per_minute": 3})  # enrolment used one
        in_memory, statuses = path.in_memory, list[int]()

        def post(raw: bytes) -> bool:
            def general_path() -> None:
                statuses.append(in_memory.run(in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER))).status)

            return in_memory.didcomm.forward_fast_path.take(
                raw, PEER, lambda reply: statuses.append(reply.status), general_path
            )

        self.assertTrue(post(_pack_forward_by(path)))
        self.assertTrue(post(path.bob.pack(PING)))
        self.assertTrue(post(_pack_forward_by(path)))
        self.assertTrue(post(_pack_forward_by(path)))
        in_memory.clock.advance(0)
        self.assertEqual(sorted(statuses), [200, 202, 202, 429])
        self.assertFalse(post(_pack_forward_by(path)))
        self.assertEqual(in_memory.base.gate._in_flight, 0)

    def test_recorded_duration(self) -> None:
        """
        Durations count from the arrival, as on the general path, so that reading is never longer than the whole.
        """
        path = ForwardPath(self, is_fast=True)
        self.assertTrue(
            path.in_memory.didcomm.forward_fast_path.take(_pack_forward_by(path), PEER, lambda reply: None, self.fail)
        )
        path.in_memory.clock.advance(0.25)
        self.assertEqual(path.in_memory.events("req.done")[-1]["dur_ms"], 250.0)


class HeldEnqueueTests(SynchronousTestCase):
    """Anonymous forwards in one iteration, some of which the store delays."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, in_steps=True)
        self.bob, self.eve = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory).enrol()
        self.replies: dict[str, RequestReply] = {}
        enqueue = self.in_memory.store.enqueue_all
        self.held: list[Callable[[], object]] = []

        def delay(deposits: Sequence[EnqueueRequest]) -> Deferred[Any]:
            if deposits[0].recipient_did != self.eve.did:
                return enqueue(deposits)
            done: Deferred[Any] = Deferred()
            self.held.append(lambda: enqueue(deposits).chainDeferred(done))
            return done

        self.patch(self.in_memory.store, "enqueue_all", delay)

    def send(self, *names: str) -> None:
        """Send forwards to these recipients."""
        for name in names:
            guest = self.eve if name.startswith("eve") else self.bob
            raw = pack_forward(self.in_memory, guest.did, guest.make_payload(name))
            answer = partial(self.replies.__setitem__, name)
            self.assertTrue(self.in_memory.didcomm.forward_fast_path.take(raw, PEER, answer, self.fail))
        self.in_memory.clock.pump([0, 0])

    def test_delayed_forwards_do_not_delay_others(self) -> None:
        """Each is answered, pushed and logged once it is stored, whatever its position."""
        socket = self.bob.go_live()
        self.send("eve 1", "bob 1", "eve 2", "bob 2")
        self.assertEqual({name: reply.status for name, reply in self.replies.items()}, {"bob 1": 202, "bob 2": 202})
        (frame,) = socket.frames
        self.assertEqual(len(read_delivery(self.bob.open(frame).message)), 2)
        self.assertEqual(len(self.in_memory.events("msg.accept")), 2)
        self.assertEqual(self.in_memory.base.gate._in_flight, 2)
        for go_on in self.held:
            go_on()
            self.in_memory.clock.pump([0, 0])
        self.assertEqual({reply.status for reply in self.replies.values()}, {202})
        self.assertEqual(len(self.replies), 4)
        self.assertEqual((self.eve.count_queued(), len(self.in_memory.events("msg.accept"))), (2, 4))
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)

    def test_forwards_stored_together_are_pushed_together(self) -> None:
        """Each socket gets one delivery with all messages of its account; each message is recorded by itself."""
        sockets = [self.bob.go_live(), self.bob.go_live()]
        other = InMemoryWallet(self.in_memory).enrol()
        other_socket = other.go_live()
        wallets = {"bob 1": self.bob, "other": other, "bob 2": self.bob, "bob 3": self.bob}
        for name, wallet in wallets.items():
            raw = pack_forward(self.in_memory, wallet.did, wallet.make_payload(name))
            answer = partial(self.replies.__setitem__, name)
            self.assertTrue(self.in_memory.didcomm.forward_fast_path.take(raw, PEER, answer, self.fail))
        self.in_memory.clock.pump([0, 0])
        self.assertEqual([reply.status for reply in self.replies.values()], [202] * 4)
        for socket, wallet, names in (
            (sockets[0], self.bob, ["bob 1", "bob 2", "bob 3"]),
            (sockets[1], self.bob, ["bob 1", "bob 2", "bob 3"]),
            (other_socket, other, ["other"]),
        ):
            (frame,) = socket.frames
            delivered = read_delivery(wallet.open(frame).message)
            self.assertEqual([wallet.open(one.payload).text for one in delivered], names)
        self.assertEqual(len(self.in_memory.events("msg.push")), 3 * 2 + 1)
        self.assertEqual({event["attempt"] for event in self.in_memory.events("msg.push")}, {1})
        self.assertEqual([event["method"] for event in self.in_memory.events("msg.accept")], ["live"] * 4)
        self.assertEqual(self.in_memory.didcomm.live.unacknowledged_pushes, 4)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 0)

    def test_key_agreements_of_messages_pushed_together(self) -> None:
        """One new key and its agreement for a delivery; its parts that depend on the parties are kept."""
        self.bob.go_live()
        self.send("bob 0")
        operations = list[str]()

        def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                operations.append(name)
                return function(*args)

            return counted

        raws = [pack_forward(self.in_memory, self.bob.did, self.bob.make_payload()) for _ in range(5)]
        module: Any = jwe
        self.patch(module, "_load_public", count("open", module._load_public))
        self.patch(module, "compute_x25519", count("agree", module.compute_x25519))
        generate = module.bindings.crypto_scalarmult_base
        self.patch(module.bindings, "crypto_scalarmult_base", count("generate", generate))
        written = module._write_cached_parties.cache_info().misses
        replies: list[RequestReply] = []
        for raw in raws:
            self.in_memory.didcomm.forward_fast_path.take(raw, PEER, replies.append, self.fail)
        self.in_memory.clock.pump([0, 0])
        self.assertEqual(len(replies), 5)
        self.assertEqual(operations, ["open"] * 5 + ["generate", "agree"])
        self.assertEqual(module._write_cached_parties.cache_info().misses, written)

    def test_forwards_stored_together_are_logged_together(self) -> None:
        """Forwards stored together are logged in one write, after all outcomes are known."""
        counts: list[int] = []
        settle = self.in_memory.base.recorder.flush_events

        def record_write() -> None:
            counts.append(len(self.replies))
            settle()

        self.patch(self.in_memory.base.recorder, "flush_events", record_write)
        self.send("bob 1", "eve 1", "bob 2", "bob 3")
        self.assertEqual(counts, [0])
        self.assertEqual(len(self.replies), 3)

    def test_store_failure_of_delayed_forwards(self) -> None:
        """Delayed forwards are refused; those already answered get no second reply."""
        store: Any = self.in_memory.store
        enqueue_each, failed = store.enqueue_each, Deferred[Any]()

        def fail_late(deposits: Any, early: Any) -> Deferred[Any]:
            enqueue_each(deposits, early)
            return failed

        self.patch(store, "enqueue_each", fail_late)
        self.send("bob 1", "eve 1")
        self.assertEqual(list(self.replies), ["bob 1"])
        failed.errback(StoreUnavailable())
        self.assertEqual({name: reply.status for name, reply in self.replies.items()}, {"bob 1": 202, "eve 1": 503})
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)


class RotationTests(SynchronousTestCase):
    def test_frees_old_keys(self) -> None:
        """After a key rotation nothing of the old keys is kept."""
        path = ForwardPath(self, is_fast=True)
        self.assertEqual(path.post(_pack_forward_by(path)).status, 202)
        self.assertGreater(load_key_exchange.cache_info().currsize, 0)
        path.in_memory.base.identity.switch_to(path.in_memory.base.identity.now)
        self.assertEqual(load_key_exchange.cache_info().currsize, 0)
        self.assertEqual(path.post(_pack_forward_by(path)).status, 202)


def _without_ids(reply: RequestReply) -> tuple[Any, ...]:
    """A reply without its ids."""
    body = read_problem_report(reply) if reply.body else {}
    about = {name: body.get(name) for name in ("type", "typ", "body")}
    named = [name for name in ("pthid", "ack") if body.get(name)]
    return reply.status, reply.media_type, reply.retry_after, reply.fault, about, named


def _remaining_quota(path: ForwardPath) -> int:
    """How many more messages the address may send."""
    spent = 0
    while not path.in_memory.base.rate_limiter._peers.admit(PEER, path.in_memory.clock.seconds()):
        spent += 1
    return spent


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError
