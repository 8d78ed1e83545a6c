"""Implicit pickup of DIDComm v1: all that is queued and all that comes, on one ping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.delivery.connections import MAX_DIDS_PER_SOCKET
from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm_v1.push_writers import MAX_BARE, MAX_DELIVERED, MAX_READERS, PAGE_SIZE, PROBE_SECONDS
from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm_v1.message import OLD_PREFIX
from mediatord.store.interfaces.messages import AcknowledgementRequest
from mediatord.store.interfaces.v1_connections import ImplicitPickup
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose
from tests.didcomm_v1.test_pickup import LIVE_DELIVERY_CHANGE, STATUS_REQUEST, PickupTestCase
from tests.in_memory_mediator import PEER, FakeSocket

PING = "trust_ping/1.0/ping"


class ImplicitTestCase(PickupTestCase):
    def begin(self, socket: FakeSocket | None = None, wallet: InMemoryV1Wallet | None = None) -> FakeSocket:
        """Ask for implicit pickup on a socket, which is not answered."""
        socket = socket or self.in_memory.socket()
        reply = (wallet or self.wallet).ask(PING, response_requested=False, socket=socket)
        self.assertEqual((reply.status, reply.body), (202, b""))
        self.in_memory.clock.advance(0)
        return socket

    def take_bare(self, socket: FakeSocket) -> list[bytes]:
        """The envelopes that were pushed since the last call."""
        frames = list(socket.frames)
        socket.frames.clear()
        return frames

    def confirm(self, socket: FakeSocket, number: int | None = None) -> None:
        """Answer the pings behind frames, the oldest of them."""
        socket.confirm(number)
        self.in_memory.clock.advance(0)

    def get_preference(self) -> ImplicitPickup:
        """What is stored of the wallet."""
        getting = self.in_memory.store.v1_connections.get_connection(self.wallet.key.did_key)
        connection = self.successResultOf(getting)
        assert connection is not None
        return connection.implicit_pickup

    def drain(self, socket: FakeSocket, take: Callable[[], list[bytes]]) -> list[bytes]:
        """Take and confirm until nothing more comes; all payloads."""
        found: list[bytes] = []
        while new := take():
            found += new
            self.confirm(socket)
        return found

    def pass_overdue(self) -> None:
        """Let pushes become overdue, and be made pending."""
        self.in_memory.clock.advance(self.in_memory.config.queue.delivered_timeout + 1)
        self.in_memory.clock.advance(1)
        self.in_memory.clock.advance(1)


class BareTests(ImplicitTestCase):
    """A wallet that is known to take bare envelopes."""

    how = "raw"

    def test_backlog_then_live(self) -> None:
        """In order, each once; removed when the wallet has read it."""
        sent = self.forward_many(5)
        socket = self.begin()
        self.assertEqual(self.take_bare(socket), sent)
        self.assertEqual(self.count_stored(), 5)
        self.confirm(socket)
        self.assertEqual(self.count_stored(), 0)
        for _ in range(3):
            sent = self.forward("live")
            self.assertEqual(self.take_bare(socket), sent)
            self.confirm(socket)
        self.assertEqual(self.count_stored(), 0)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 8)

    def count_stored(self) -> int:
        """Number of queued messages, without a request of the wallet."""
        getting = self.in_memory.store.get_queue_status(self.wallet.key.did_key, None)
        return self.successResultOf(getting).message_count

    def test_window(self) -> None:
        """So many are unconfirmed at most, however many are queued; the next ones come as they are confirmed."""
        sent = self.forward_many(MAX_BARE + 50)
        socket = self.begin()
        taken = self.take_bare(socket)
        self.assertLessEqual(len(taken), MAX_BARE)
        self.assertGreater(len(taken), MAX_BARE - PAGE_SIZE)
        self.forward("later")
        self.confirm(socket, 1)
        self.assertLessEqual(len(taken) + len(socket.frames) - 1, MAX_BARE)
        self.confirm(socket)
        taken += self.drain(socket, lambda: self.take_bare(socket))
        self.assertEqual(taken[:-1], sent)
        self.assertEqual(self.count_stored(), 0)

    def test_lost_socket(self) -> None:
        """What the wallet has not read stays, and comes on the next socket."""
        sent = self.forward("a", "b", "c")
        socket = self.begin()
        self.confirm(socket, 1)
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(self.count_stored(), 2)
        again = self.begin()
        self.assertEqual(self.take_bare(again), sent[1:])
        self.confirm(again)
        self.assertEqual(self.count_stored(), 0)

    def test_lost_without_notice(self) -> None:
        """The same, if the loss is not known yet; a late confirmation still counts."""
        sent = self.forward("a", "b", "c")
        socket = self.begin()
        again = self.begin()
        self.assertEqual(self.take_bare(again), sent)
        live = self.forward("live")
        self.assertEqual((self.take_bare(again), len(socket.frames)), (live, 3))
        self.confirm(socket)
        self.assertEqual(self.count_stored(), 1)
        self.confirm(again)
        self.assertEqual(self.count_stored(), 0)

    def test_two_sockets_at_once(self) -> None:
        """The later one gets everything, once."""
        waiting: list[Deferred[None]] = []

        def record(session: Any, account: str) -> Deferred[None]:
            waiting.append(Deferred())
            return waiting[-1]

        self.patch(self.in_memory.didcomm.live, "_record_backlog", record)
        sent = self.forward("a")
        first, second = self.in_memory.socket(), self.in_memory.socket()
        route: dict[str, Any] = {"~transport": {"return_route": "all"}}
        for socket in (first, second):
            ping = self.wallet.pack(compose(PING, response_requested=False, **route))
            Deferred.fromCoroutine(self.in_memory.didcomm.receive(ping, MessageOrigin(PEER, socket)))
        for done in waiting:
            done.callback(None)
        self.in_memory.clock.advance(0)
        sent += self.forward("b")
        self.assertEqual((first.frames, self.take_bare(second)), ([], sent))

    def test_removed_account(self) -> None:
        """None of its sockets gets anything, whatever is unread and in whichever way they subscribed."""
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        bare, live = self.begin(), self.in_memory.socket()
        other.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=live)
        self.forward("a")
        self.forward("a", wallet=other)
        v1 = self.in_memory.didcomm.v1
        assert v1 is not None
        for wallet in (self.wallet, other):
            v1.live.end_all(wallet.key.did_key)
        self.assertEqual((len(self.take_bare(bare)), len(self.take_bare(live))), (1, 1))
        self.assertEqual(self.in_memory.didcomm.live.unacknowledged_pushes, 0)
        self.forward("b")
        self.forward("b", wallet=other)
        self.in_memory.clock.advance(2)
        self.assertEqual((bare.frames, live.frames), ([], []))
        self.begin(bare)
        self.assertEqual(len(bare.frames), 2)

    def test_repeated_ping(self) -> None:
        """It begins nothing again."""
        self.forward("a")
        socket = self.begin()
        self.begin(socket)
        self.assertEqual(len(self.take_bare(socket)), 1)

    def test_flood_of_pings(self) -> None:
        """A hundred pings leave one subscription and no timer behind, and push nothing twice."""
        sent = self.forward("a")
        socket = self.begin()
        timers = len(self.in_memory.clock.getDelayedCalls())
        for _ in range(100):
            self.begin(socket)
        self.assertEqual(len(self.in_memory.clock.getDelayedCalls()), timers)
        self.assertEqual(self.take_bare(socket), sent)

    def test_wallets_on_one_socket(self) -> None:
        """A socket carries so many wallets, and no more; when it is closed, all of them are forgotten."""
        socket, timers = self.in_memory.socket(), len(self.in_memory.clock.getDelayedCalls())
        wallets = [
            InMemoryV1Wallet(self.in_memory, f"wallet {number}", implicit_pickup="raw").enrol()
            for number in range(MAX_DIDS_PER_SOCKET + 2)
        ]
        statuses = [wallet.ask(PING, response_requested=False, socket=socket).status for wallet in wallets]
        self.assertEqual(statuses, MAX_DIDS_PER_SOCKET * [202] + 2 * [200])
        self.assertEqual(
            wallets[-1].answer(PING, response_requested=False, socket=socket).type.name, "problem-report"
        )
        for wallet in (wallets[0], wallets[-1]):
            self.forward("a", wallet=wallet)
        self.assertEqual(len(self.take_bare(socket)), 1)
        self.in_memory.base.connections.closed(socket)
        self.in_memory.clock.advance(5)
        self.assertFalse(self.in_memory.base.connections.is_subscribed(socket, wallets[0].key.did_key))
        self.assertLessEqual(len(self.in_memory.clock.getDelayedCalls()), timers + 1)

    def test_unconfirmed(self) -> None:
        """What is not confirmed in time is pushed once more, a while later; the device is not woken for it."""
        sent = self.forward("a")
        socket = self.begin()
        self.assertEqual(self.take_bare(socket), sent)
        self.pass_overdue()
        self.assertEqual(self.take_bare(socket), sent)
        self.confirm(socket)
        self.assertEqual(self.count_stored(), 0)

    def test_full_socket(self) -> None:
        """What the socket does not take is tried again, in order."""
        sent = self.forward("a", "b")
        socket = self.in_memory.socket(takes=False)
        self.begin(socket)
        sent += self.forward("c")
        self.assertEqual(self.in_memory.events("msg.accept")[-1]["method"], "live")
        socket.takes = True
        self.in_memory.clock.advance(1)
        self.in_memory.clock.advance(0)
        self.assertEqual(self.take_bare(socket), sent)

    def test_store_unavailable(self) -> None:
        """Reading and removing are repeated when the store is back."""
        sent = self.forward("a")
        with self.in_memory.failing("find_arrivals", StoreUnavailable()):
            socket = self.begin()
        self.assertEqual(self.take_bare(socket), [])
        self.in_memory.clock.advance(1)
        self.in_memory.clock.advance(0)
        self.assertEqual(self.take_bare(socket), sent)
        with self.in_memory.failing("acknowledge_each", StoreUnavailable()):
            self.confirm(socket)
        self.assertEqual(self.count_stored(), 1)
        self.pass_overdue()
        self.assertEqual(self.take_bare(socket), sent)
        self.confirm(socket)
        self.assertEqual(self.count_stored(), 0)

    def test_arrivals_while_reading(self) -> None:
        """A message that arrives while the queue is read comes once, in its order."""
        sent = self.forward("a")
        held = self.hold_arrivals()
        socket = self.begin()
        sent += self.forward("b")
        self.assertEqual(self.take_bare(socket), [])
        while held:
            held.pop().callback(None)
        self.in_memory.clock.advance(0)
        self.assertEqual(self.take_bare(socket), sent)

    def hold_arrivals(self) -> list[Deferred[Any]]:
        """Let the store answer what has arrived as it was when it was asked, but only on a callback of these."""
        held: list[Deferred[Any]] = []
        store = self.in_memory.store
        find_arrivals = store.find_arrivals

        def hold(*arguments: Any, **options: Any) -> Deferred[Any]:
            found = find_arrivals(*arguments, **options)
            done: Deferred[Any] = Deferred()
            held.append(done)
            done.addCallback(lambda _: found)
            return done

        self.patch(store, "find_arrivals", hold)
        return held

    def test_removed_while_reading(self) -> None:
        """What the wallet takes while the queue is read hides nothing behind it, however much is left."""
        held = self.hold_arrivals()
        for left in (3, PAGE_SIZE + 3):
            sent = self.forward_many(PAGE_SIZE + left)
            socket = self.begin(self.in_memory.socket())
            held.pop().callback(None)
            self.assertEqual(len(socket.frames), PAGE_SIZE)
            taken = self.take_bare(socket)
            self.confirm(socket)
            self.assertEqual(self.count_stored(), left)
            while held:
                held.pop().callback(None)
                self.in_memory.clock.advance(0)
                taken += self.take_bare(socket)
                self.confirm(socket)
            self.assertEqual((taken, self.count_stored()), (sent, 0))

    def test_expired_messages(self) -> None:
        """Expired ones that are still stored do not hide others."""
        self.forward_many(PAGE_SIZE + 5)
        self.in_memory.didcomm.housekeeping.stopService()
        self.in_memory.clock.advance(self.in_memory.config.queue.ttl + 1)
        sent = self.forward("alive")
        self.assertEqual(self.take_bare(self.begin()), sent)

    def test_over_http(self) -> None:
        """Without effect."""
        self.forward("a")
        reply = self.wallet.ask(PING, response_requested=False)
        self.assertEqual((reply.status, reply.body), (202, b""))
        self.assertEqual(self.in_memory.events("msg.push"), [])

    def test_other_pings(self) -> None:
        """A ping that wants a response, or no mail, begins nothing."""
        self.forward("a")
        socket = self.in_memory.socket()
        self.wallet.ask(PING, socket=socket)
        self.wallet.ask(PING, socket=socket, response_requested=False, route="none")
        self.wallet.ask(PING, socket=socket, response_requested=False, route=None)
        self.in_memory.clock.advance(0)
        self.assertEqual(socket.frames, [])

    def test_readers_are_bounded(self) -> None:
        """However many wallets come at once, few queues are read at the same time, a page of each."""
        wallets = [
            InMemoryV1Wallet(self.in_memory, f"wallet {one}", implicit_pickup="raw").enrol() for one in range(9)
        ]
        for wallet in wallets:
            self.forward(*["x"] * (PAGE_SIZE + 3), wallet=wallet)
        held: list[Deferred[Any]] = []
        sizes: list[int] = []
        store = self.in_memory.store
        find_messages = store.find_messages

        def hold(ids: Any) -> Deferred[Any]:
            sizes.append(len(ids))
            done: Deferred[Any] = Deferred()
            held.append(done)
            return done.addCallback(lambda _: find_messages(ids))

        self.patch(store, "find_messages", hold)
        sockets = [self.begin(wallet=wallet) for wallet in wallets]
        most = 0
        while held:
            most = max(most, len(held))
            held.pop(0).callback(None)
            self.in_memory.clock.advance(0)
        self.assertEqual((most, max(sizes)), (MAX_READERS, PAGE_SIZE))
        self.assertEqual({len(socket.frames) for socket in sockets}, {PAGE_SIZE + 3})

    def test_pickup_ends_bare_envelopes(self) -> None:
        """A wallet that is seen to speak Message Pickup 2.0 gets deliveries from then on."""
        socket = self.begin()
        self.wallet.answer(STATUS_REQUEST)
        self.assertEqual(self.get_preference(), "delivery")
        sent = self.forward("a")
        self.assertEqual(list(self.take_pushes(socket).values()), sent)


class DeliveryTests(ImplicitTestCase):
    """A wallet that has used Message Pickup 2.0."""

    how = "delivery"

    def take_and_acknowledge(self, socket: FakeSocket) -> list[bytes]:
        """Take what was pushed, and acknowledge it; the status counts nothing, so Credo asks for nothing."""
        pushed = self.take_pushes(socket)
        if pushed:
            self.assertEqual(self.acknowledge(*pushed).members["message_count"], 0)
            self.in_memory.clock.advance(0)
        return list(pushed.values())

    def test_backlog_then_live(self) -> None:
        """All of the queue, ten in each `delivery`, without a request for it."""
        sent = self.forward_many(45)
        socket = self.begin()
        self.assertLessEqual(sum(len(self.read(frame)) for frame in socket.frames), MAX_DELIVERED)
        found = self.drain(socket, lambda: self.take_and_acknowledge(socket))
        self.assertEqual(found, sent)
        sent = self.forward("live")
        self.assertEqual(self.take_and_acknowledge(socket), sent)
        self.assertEqual(self.count(), 0)
        self.assertEqual(len(self.in_memory.events("msg.push")), 46)

    def read(self, frame: bytes) -> list[Any]:
        """The attachments of a delivery."""
        attachments: list[Any] = self.wallet.open(frame).members["~attach"]
        return attachments

    def test_unacknowledged(self) -> None:
        """A window of them; they are pushed again when they are overdue, and after a reconnection."""
        sent = self.forward_many(MAX_DELIVERED + 5)
        socket = self.begin()
        self.assertEqual(list(self.take_pushes(socket).values()), sent[:MAX_DELIVERED])
        self.forward("live")
        self.assertEqual(socket.frames, [])
        self.pass_overdue()
        self.assertEqual(list(self.take_pushes(socket).values()), sent[:MAX_DELIVERED])
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(list(self.take_pushes(self.begin()).values()), sent[:MAX_DELIVERED])

    def test_old_prefix(self) -> None:
        """Pushes have the prefix that the wallet uses."""
        self.forward("a")
        socket, transport = self.in_memory.socket(), {"return_route": "all"}
        ping = compose(PING, OLD_PREFIX, response_requested=False, **{"~transport": transport})
        self.in_memory.receive(self.wallet.pack(ping), socket)
        self.in_memory.clock.advance(0)
        self.assertEqual(self.wallet.open(socket.frames[0]).type.prefix, OLD_PREFIX)

    def test_change_of_mode(self) -> None:
        """From live delivery to implicit pickup and back on one socket: no message comes twice."""
        backlog = self.forward("backlog")
        socket = self.go_live()
        live = self.forward("live")
        self.assertEqual(list(self.take_pushes(socket).values()), live)
        self.begin(socket)
        self.assertEqual(self.take_and_acknowledge(socket), backlog)
        self.go_live(socket)
        live = self.forward("again")
        self.assertEqual(list(self.take_pushes(socket).values()), live)
        self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=False, socket=socket)
        self.begin(socket)
        self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=False, socket=socket)
        self.forward("off")
        self.in_memory.clock.advance(10)
        self.assertEqual(socket.frames, [])


class ProbeTests(ImplicitTestCase):
    """A wallet that is not known yet."""

    def probe(self) -> tuple[FakeSocket, list[bytes], dict[str, bytes]]:
        """Queue three messages and connect: one comes as `delivery`, whatever else is queued or comes."""
        sent = self.forward("a", "b", "c")
        socket = self.begin()
        first = self.take_pushes(socket)
        self.assertEqual(list(first.values()), sent[:1])
        sent += self.forward("d")
        self.assertEqual(socket.frames, [])
        return socket, sent, first

    def test_acknowledged(self) -> None:
        """It speaks Message Pickup: the rest comes in deliveries."""
        socket, sent, first = self.probe()
        self.confirm(socket)
        self.assertEqual(self.acknowledge(*first).members["message_count"], 0)
        self.in_memory.clock.advance(0)
        self.assertEqual(list(self.take_pushes(socket).values()), sent[1:])
        self.assertEqual(self.get_preference(), "delivery")
        self.in_memory.clock.advance(2 * PROBE_SECONDS)
        self.assertEqual(socket.frames, [])

    def test_acknowledged_elsewhere(self) -> None:
        """Another worker, which got the acknowledgement, has stored that the wallet sends such; and may say so."""
        for tells in (False, True):
            self.wallet = InMemoryV1Wallet(self.in_memory, f"wallet {tells}").enrol()
            socket, sent, first = self.probe()
            self.confirm(socket)
            account, store = self.wallet.key.did_key, self.in_memory.store
            self.successResultOf(store.v1_connections.change_connection(account, implicit_pickup="delivery"))
            self.successResultOf(store.acknowledge_each([AcknowledgementRequest(account, list(first), False)]))
            if tells:
                for id_ in first:
                    self.in_memory.didcomm.live.resolve_push(id_)
            else:
                self.in_memory.clock.advance(PROBE_SECONDS)
            self.in_memory.clock.advance(0)
            self.assertEqual(list(self.take_pushes(socket).values()), sent[1:])
            self.assertEqual(self.get_preference(), "delivery")

    def test_evicted(self) -> None:
        """Nothing is concluded from a probe that was removed otherwise."""
        socket, sent, first = self.probe()
        for id_ in first:
            self.in_memory.didcomm.live.resolve_push(id_)
        self.assertEqual((socket.frames, self.get_preference()), ([], "unknown"))

    def assert_bare(self, socket: FakeSocket, sent: list[bytes]) -> None:
        """All come as bare envelopes, the first once more; that is remembered."""
        self.assertEqual(self.take_bare(socket), sent)
        self.assertEqual(self.get_preference(), "raw")
        self.confirm(socket)
        getting = self.in_memory.store.get_queue_status(self.wallet.key.did_key, None)
        self.assertEqual(self.successResultOf(getting).message_count, 0)

    def test_ignored(self) -> None:
        """It has read the delivery, but not acknowledged it."""
        socket, sent, _ = self.probe()
        self.confirm(socket)
        self.in_memory.clock.advance(PROBE_SECONDS - 0.1)
        self.assertEqual(socket.frames, [])
        self.in_memory.clock.advance(0.1)
        self.in_memory.clock.advance(0)
        self.assert_bare(socket, sent)

    def test_refused(self) -> None:
        """A problem report says so at once."""
        socket, sent, _ = self.probe()
        self.wallet.ask("notification/1.0/problem-report", description={"code": "unsupported"}, socket=socket)
        self.in_memory.clock.advance(0)
        self.assert_bare(socket, sent)

    def test_refused_by_thread(self) -> None:
        """A report counts if it names the delivery, as thread or parent, but not if it names another message."""
        for name in ("thid", "pthid"):
            wallet = InMemoryV1Wallet(self.in_memory, name).enrol()
            sent = self.forward("a", wallet=wallet)
            socket = self.begin(wallet=wallet)
            delivery = wallet.open(socket.frames.pop())
            for thread in ("another", delivery.id):
                self.in_memory.clock.advance(0)
                self.assertEqual(socket.frames, [])
                report: dict[str, Any] = {"description": {"code": "unsupported"}, "~thread": {name: thread}}
                wallet.ask("notification/1.0/problem-report", socket=socket, **report)
            self.in_memory.clock.advance(0)
            self.assertEqual(self.take_bare(socket), sent)

    def test_other_problem_report(self) -> None:
        """One that comes when nothing is being found out changes nothing."""
        socket = self.begin()
        self.wallet.ask("notification/1.0/problem-report", description={"code": "other"}, socket=socket)
        self.forward("a")
        self.assertEqual(len(self.take_pushes(socket)), 1)

    def test_late_acknowledgement(self) -> None:
        """It corrects what is remembered."""
        socket, sent, first = self.probe()
        self.confirm(socket)
        self.in_memory.clock.advance(PROBE_SECONDS)
        self.in_memory.clock.advance(0)
        self.assertEqual(self.take_bare(socket), sent)
        self.acknowledge(*first)
        self.assertEqual(self.get_preference(), "delivery")
        more = self.forward("more")
        self.assertEqual(list(self.take_pushes(socket).values()), more)

    def test_not_read(self) -> None:
        """Nothing is concluded from a socket that does not answer, nor from one that is lost."""
        socket, sent, _ = self.probe()
        self.in_memory.clock.advance(2 * PROBE_SECONDS)
        self.assertEqual((socket.frames, self.get_preference()), ([], "unknown"))
        self.confirm(socket)
        self.in_memory.base.connections.closed(socket)
        self.in_memory.clock.advance(2 * PROBE_SECONDS)
        self.assertEqual(self.get_preference(), "unknown")
        self.assertEqual(list(self.take_pushes(self.begin()).values()), sent[:1])

    def test_overdue(self) -> None:
        """A delivery that the wallet has not read is sent again; it may be read then."""
        socket, sent, _ = self.probe()
        socket.receipts.clear()
        self.pass_overdue()
        self.assertEqual(list(self.take_pushes(socket).values()), sent[:1])
        self.confirm(socket)
        self.in_memory.clock.advance(PROBE_SECONDS)
        self.in_memory.clock.advance(0)
        self.assert_bare(socket, sent)

    def test_removed(self) -> None:
        """Nothing is concluded from a message that is gone; the next one is sent likewise."""
        socket, sent, first = self.probe()
        self.confirm(socket)
        (id_,) = first
        self.successResultOf(self.in_memory.store.acknowledge(self.wallet.key.did_key, [id_]))
        self.in_memory.didcomm.live.resolve_push(id_)
        self.in_memory.clock.advance(0)
        self.assertEqual(list(self.take_pushes(socket).values()), sent[1:2])
        self.in_memory.clock.advance(2 * PROBE_SECONDS)
        self.assertEqual((socket.frames, self.get_preference()), ([], "unknown"))

    def test_late_and_new_receipts(self) -> None:
        """Those of a delivery and of its repetition are one sign that the wallet reads, not two."""
        socket, sent, first = self.probe()
        self.pass_overdue()
        self.assertEqual(self.take_pushes(socket), first)
        self.confirm(socket, 1)
        self.confirm(socket, 1)
        self.acknowledge(*first)
        self.in_memory.clock.advance(2 * PROBE_SECONDS)
        self.assertEqual(list(self.take_pushes(socket).values()), sent[1:])
        self.assertEqual(self.get_preference(), "delivery")

    def test_first_message_is_live(self) -> None:
        """The same, if the queue was empty."""
        socket = self.begin()
        sent = self.forward("a")
        self.assertEqual(list(self.take_pushes(socket).values()), sent)
        self.confirm(socket)
        self.in_memory.clock.advance(PROBE_SECONDS)
        self.in_memory.clock.advance(0)
        self.assert_bare(socket, sent)

    def test_preference_cannot_be_stored(self) -> None:
        """It is found out again next time."""
        socket, sent, _ = self.probe()
        self.confirm(socket)
        with self.in_memory.failing("change_connection", StoreUnavailable()):
            self.in_memory.clock.advance(PROBE_SECONDS)
            self.in_memory.clock.advance(0)
        self.assertEqual((self.take_bare(socket), self.get_preference()), (sent, "unknown"))
