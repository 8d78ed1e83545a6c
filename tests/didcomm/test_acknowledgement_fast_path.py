"""The fast path of an acknowledgement does exactly what the general path does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.dispatcher import DIDCommDispatcher
from mediatord.didcomm.messages import MessageOrigin, UnpackedMessage
from mediatord.errors import RateLimitExceeded, ReplayedMessage, StoreUnavailable
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.ratelimit.admission import MAX_MEMORY_PER_ADDRESS, RequestReply, estimate_request_memory
from mediatord.store.interfaces.messages import QueueStatus
from mediatord.wallet.didcomm_client import read_delivery
from tests.in_memory_mediator import (
    MP,
    NOW,
    PEER,
    PING,
    VARYING_FIELDS,
    InMemoryMediator,
    InMemoryWallet,
    code_of,
    pack_forward,
)

_EVENTS = ("req.done", "msg.accept", "msg.push", "msg.ack", "limit.hit", "replay.drop", "conn.auth")


class LiveWallet:
    """
    A wallet with a live socket, whose messages take one of the paths.

    :ivar pushed: ids of messages that were pushed and are not acknowledged.
    """

    def __init__(self, test: SynchronousTestCase, *, is_fast: bool, in_steps: bool = False, **settings: Any) -> None:
        self.is_fast = is_fast
        self.in_memory = InMemoryMediator(test, in_steps=in_steps, **settings)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.socket = self.bob.go_live()
        self.fast_count = 0
        self.pushed = [self.push() for _ in range(3)]

    def push(self) -> str:
        """Forward a message to the wallet; its id."""
        before = len(self.socket.frames)
        self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload()))
        (frame,) = self.socket.frames[before:]
        (delivered,) = read_delivery(self.bob.open(frame).message)
        return delivered.id

    def send(self, raw: bytes) -> RequestReply:
        """Send a message on the socket; the reply."""
        replies: list[RequestReply] = []
        opened: list[UnpackedMessage | None] = [None]
        origin = MessageOrigin(PEER, self.socket)
        path = self.in_memory.didcomm.acknowledgement_fast_path
        if self.is_fast and path.take(raw, origin, replies.append, opened.append):
            self.in_memory.clock.advance(0)
        if replies:
            self.fast_count += 1
            return replies[0]
        return self.in_memory.run(self.in_memory.didcomm.dispatcher.receive(raw, origin, opened[-1]))

    def count_queued(self) -> int:
        """Number of queued messages, without a request."""
        reading: Deferred[QueueStatus] = self.in_memory.store.get_queue_status(self.bob.did, None)
        return self.in_memory.test.successResultOf(reading).message_count

    def acknowledgement(self, *ids: str, **headers: Any) -> bytes:
        """An acknowledgement of messages, by default of one that was pushed."""
        body = {"message_id_list": list(ids or self.pushed[:1])}
        return self.bob.pack(f"{MP}/messages-received", body, **headers)

    def normalized_events(self) -> list[dict[str, Any]]:
        """All events, with values that always differ replaced by their presence."""
        events = [event for name in _EVENTS for event in self.in_memory.events(name)]
        varying = VARYING_FIELDS | {"did", "conn"}
        return [{name: name in varying or value for name, value in event.items()} for event in events]


Packer = Callable[[LiveWallet], bytes]

COMMON: dict[str, Packer] = {
    "with status": lambda wallet: wallet.acknowledgement(return_route="all"),
    "without status": lambda wallet: wallet.acknowledgement(return_route="none"),
    "as the socket decides": lambda wallet: wallet.acknowledgement(),
    "of several messages": lambda wallet: wallet.acknowledgement(*wallet.pushed),
    "of an unknown message": lambda wallet: wallet.acknowledgement("unknown"),
    "dated": lambda wallet: wallet.acknowledgement(created_time=int(NOW)),
    "will expire": lambda wallet: wallet.acknowledgement(expires_time=int(NOW) + 60),
    "of nothing": lambda wallet: wallet.bob.pack(f"{MP}/messages-received", {"message_id_list": []}),
}
OTHERS: dict[str, Packer] = {
    "of a digest": lambda wallet: wallet.acknowledgement("0" * 64),
    "another request": lambda wallet: wallet.bob.pack(f"{MP}/status-request"),
    "a ping": lambda wallet: wallet.bob.pack(PING),
    "has expired": lambda wallet: wallet.acknowledgement(expires_time=int(NOW) - 60),
    "too old": lambda wallet: wallet.acknowledgement(created_time=int(NOW) - 4000),
    "to somebody else": lambda wallet: wallet.acknowledgement(to=["did:web:nobody.example"]),
    "malformed": lambda wallet: wallet.bob.pack(f"{MP}/messages-received", {"message_id_list": [1]}),
    "by a wallet without an account": lambda wallet: InMemoryWallet(wallet.in_memory).pack(
        f"{MP}/messages-received", {"message_id_list": wallet.pushed}
    ),
    "large": lambda wallet: wallet.acknowledgement(*map(str, range(9000))),
    "a forward": lambda wallet: pack_forward(wallet.in_memory, wallet.bob.did, wallet.bob.make_payload()),
    "garbage": lambda wallet: b"garbage",
    "damaged": lambda wallet: wallet.acknowledgement()[:-40] + b"A" * 40,
}


class EquivalenceTests(SynchronousTestCase):
    def check(self, pack: Packer, *, times: int = 1, **settings: Any) -> tuple[LiveWallet, list[RequestReply]]:
        """Both paths reply, remove, count and log alike; the fast mediator and its replies."""
        fast, general = (LiveWallet(self, is_fast=is_fast, **settings) for is_fast in (True, False))
        replies = [[wallet.send(raw) for _ in range(times) if (raw := pack(wallet))] for wallet in (fast, general)]
        seen = [
            [(reply.status, bool(reply.body), reply.fault, reply.retry_after) for reply in some] for some in replies
        ]
        self.assertEqual(*seen)
        self.assertEqual(fast.count_queued(), general.count_queued())
        self.assertEqual(fast.normalized_events(), general.normalized_events())
        totals = [wallet.in_memory.base.recorder.metrics.collect_totals() for wallet in (fast, general)]
        self.assertEqual(*totals)
        self.assertEqual(fast.in_memory.base.gate._in_flight, 0)
        self.assertEqual(fast.in_memory.base.requests.memory.held, (0, 0))
        return fast, replies[0]

    def test_common_acknowledgements_take_fast_path(self) -> None:
        for name, pack in COMMON.items():
            with self.subTest(name):
                fast, _ = self.check(pack, times=2)
                self.assertEqual(fast.fast_count, 2)

    def test_other_messages_take_general_path(self) -> None:
        for name, pack in OTHERS.items():
            with self.subTest(name):
                fast, _ = self.check(pack)
                self.assertEqual(fast.fast_count, 0)

    def test_account_limit(self) -> None:
        """An account over its limit is refused alike, at the same message."""
        fast, replies = self.check(LiveWallet.acknowledgement, times=6, limits={"account_per_minute": 6})
        self.assertEqual([reply.fault for reply in replies].count(RateLimitExceeded), 6 - fast.fast_count)
        self.assertEqual(fast.fast_count, 4)  # enrolment and live mode used the others

    def test_status_is_that_after_the_removal(self) -> None:
        wallet = LiveWallet(self, is_fast=True)
        for left in (2, 1, 0):
            reply = wallet.send(wallet.acknowledgement(wallet.pushed.pop()))
            status = wallet.bob.open(reply.body)
            self.assertEqual((status.body["message_count"], status.body["live_delivery"]), (left, True))
        self.assertEqual(wallet.fast_count, 3)

    def test_messages_of_others_stay(self) -> None:
        """A wallet cannot acknowledge what is queued for another one."""
        wallet = LiveWallet(self, is_fast=True)
        other = InMemoryWallet(wallet.in_memory).enrol()
        other_socket = other.go_live()
        raw = other.pack(f"{MP}/messages-received", {"message_id_list": wallet.pushed})
        wallet.socket = other_socket
        self.assertEqual(wallet.send(raw).status, 200)
        self.assertEqual((wallet.fast_count, wallet.bob.count_queued()), (1, 3))

    def test_replay(self) -> None:
        """The second is refused, recorded, and charged to the address."""
        wallet = LiveWallet(self, is_fast=True)
        raw = wallet.acknowledgement()
        self.assertEqual([wallet.send(raw).fault for _ in range(3)], [None, ReplayedMessage, ReplayedMessage])
        self.assertEqual((wallet.fast_count, len(wallet.in_memory.events("replay.drop"))), (1, 2))

    def test_names_of_the_wallet(self) -> None:
        """A wallet may spell its DID in another form on the same socket."""
        wallet = LiveWallet(self, is_fast=True)
        self.assertNotEqual(derive_did_peer_3(wallet.bob.did), wallet.bob.did)
        raw = wallet.acknowledgement(**{"from": wallet.bob.did})
        self.assertEqual((wallet.send(raw).status, wallet.fast_count), (200, 1))


class FaultTests(SynchronousTestCase):
    def test_store_failures(self) -> None:
        """As on the general path, and the same bytes may be sent again."""
        for in_steps in (False, True):
            wallet = LiveWallet(self, is_fast=True, in_steps=in_steps)
            raw = wallet.acknowledgement()
            for error, status in ((StoreUnavailable(), 503), (RuntimeError("of ours"), 500)):
                with wallet.in_memory.failing("acknowledge_each", error):
                    reply = wallet.send(raw)
                self.assertEqual(reply.status, status)
                if status == 503:
                    self.assertEqual(code_of(reply, wallet.bob), "e.p.me.res.storage")
                self.assertEqual(wallet.bob.count_queued(), 3)
                self.assertEqual(wallet.in_memory.base.gate._in_flight, 0)
                self.assertEqual(wallet.in_memory.base.requests.memory.held, (0, 0))
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
            self.assertEqual((wallet.send(raw).status, wallet.bob.count_queued()), (200, 2))
            self.assertEqual(wallet.fast_count, 3)

    def test_memory_budget(self) -> None:
        """Without memory a message is left to the general path unopened; otherwise it is counted until the answer."""
        wallet = LiveWallet(self, is_fast=True)
        memory, path = wallet.in_memory.base.requests.memory, wallet.in_memory.didcomm.acknowledgement_fast_path
        store: Any = wallet.in_memory.store
        acknowledge_each, held = store.acknowledge_each, list[int]()

        def note_memory(requests: Any) -> Any:
            held.append(memory.held[1])
            return acknowledge_each(requests)

        self.patch(store, "acknowledge_each", note_memory)

        def send(raw: bytes) -> tuple[int, list[UnpackedMessage | None]]:
            replies, opened = list[RequestReply](), list[UnpackedMessage | None]()
            self.assertTrue(path.take(raw, MessageOrigin(PEER, wallet.socket), replies.append, opened.append))
            wallet.in_memory.clock.advance(0)
            return len(replies), opened

        raw = wallet.acknowledgement()
        self.assertTrue(memory.try_acquire(PEER, MAX_MEMORY_PER_ADDRESS))
        self.assertEqual((send(raw), held), ((0, [None]), []))
        memory.release(PEER, MAX_MEMORY_PER_ADDRESS)
        self.assertEqual((send(raw), held), ((1, []), [estimate_request_memory(len(raw))]))
        self.assertEqual(memory.held, (0, 0))

    def test_unreadable_status(self) -> None:
        """Removed messages are recorded, and the same bytes may be sent again."""
        wallet = LiveWallet(self, is_fast=True, in_steps=True)
        raw = wallet.acknowledgement()
        with wallet.in_memory.failing("get_queue_status", StoreUnavailable()):
            self.assertEqual(wallet.send(raw).status, 503)
        self.assertEqual(len(wallet.in_memory.events("msg.ack")), 1)
        self.assertEqual([wallet.send(raw).fault for _ in range(2)], [None, ReplayedMessage])

    def test_account_is_read_late(self) -> None:
        """Acknowledgements wait for accounts that are not cached, and share one operation of the store."""
        wallet = LiveWallet(self, is_fast=True)
        in_memory, accounts, calls = wallet.in_memory, list[Deferred[Any]](), list[int]()
        account = self.successResultOf(in_memory.store.get_account(wallet.bob.did))
        store: Any = in_memory.store
        acknowledge_each = store.acknowledge_each

        def get_account(did: str) -> Deferred[Any]:
            accounts.append(Deferred())
            return accounts[-1]

        def count_calls(requests: Any) -> Any:
            calls.append(len(requests))
            return acknowledge_each(requests)

        self.patch(store, "get_account", get_account)
        self.patch(store, "acknowledge_each", count_calls)
        replies = list[RequestReply]()
        for id_ in wallet.pushed:
            raw = wallet.acknowledgement(id_)
            taken = in_memory.didcomm.acknowledgement_fast_path.take(
                raw, MessageOrigin(PEER, wallet.socket), replies.append, self.fail
            )
            self.assertTrue(taken)
        in_memory.clock.advance(0)
        self.assertEqual((len(accounts), calls), (3, []))
        for one in accounts:
            one.callback(account)
        in_memory.clock.advance(0)
        self.assertEqual(([reply.status for reply in replies], calls), ([200] * 3, [3]))


class CostTests(SynchronousTestCase):
    def test_acknowledgements_of_an_iteration_share_one_operation(self) -> None:
        """No coroutine of the general path runs, and the store is called once."""
        wallet = LiveWallet(self, is_fast=True)
        in_memory, calls = wallet.in_memory, list[int]()
        store: Any = in_memory.store
        acknowledge_each = store.acknowledge_each

        def count_calls(requests: Any) -> Any:
            calls.append(len(requests))
            return acknowledge_each(requests)

        self.patch(store, "acknowledge_each", count_calls)
        self.patch(store, "claim_nonce", self.fail)
        self.patch(DIDCommDispatcher, "receive", self.fail)
        replies = list[RequestReply]()
        for id_ in wallet.pushed:
            in_memory.didcomm.acknowledgement_fast_path.take(
                wallet.acknowledgement(id_), MessageOrigin(PEER, wallet.socket), replies.append, self.fail
            )
        in_memory.clock.advance(0)
        self.assertEqual((len(replies), calls), (3, [3]))

    def test_key_agreements_of_a_cycle(self) -> None:
        """
        Forward, push and acknowledgement take four X25519 operations: one to open each message, and a new key and its
        agreement for the push. The agreements of the two static keys are cached.
        """
        wallet = LiveWallet(self, is_fast=True)
        in_memory, operations = wallet.in_memory, list[str]()
        forward = pack_forward(in_memory, wallet.bob.did, wallet.bob.make_payload())
        acknowledgement = wallet.acknowledgement(*wallet.pushed)

        def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                operations.append(name)
                return function(*args)

            return counted

        module: Any = jwe
        self.patch(module, "_load_public", count("open", module._load_public))
        self.patch(module, "compute_x25519", count("agree", module.compute_x25519))
        generate = module.bindings.crypto_scalarmult_base
        self.patch(module.bindings, "crypto_scalarmult_base", count("generate", generate))
        in_memory.receive(forward)
        self.assertEqual(wallet.send(acknowledgement).status, 200)
        expected = ["open", "generate", "agree", "open"]
        # The status that answers the acknowledgement is encrypted as the push is.
        self.assertEqual(operations, [*expected, "generate", "agree"])
