"""The short way of a forward: it takes what is usual, and does with it exactly what the long way does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import QueueFull, StoreUnavailable
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.protocol.didcomm.jwe import load_key_exchange
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.messages import EnqueueRequest
from tests.in_memory_mediator import (
    NOW,
    PEER,
    PING,
    InMemoryMediator,
    InMemoryWallet,
    pack_forward,
    read_problem_report,
)

SMALL = {"queue": {"max_messages": 3, "max_bytes": 20_000}}
# Of events: what differs from one time to the next.
_OWN = ("ts", "seq", "req", "msg", "dur_ms", "crypto_ms", "latency_ms", "rcpt", "sender", "peer", "who", "boot")


class ForwardPath:
    """A house with one guest, whose messages all go one way."""

    def __init__(self, test: SynchronousTestCase, *, short: bool, in_steps: bool = False, **settings: Any) -> None:
        self.test = test
        self.short = short
        self.in_memory = InMemoryMediator(test, in_steps=in_steps, **settings)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.taken = 0

    def post(self, raw: bytes, peer: str = PEER) -> RequestReply:
        """What is replied to a message that is POSTed."""
        long: list[None] = []
        replies: list[RequestReply] = []
        way = self.in_memory.didcomm.forward_fast_path
        if self.short and way.take(raw, peer, replies.append, lambda: long.append(None)):
            self.in_memory.clock.advance(0)
            self.test.assertEqual(len(replies) + len(long), 1)
        if replies:
            self.taken += 1
            return replies[0]
        return self.in_memory.done(self.in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(peer)))

    def told(self) -> list[dict[str, Any]]:
        """All events; of what is never the same twice, whether it is there."""
        names = ("req.done", "msg.accept", "msg.push", "msg.evict", "limit.hit")
        events = [event for name in names for event in self.in_memory.events(name)]
        return [{name: name in _OWN or value for name, value in event.items()} for event in events]


Forward = Callable[[ForwardPath], bytes]


def _letter(way: ForwardPath, text: str = "hello", **headers: Any) -> bytes:
    return pack_forward(way.in_memory, way.bob.did, way.bob.letter(text), **headers)


USUAL: dict[str, Forward] = {
    "plain": _letter,
    "to": lambda way: _letter(way, to=[way.in_memory.did]),
    "to somebody else": lambda way: _letter(way, to=["did:web:nobody.example"]),
    "will expire": lambda way: _letter(way, expires_time=int(NOW) + 60),
    "nobody has registered it": lambda way: pack_forward(way.in_memory, "did:web:nobody.example", way.bob.letter()),
    "it makes room": lambda way: _letter(way, "x" * 8_000),
    "to a key": lambda way: pack_forward(way.in_memory, f"{way.bob.did}#key-2", way.bob.letter()),
}
OTHER: dict[str, Forward] = {
    "a claimed sender": lambda way: _letter(way, **{"from": way.bob.did}),
    "delayed": lambda way: _letter(way, delay_milli=5_000),
    "has expired": lambda way: _letter(way, expires_time=int(NOW) - 60),
    "two payloads": lambda way: pack_forward(way.in_memory, way.bob.did, way.bob.letter(), way.bob.letter()),
    "none": lambda way: pack_forward(way.in_memory, way.bob.did),
    "not encrypted": lambda way: pack_forward(way.in_memory, way.bob.did, b"{}"),
    "to a did:peer:3": lambda way: pack_forward(way.in_memory, derive_did_peer_3(way.bob.did), way.bob.letter()),
    "to ourselves": lambda way: pack_forward(way.in_memory, way.in_memory.did, _letter(way)),
    "no queue could keep it": lambda way: _letter(way, "x" * 20_000),
    "a request": lambda way: way.bob.pack(PING),
    "garbage": lambda way: b"garbage",
    "damaged": lambda way: _letter(way)[:-40] + b"A" * 40,
}


class EquivalenceTests(SynchronousTestCase):
    def both(self, **settings: Any) -> tuple[ForwardPath, ForwardPath]:
        """A house whose messages go the short way, and one where they go the long way."""
        return ForwardPath(self, short=True, **settings), ForwardPath(self, short=False, **settings)

    def check(self, forward: Forward, *, times: int = 1, **settings: Any) -> tuple[ForwardPath, list[RequestReply]]:
        """Both ways answer, store, count and tell the same. The one that may be short, and its replies."""
        way, other = self.both(**settings)
        replies = [way.post(forward(way)) for _ in range(times)]
        others = [other.post(forward(other)) for _ in range(times)]
        self.assertEqual(list(map(_said, replies)), list(map(_said, others)))
        self.assertEqual(way.bob.waiting(), other.bob.waiting())
        self.assertEqual(way.told(), other.told())
        self.assertEqual(
            way.in_memory.base.recorder.metrics.collect_totals(),
            other.in_memory.base.recorder.metrics.collect_totals(),
        )
        self.assertEqual(_spent(way), _spent(other))
        self.assertEqual(way.in_memory.base.gate._in_flight, 0)
        return way, replies

    def test_usual(self) -> None:
        """What is usual takes the short way, refusals for an unknown recipient included."""
        for name, forward in USUAL.items():
            with self.subTest(name):
                way, _ = self.check(forward, times=4, **SMALL)
                self.assertEqual(way.taken, 4)

    def test_other(self) -> None:
        """Everything else does not."""
        for name, forward in OTHER.items():
            with self.subTest(name):
                way, _ = self.check(forward, times=2, **SMALL)
                self.assertEqual(way.taken, 0)

    def test_limits(self) -> None:
        """An address that has used up its minute is refused in the same way, and at the same message."""
        way, replies = self.check(_letter, times=8, limits={"ip_per_minute": 5})
        self.assertEqual([reply.status for reply in replies], [202] * 4 + [429] * 4)  # enrolling took one
        self.assertEqual(way.taken, 4)

    def test_settings_that_leave_nothing(self) -> None:
        """Where payloads are wrapped anew, or senders have to be known, there is no short way."""
        for setting in ("rewrap", "require_registered_sender"):
            way, _ = self.check(_letter, didcomm={setting: True})
            self.assertEqual(way.taken, 0)

    def test_a_full_queue_that_refuses(self) -> None:
        """The answer is the same: 429, when to try again, and nothing that is stored or makes room."""
        full = {"max_messages": 3, "when_full": "refuse", "sender_share": 1}
        way, replies = self.check(_letter, times=5, queue=full)
        self.assertEqual(
            [(reply.status, reply.retry_after) for reply in replies], [(202, None)] * 3 + [(429, 600)] * 2
        )
        self.assertEqual(way.taken, 5)

    def test_who_has_most_of_a_queue(self) -> None:
        """An address is one party on both ways: what it fills is refused to it, and not to others."""
        half = {"max_messages": 4, "when_full": "refuse", "sender_share": 0.5}
        ways = self.both(queue=half)
        peers = [PEER, PEER, PEER, "192.0.2.2"]
        for way in ways:
            self.assertEqual([way.post(_letter(way), peer).status for peer in peers], [202, 202, 429, 202])
        self.assertEqual(ways[0].told(), ways[1].told())

    def test_a_recipient_behind_routing_keys(self) -> None:
        """Its payloads are wrapped on the long way; those of others stay on the short one."""
        way = ForwardPath(self, short=True, didcomm={"routing_keys": {"did:web:c.example": ["did:key:z6Mk#z6Mk"]}})
        way.post(_letter(way))
        way.post(pack_forward(way.in_memory, "did:web:c.example", way.bob.letter()))
        self.assertEqual(way.taken, 1)


class FaultTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.way = ForwardPath(self, short=True, in_steps=True)
        self.in_memory = self.way.in_memory

    def test_the_store_fails(self) -> None:
        """As on the long way: 503 for what may work later, 500 and a line for what nobody expected."""
        with self.in_memory.failing("enqueue_all", StoreUnavailable()):
            self.assertEqual(self.way.post(_letter(self.way)).status, 503)
        with self.in_memory.failing("enqueue_all", RuntimeError("of ours")):
            self.assertEqual(self.way.post(_letter(self.way)).status, 500)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(self.way.taken, 2)
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)

    def test_what_fails_after_the_commit(self) -> None:
        """The sender is told so, and the message waits."""
        self.patch(self.in_memory.didcomm.forward_fast_path._router, "dispatch", _broken)
        self.assertEqual(self.way.post(_letter(self.way)).status, 500)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.way.bob.waiting(), 1)

    def test_nothing_is_answered_before_the_commit(self) -> None:
        """And what is under way then is waited for when the daemon stops."""
        committed: Deferred[Any] = Deferred()
        self.patch(self.in_memory.store, "enqueue_all", lambda *args, **options: committed)
        replies: list[RequestReply] = []
        self.assertTrue(
            self.in_memory.didcomm.forward_fast_path.take(_letter(self.way), PEER, replies.append, self.fail)
        )
        self.in_memory.clock.advance(1)
        stopped = self.in_memory.base.gate.stopService()
        self.assertFalse(
            self.in_memory.didcomm.forward_fast_path.take(_letter(self.way), PEER, replies.append, self.fail)
        )
        self.assertEqual(replies, [])
        self.assertNoResult(stopped)
        committed.errback(StoreUnavailable())
        self.assertEqual([reply.status for reply in replies], [503])
        self.successResultOf(stopped)

    def test_one_that_fails_takes_no_other_with_it(self) -> None:
        """All that came in one turn is begun together, and each has its own end."""
        enqueue, failing = self.in_memory.store.enqueue_all, iter([True, False, True])
        self.patch(
            self.in_memory.store,
            "enqueue_all",
            lambda *args, **options: fail(StoreUnavailable()) if next(failing) else enqueue(*args, **options),
        )
        replies: list[RequestReply] = []
        for _ in range(3):
            self.assertTrue(
                self.in_memory.didcomm.forward_fast_path.take(_letter(self.way), PEER, replies.append, self.fail)
            )
        self.in_memory.clock.advance(0)
        self.assertEqual([reply.status for reply in replies], [503, 202, 503])

    def together(self, count: int, answer: Callable[[RequestReply], None]) -> None:
        """So many letters in one turn of the reactor, after which nothing may be under way."""
        for _ in range(count):
            self.assertTrue(self.in_memory.didcomm.forward_fast_path.take(_letter(self.way), PEER, answer, self.fail))
        self.in_memory.clock.advance(0)
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)

    def test_one_that_fails_for_no_known_reason(self) -> None:
        """Others that were stored with it are taken, pushed and told of."""
        enqueue, failing = self.in_memory.store.enqueue_all, iter([False, True, False])
        self.patch(
            self.in_memory.store,
            "enqueue_all",
            lambda *args, **options: fail(ZeroDivisionError()) if next(failing) else enqueue(*args, **options),
        )
        replies: list[RequestReply] = []
        self.together(3, replies.append)
        self.assertEqual([reply.status for reply in replies], [202, 500, 202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(len(self.in_memory.events("msg.accept")), 2)

    def test_everything_breaks(self) -> None:
        """Wherever it does, every request has its one answer, and the gate does not wait for it."""
        half: Any = self.in_memory.didcomm.forward_fast_path
        for owner, name, broken in (
            (self.in_memory.store, "enqueue_each", _broken),
            (self.in_memory.store, "enqueue_each", lambda deposits, early: succeed([])),
            (half._router, "dispatch", _broken),
        ):
            replies: list[RequestReply] = []
            before = getattr(owner, name)
            object.__setattr__(owner, name, broken)  # some are frozen
            self.together(2, replies.append)
            object.__setattr__(owner, name, before)
            self.assertEqual([reply.status for reply in replies], [500, 500], name)
            self.assertGreater(len(self.flushLoggedErrors(ZeroDivisionError, ValueError)), 0)

    def test_the_recorder_breaks(self) -> None:
        """What was stored was taken."""
        replies: list[RequestReply] = []
        with mock.patch.object(self.in_memory.base.recorder, "end_request", _broken):
            self.together(2, replies.append)
        self.assertEqual([reply.status for reply in replies], [202, 202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_the_log_breaks(self) -> None:
        """What was stored was taken, and each sender is told."""
        replies: list[RequestReply] = []
        with mock.patch.object(self.in_memory.base.recorder, "flush_events", _broken):
            self.together(2, replies.append)
        self.assertEqual([reply.status for reply in replies], [202, 202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_refusal_breaks(self) -> None:
        """The sender of the one that is refused gets a plain fault, the others their answers."""
        half: Any = self.in_memory.didcomm.forward_fast_path
        self.patch(
            self.in_memory.store, "enqueue_each", lambda deposits, early: succeed([QueueFull() for _ in deposits])
        )
        replies: list[RequestReply] = []
        with mock.patch.object(type(half._context.packer), "refuse_anonymous", _broken):
            self.together(2, replies.append)
        self.assertEqual([reply.status for reply in replies], [500, 500])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_an_answer_breaks(self) -> None:
        """The others are given."""
        replies: list[RequestReply] = []

        def answer(reply: RequestReply) -> None:
            replies.append(reply)
            raise ZeroDivisionError

        self.together(2, answer)
        self.assertEqual(len(replies), 2)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_the_long_way_breaks(self) -> None:
        """For one; the others have theirs."""
        take, replies = self.in_memory.didcomm.forward_fast_path.take, list[RequestReply]()
        self.assertTrue(take(b"garbage", PEER, replies.append, _broken))
        self.together(1, replies.append)
        self.assertEqual([reply.status for reply in replies], [202])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_answered_before_the_daemon_goes_on_stopping(self) -> None:
        """What comes next closes the connections."""
        told: list[object] = []
        committed: Deferred[Any] = Deferred()
        self.patch(self.in_memory.store, "enqueue_each", lambda deposits, early: committed)
        self.assertTrue(
            self.in_memory.didcomm.forward_fast_path.take(_letter(self.way), PEER, told.append, self.fail)
        )
        self.in_memory.clock.advance(0)
        self.in_memory.base.gate.stopService().addCallback(lambda _: told.append("stopped"))
        committed.errback(StoreUnavailable())
        self.assertEqual([getattr(one, "status", one) for one in told], [503, "stopped"])


class SameIterationTests(SynchronousTestCase):
    """Several messages in one turn of the reactor."""

    def test_what_an_account_pays_for_crowds_nobody_out(self) -> None:
        """At its limit an address may send what it could if each had come in a turn of its own."""
        way = ForwardPath(self, short=True, limits={"ip_per_minute": 3})  # enrolling took one
        in_memory, statuses = way.in_memory, list[int]()

        def post(raw: bytes) -> bool:
            def long_way() -> None:
                statuses.append(in_memory.done(in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(PEER))).status)

            return in_memory.didcomm.forward_fast_path.take(
                raw, PEER, lambda reply: statuses.append(reply.status), long_way
            )

        self.assertTrue(post(_letter(way)))
        self.assertTrue(post(way.bob.pack(PING)))
        self.assertTrue(post(_letter(way)))
        self.assertTrue(post(_letter(way)))
        in_memory.clock.advance(0)
        self.assertEqual(sorted(statuses), [200, 202, 202, 429])
        self.assertFalse(post(_letter(way)))
        self.assertEqual(in_memory.base.gate._in_flight, 0)

    def test_how_long_it_took(self) -> None:
        """From when it came, as on the long way, so that reading is never longer than all of it."""
        way = ForwardPath(self, short=True)
        self.assertTrue(
            way.in_memory.didcomm.forward_fast_path.take(_letter(way), PEER, lambda reply: None, self.fail)
        )
        way.in_memory.clock.advance(0.25)
        self.assertEqual(way.in_memory.events("req.done")[-1]["dur_ms"], 250.0)


class HeldEnqueueTests(SynchronousTestCase):
    """Forwards of strangers in one reactor iteration, of which the store is slow with some."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, in_steps=True)
        self.bob, self.eve = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory).enrol()
        self.replies: dict[str, RequestReply] = {}
        enqueue = self.in_memory.store.enqueue_all
        self.held: list[Callable[[], object]] = []

        def hold(deposits: Sequence[EnqueueRequest]) -> Deferred[Any]:
            if deposits[0].recipient_did != self.eve.did:
                return enqueue(deposits)
            done: Deferred[Any] = Deferred()
            self.held.append(lambda: enqueue(deposits).chainDeferred(done))
            return done

        self.patch(self.in_memory.store, "enqueue_all", hold)

    def send(self, *names: str) -> None:
        """Forwards to those who are called like that."""
        for name in names:
            guest = self.eve if name.startswith("eve") else self.bob
            raw = pack_forward(self.in_memory, guest.did, guest.letter(name))
            answer = partial(self.replies.__setitem__, name)
            self.assertTrue(self.in_memory.didcomm.forward_fast_path.take(raw, PEER, answer, self.fail))
        self.in_memory.clock.pump([0, 0])

    def test_nobody_waits_for_strangers(self) -> None:
        """Each is answered, pushed and told of when it is stored itself, wherever it stands among the others."""
        socket = self.bob.go_live()
        self.send("eve 1", "bob 1", "eve 2", "bob 2")
        self.assertEqual({name: reply.status for name, reply in self.replies.items()}, {"bob 1": 202, "bob 2": 202})
        self.assertEqual(len(socket.frames), 2)
        self.assertEqual(len(self.in_memory.events("msg.accept")), 2)
        self.assertEqual(self.in_memory.base.gate._in_flight, 2)
        for go_on in self.held:
            go_on()
            self.in_memory.clock.pump([0, 0])
        self.assertEqual({reply.status for reply in self.replies.values()}, {202})
        self.assertEqual(len(self.replies), 4)
        self.assertEqual((self.eve.waiting(), len(self.in_memory.events("msg.accept"))), (2, 4))
        self.assertEqual(self.in_memory.base.gate._in_flight, 0)

    def test_together_where_that_costs_nothing(self) -> None:
        """What is stored in one go is told to the log in one go, and not before it is all known."""
        told: list[int] = []
        settle = self.in_memory.base.recorder.flush_events

        def note() -> None:
            told.append(len(self.replies))
            settle()

        self.patch(self.in_memory.base.recorder, "flush_events", note)
        self.send("bob 1", "eve 1", "bob 2", "bob 3")
        self.assertEqual(told, [0])
        self.assertEqual(len(self.replies), 3)

    def test_the_store_fails_for_those_that_wait(self) -> None:
        """They are refused; those that were answered are not answered once more."""
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
    def test_no_key_is_held_on_to(self) -> None:
        """When the mediator has others, nothing is left of what was made ready."""
        way = ForwardPath(self, short=True)
        self.assertEqual(way.post(_letter(way)).status, 202)
        self.assertGreater(load_key_exchange.cache_info().currsize, 0)
        way.in_memory.base.identity.switch_to(way.in_memory.base.identity.now)
        self.assertEqual(load_key_exchange.cache_info().currsize, 0)
        self.assertEqual(way.post(_letter(way)).status, 202)


def _said(reply: RequestReply) -> tuple[Any, ...]:
    """A reply without its ids."""
    body = read_problem_report(reply) if reply.body else {}
    about = {name: body.get(name) for name in ("type", "typ", "body")}
    named = [name for name in ("pthid", "ack") if body.get(name)]
    return reply.status, reply.media_type, reply.retry_after, reply.fault, about, named


def _spent(way: ForwardPath) -> int:
    """How many more messages its address may send."""
    spent = 0
    while not way.in_memory.base.rate_limiter._peers.admit(PEER, way.in_memory.clock.seconds()):
        spent += 1
    return spent


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError
