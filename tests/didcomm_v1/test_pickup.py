"""Message Pickup 2.0 and 1.0 of DIDComm v1, and live delivery."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery import connections
from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm_v1 import pickup
from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.keys import encode_base58_key
from mediatord.protocol.didcomm_v1.message import OLD_PREFIX, V1Message
from mediatord.store.interfaces.v1_connections import ImplicitPickup
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, make_key, pack_forward
from tests.in_memory_mediator import NOW, PEER, FakeSocket, InMemoryMediator

STATUS_REQUEST = "messagepickup/2.0/status-request"
DELIVERY_REQUEST = "messagepickup/2.0/delivery-request"
MESSAGES_RECEIVED = "messagepickup/2.0/messages-received"
LIVE_DELIVERY_CHANGE = "messagepickup/2.0/live-delivery-change"
BATCH_PICKUP = "messagepickup/1.0/batch-pickup"


def read_delivery(message: V1Message) -> dict[str, bytes]:
    """Ids and payloads of a `delivery`, in order."""
    assert (message.type.family, message.type.name) == ("messagepickup", "delivery"), message.type
    return {one["@id"]: encoding.decode_base64url(one["data"]["base64"]) for one in message.members["~attach"]}


class PickupTestCase(SynchronousTestCase):
    """A mediator, and a wallet with an account and a recipient key."""

    how: ImplicitPickup = "unknown"

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.wallet = InMemoryV1Wallet(self.in_memory, implicit_pickup=self.how).enrol()

    def forward(self, *texts: str, wallet: InMemoryV1Wallet | None = None) -> list[bytes]:
        """Forward messages to a wallet; their payloads."""
        wallet = wallet or self.wallet
        payloads = [wallet.make_payload(text) for text in texts]
        for payload in payloads:
            forward = pack_forward(self.in_memory, wallet.recipient_base58, payload)
            self.assertEqual(self.in_memory.receive(forward).status, 202)
            self.in_memory.clock.advance(0.001)  # those of one moment have no order
        return payloads

    def forward_many(self, number: int) -> list[bytes]:
        """Forward numbered messages."""
        return self.forward(*[f"message {one}" for one in range(number)])

    def acknowledge(self, *ids: str, **options: Any) -> V1Message:
        """Acknowledge messages; the status."""
        return self.wallet.answer(MESSAGES_RECEIVED, message_id_list=list(ids), **options)

    def count(self) -> int:
        """Number of queued messages."""
        count: int = self.wallet.answer(STATUS_REQUEST).members["message_count"]
        return count

    def go_live(self, socket: FakeSocket | None = None) -> FakeSocket:
        """Switch live delivery on."""
        socket = socket or self.in_memory.socket()
        status = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=socket)
        self.assertIs(status.members["live_delivery"], True)
        return socket

    def take_pushes(self, socket: FakeSocket) -> dict[str, bytes]:
        """Ids and payloads of the messages that were pushed since the last call, each of them once."""
        found: dict[str, bytes] = {}
        for frame in socket.frames:
            message = self.wallet.open(frame)
            self.assertNotIn("~thread", message.members)
            pushed = read_delivery(message)
            self.assertLessEqual(len(pushed), 10)
            self.assertFalse(found.keys() & pushed)
            found |= pushed
        socket.frames.clear()
        return found


class StatusTests(PickupTestCase):
    def test_empty_queue(self) -> None:
        """Nothing is there."""
        status = self.wallet.answer(STATUS_REQUEST)
        self.assertEqual((status.type.name, status.type.major), ("status", 2))
        self.assertEqual(status.members["message_count"], 0)
        self.assertIs(status.members["live_delivery"], False)
        self.assertNotIn("oldest_received_time", status.members)

    def test_members(self) -> None:
        """Numbers, and times as text."""
        (payload,) = self.forward("a")
        self.in_memory.clock.advance(60)
        status = self.wallet.answer(STATUS_REQUEST)
        wanted = {
            "message_count": 1,
            "total_bytes": len(payload),
            "live_delivery": False,
            "longest_waited_seconds": 60,
            "oldest_received_time": "2027-01-15T08:00:00Z",
            "newest_received_time": "2027-01-15T08:00:00Z",
        }
        self.assertEqual(NOW, 1_800_000_000)
        self.assertEqual({name: status.members.get(name) for name in wanted}, wanted)

    def test_old_prefix(self) -> None:
        """The answer has the prefix of the request."""
        transport = {"return_route": "all"}
        raw = self.wallet.pack(compose(STATUS_REQUEST, OLD_PREFIX, **{"~transport": transport}))
        self.assertEqual(self.wallet.open(self.in_memory.receive(raw).body).type.prefix, OLD_PREFIX)

    def test_recipient_key(self) -> None:
        """A request may be restricted to a recipient key, in any spelling, which the answer repeats."""
        self.forward("a")
        for named in (self.wallet.recipient.did_key, self.wallet.recipient_base58):
            status = self.wallet.answer(STATUS_REQUEST, recipient_key=named)
            self.assertEqual((status.members["message_count"], status.members["recipient_key"]), (1, named))
            self.in_memory.clock.advance(pickup.DELIVERY_SECONDS)
            delivery = self.wallet.answer(DELIVERY_REQUEST, recipient_key=named, limit=1)
            self.assertEqual((len(read_delivery(delivery)), delivery.members["recipient_key"]), (1, named))

    def test_foreign_and_malformed_recipient_keys(self) -> None:
        """Those of others look like unknown ones."""
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        for named in (other.recipient.did_key, encode_base58_key(make_key("nobody").did_key), "x", 5, ["a"]):
            report = self.wallet.answer(STATUS_REQUEST, recipient_key=named)
            self.assertEqual(report.type.name, "problem-report", named)


class DeliveryTests(PickupTestCase):
    def test_oldest_first(self) -> None:
        """At most `limit`, removed by acknowledgement only; the payload is what the sender wrote."""
        payloads = self.forward("a", "b", "c")
        for _ in range(2):
            self.in_memory.clock.advance(pickup.DELIVERY_SECONDS)
            delivery = self.wallet.answer(DELIVERY_REQUEST, limit=2)
            delivered = read_delivery(delivery)
            self.assertEqual(list(delivered.values()), payloads[:2])
        status = self.acknowledge(*delivered)
        self.assertEqual((status.type.name, status.members["message_count"]), ("status", 1))
        self.assertEqual(list(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=9)).values()), payloads[2:])

    def test_partly_acknowledged(self) -> None:
        """What is not acknowledged is handed out again at once, if a part of its delivery was; else it waits."""
        payloads = self.forward("a", "b", "c")
        first = read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=2))
        second = read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=2))
        self.assertEqual([*first.values(), *second.values()], payloads)
        self.assertEqual(self.wallet.answer(DELIVERY_REQUEST, limit=9).type.name, "status")
        self.acknowledge(next(iter(first)))
        again = self.wallet.answer(DELIVERY_REQUEST, limit=9)
        self.assertEqual(list(read_delivery(again).values()), payloads[1:2])

    def test_nothing_there(self) -> None:
        """A status."""
        self.assertEqual(self.wallet.answer(DELIVERY_REQUEST, limit=10).members["message_count"], 0)

    def test_limits(self) -> None:
        """A limit is a positive integer; it is bounded by the configuration."""
        for limit in (None, 0, -1, True, "10", 1.5):
            self.assertEqual(self.wallet.answer(DELIVERY_REQUEST, limit=limit).type.name, "problem-report", limit)
        in_memory = InMemoryMediator(self, didcomm={"delivery_limit": 2})
        self.in_memory, self.wallet = in_memory, InMemoryV1Wallet(in_memory).enrol()
        self.forward("a", "b", "c")
        self.assertEqual(len(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=1000))), 2)

    def test_delivery_is_bounded_in_bytes(self) -> None:
        """Large messages come in several deliveries."""
        self.forward(*["x" * 200_000] * 4)
        self.assertEqual(len(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=10))), 2)

    def test_acknowledgement_is_always_answered(self) -> None:
        """Also of nothing, of unknown ids, and of those of others, which stay."""
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        self.forward("a", wallet=other)
        (id_,) = read_delivery(other.answer(DELIVERY_REQUEST, limit=1))
        for ids in ((), ("unknown",), (id_,)):
            self.assertEqual(self.acknowledge(*ids).members["message_count"], 0)
        self.assertEqual(other.answer(STATUS_REQUEST).members["message_count"], 1)

    def test_malformed_acknowledgements(self) -> None:
        """Ids are a list of strings."""
        for ids in (None, "a", [1], ["a"] * 10_001):
            report = self.wallet.answer(MESSAGES_RECEIVED, message_id_list=ids)
            self.assertEqual(report.type.name, "problem-report")

    def test_records(self) -> None:
        """Events as of a message of v2: the life of a message does not depend on how it is fetched."""
        self.forward("a")
        self.acknowledge(*read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=1)))
        (pushed,), (acknowledged,) = self.in_memory.events("msg.push"), self.in_memory.events("msg.ack")
        self.assertEqual((pushed["proto"], pushed["path"]), ("didcomm", "pickup"))
        self.assertEqual((acknowledged["proto"], acknowledged["path"]), ("didcomm", "pickup"))

    def test_store_unavailable(self) -> None:
        """A request that was not served may be repeated; what was delivered stays."""
        self.forward("a")
        with self.in_memory.failing("fetch_messages", StoreUnavailable()):
            self.assertEqual(self.wallet.ask(DELIVERY_REQUEST, limit=1).status, 503)
        self.assertEqual(len(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=1))), 1)

    def test_preference_cannot_be_stored(self) -> None:
        """That the wallet speaks Message Pickup is a hint only."""
        with self.in_memory.failing("put_connection", StoreUnavailable()):
            self.assertEqual(self.count(), 0)


class CredoTests(PickupTestCase):
    """The sequences of Credo (reference section 11): its loop ends, and no message comes twice."""

    def run_loop(self, status: V1Message) -> list[bytes]:
        """What Credo does with a status, until that counts nothing; the payloads."""
        payloads: list[bytes] = []
        for _ in range(100):
            if not (count := status.members["message_count"]):
                return payloads
            answer = self.wallet.answer(DELIVERY_REQUEST, limit=min(count, 10))
            if answer.type.name == "status":
                status = answer
                continue
            delivered = read_delivery(answer)
            payloads += delivered.values()
            status = self.acknowledge(*delivered)
        raise AssertionError("the loop does not end")

    def test_polling(self) -> None:
        """Each poll fetches all that is queued, in order, ten at a time."""
        for number in (0, 1, 23):
            sent = self.forward_many(number)
            self.assertEqual(self.run_loop(self.wallet.answer(STATUS_REQUEST)), sent)

    def test_overlapping_polls(self) -> None:
        """Another poll, before the last one has acknowledged anything, gets other messages, or ends at once."""
        sent = self.forward_many(15)
        first = read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=10))
        self.assertEqual(self.run_loop(self.wallet.answer(STATUS_REQUEST)), sent[10:])
        self.assertEqual(self.run_loop(self.wallet.answer(STATUS_REQUEST)), [])
        self.assertEqual(list(first.values()), sent[:10])
        self.assertEqual(self.run_loop(self.acknowledge(*first)), [])
        self.assertEqual(self.count(), 0)

    def test_lost_delivery(self) -> None:
        """What was handed out and never acknowledged comes again after a while, or once the wallet is live."""
        for comes_back in (
            lambda: self.in_memory.clock.advance(pickup.DELIVERY_SECONDS),
            lambda: self.in_memory.clock.advance(-3600),
            self.go_live,
        ):
            sent = self.forward("a", "b")
            self.assertEqual(len(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=10))), 2)
            self.assertEqual(self.run_loop(self.wallet.answer(STATUS_REQUEST)), [])
            comes_back()
            self.assertEqual(self.run_loop(self.wallet.answer(STATUS_REQUEST)), sent)

    def test_remembered_deliveries_are_bounded(self) -> None:
        """The oldest are handed out again; those of other accounts are apart."""
        self.patch(pickup, "MAX_DELIVERED_IDS", 2)
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        self.forward("theirs", wallet=other)
        sent = self.forward("a", "b")
        (theirs,) = read_delivery(other.answer(DELIVERY_REQUEST, limit=10))
        self.acknowledge(theirs)
        self.assertEqual(other.answer(DELIVERY_REQUEST, limit=10).type.name, "status")
        self.assertEqual(len(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=10))), 2)
        self.assertEqual(list(read_delivery(other.answer(DELIVERY_REQUEST, limit=10))), [theirs])
        self.assertEqual(list(read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=10)).values()), sent[:1])

    def test_live(self) -> None:
        """Status by HTTP, live delivery by WebSocket, acknowledgements by HTTP."""
        sent = self.forward("a", "b", "c")
        self.assertEqual(self.run_loop(self.wallet.answer(STATUS_REQUEST)), sent)
        socket = self.in_memory.socket()
        status = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=socket)
        self.assertEqual((status.members["message_count"], status.members["live_delivery"]), (0, True))
        for text in "de":
            payloads = self.forward(text)
            pushed = self.take_pushes(socket)
            self.assertEqual(list(pushed.values()), payloads)
            self.assertEqual(self.run_loop(self.acknowledge(*pushed)), [])
        self.assertEqual(self.count(), 0)

    def test_burst(self) -> None:
        """Several messages are pushed before the first is acknowledged: the status leaves the others out."""
        socket = self.go_live()
        sent = self.forward_many(25)
        pushed = self.take_pushes(socket)
        self.assertEqual(list(pushed.values()), sent)
        for id_ in pushed:
            self.assertEqual(self.run_loop(self.acknowledge(id_)), [])
        self.assertEqual(self.count(), 0)

    def test_live_with_backlog(self) -> None:
        """Live delivery flushes nothing; Credo fetches what its status counts, while more is pushed."""
        backlog = self.forward_many(12)
        socket = self.in_memory.socket()
        status = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=socket)
        self.assertEqual((status.members["message_count"], socket.frames), (12, []))
        sent = self.forward("live")
        pushed = self.take_pushes(socket)
        self.assertEqual(list(pushed.values()), sent)
        self.assertEqual(self.run_loop(status), backlog)
        self.assertEqual(self.run_loop(self.acknowledge(*pushed)), [])

    def test_lost_socket(self) -> None:
        """
        What was pushed to a socket that is lost without notice is fetched after the next start.

        Its loss is not known yet when the wallet comes back. From then on the new socket gets everything.
        """
        lost = self.go_live()
        sent = self.forward_many(13)
        self.assertEqual(len(lost.frames), 13)
        fetched = self.run_loop(self.wallet.answer(STATUS_REQUEST))
        new = self.in_memory.socket()
        status = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=new)
        fetched += self.run_loop(status)
        self.assertEqual(sorted(fetched), sorted(sent))
        lost.frames.clear()
        self.forward("live")
        self.assertEqual((len(new.frames), lost.frames), (1, []))


class LiveTests(PickupTestCase):
    def test_http(self) -> None:
        """A problem report: there is no socket."""
        report = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=True)
        self.assertEqual((report.type.family, report.type.name), ("notification", "problem-report"))
        off = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=False)
        self.assertIs(off.members["live_delivery"], False)

    def test_switched_off(self) -> None:
        """Nothing more is pushed."""
        socket = self.go_live()
        status = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=False, socket=socket)
        self.assertIs(status.members["live_delivery"], False)
        self.forward("a")
        self.assertEqual((socket.frames, self.count()), ([], 1))

    def test_malformed(self) -> None:
        """`live_delivery` is a boolean."""
        report = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery="maybe", socket=self.in_memory.socket())
        self.assertEqual(report.type.name, "problem-report")

    def test_delivery_together(self) -> None:
        """Messages that are stored together are pushed ten at a time."""
        socket = self.go_live()
        live, store = self.in_memory.didcomm.live, self.in_memory.store
        sent = self.forward_many(25)
        self.take_pushes(socket)
        account = self.wallet.key.did_key
        messages = self.successResultOf(store.fetch_messages(account, None, limit=100, max_bytes=1_000_000))
        live.push(messages)
        self.assertEqual([len(read_delivery(self.wallet.open(frame))) for frame in socket.frames], [10, 10, 5])
        self.assertEqual(
            [one for frame in socket.frames for one in read_delivery(self.wallet.open(frame)).values()], sent
        )

    def test_full_socket(self) -> None:
        """What the socket does not take stays queued."""
        socket = self.go_live()
        socket.takes = False
        self.forward("a")
        self.assertEqual(self.in_memory.events("msg.accept")[0]["method"], "queue")
        self.assertEqual(self.count(), 1)

    def test_closed_socket(self) -> None:
        """What was pushed to it counts again."""
        socket = self.go_live()
        self.forward("a", "b")
        first, _ = self.take_pushes(socket)
        self.assertEqual(self.acknowledge(first).members["message_count"], 0)
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(self.acknowledge(first).members["message_count"], 1)

    def test_new_socket_takes_over(self) -> None:
        """What the former socket of the wallet has not acknowledged is no longer expected from it."""
        old = self.go_live()
        self.forward("a", "b")
        self.assertEqual(self.acknowledge().members["message_count"], 0)
        new = self.go_live()
        self.assertEqual(self.in_memory.didcomm.live.unacknowledged_pushes, 0)
        self.assertEqual(self.acknowledge().members["message_count"], 2)
        self.forward("c")
        self.assertEqual((len(old.frames), len(new.frames)), (2, 1))

    def test_overdue(self) -> None:
        """A push that is not acknowledged in time counts again."""
        socket = self.go_live()
        self.forward("a", "b")
        first, _ = self.take_pushes(socket)
        self.in_memory.clock.advance(self.in_memory.config.queue.delivered_timeout + 1)
        self.in_memory.didcomm.live.requeue_overdue_pushes()
        self.assertEqual(self.acknowledge(first).members["message_count"], 1)

    def test_expired_push(self) -> None:
        """It hides no other message that waits, which the socket has not taken."""
        socket = self.go_live()
        timing = {"expires_time": int(self.in_memory.clock.seconds()) + 5}
        forward = pack_forward(
            self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload("brief"), **{"~timing": timing}
        )
        self.assertEqual(self.in_memory.receive(forward).status, 202)
        self.assertEqual(len(self.take_pushes(socket)), 1)
        self.in_memory.clock.advance(6)
        self.assertEqual(self.acknowledge().members["message_count"], 0)
        socket.takes = False
        self.forward("a")
        self.assertEqual(self.acknowledge().members["message_count"], 1)

    def test_many_pushes(self) -> None:
        """The status counts what waits behind more pushes than it looks through, once those are acknowledged."""
        socket = self.go_live()
        self.forward_many(3)
        first, *others = self.take_pushes(socket)
        # By another process, which does not tell.
        store = self.in_memory.store
        self.successResultOf(store.acknowledge(self.wallet.key.did_key, [first]))
        socket.takes = False
        self.forward("a")
        self.patch(pickup, "_MAX_SKIPPED", 0)
        self.patch(pickup, "MAX_DELIVERY", 1)
        counts = [self.acknowledge(id_).members["message_count"] for id_ in others]
        self.assertEqual(counts, [0, 1])

    def test_two_sockets_at_once(self) -> None:
        """The later one is subscribed, and the other one is told that it is not."""
        waiting: list[Deferred[None]] = []

        def record(session: Any, account: str) -> Deferred[None]:
            waiting.append(Deferred())
            return waiting[-1]

        self.patch(self.in_memory.didcomm.live, "_record_backlog", record)
        first, second = self.in_memory.socket(), self.in_memory.socket()
        replies, route = [], dict[str, Any]({"~transport": {"return_route": "all"}})
        for socket in (first, second):
            change = self.wallet.pack(compose(LIVE_DELIVERY_CHANGE, live_delivery=True, **route))
            replies.append(
                Deferred.fromCoroutine(self.in_memory.didcomm.receive(change, MessageOrigin(PEER, socket)))
            )
        for done in waiting:
            done.callback(None)
        statuses = [self.wallet.open(self.successResultOf(reply).body) for reply in replies]
        self.assertEqual([status.members["live_delivery"] for status in statuses], [False, True])
        self.forward("a")
        self.assertEqual((len(first.frames), len(second.frames)), (0, 1))

    def test_refused_socket_replaces_none(self) -> None:
        """One that has too many subscriptions leaves those of others."""
        old, full = self.go_live(), self.in_memory.socket()
        self.patch(connections, "MAX_DIDS_PER_SOCKET", 0)
        report = self.wallet.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=full)
        self.assertEqual(report.type.name, "problem-report")
        self.forward("a")
        self.assertEqual((len(old.frames), len(full.frames)), (1, 0))

    def test_several_wallets_on_one_socket(self) -> None:
        """Each gets its own, and the status of one leaves out nothing of the other."""
        socket, other = self.go_live(), InMemoryV1Wallet(self.in_memory, "other").enrol()
        other.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=socket)
        self.forward("a")
        (mine,) = self.take_pushes(socket)
        self.forward("b", wallet=other)
        (frame,) = socket.frames
        self.assertEqual(len(read_delivery(other.open(frame))), 1)
        self.assertEqual(self.acknowledge(mine, socket=socket).members["message_count"], 0)
        self.assertEqual(other.answer(STATUS_REQUEST).members["message_count"], 1)

    def test_raw_pushes_are_of_v2_only(self) -> None:
        """The setting for pushes of v2 does not apply: Credo could not acknowledge them."""
        self.in_memory = InMemoryMediator(self, didcomm={"live_push": "raw"})
        self.wallet = InMemoryV1Wallet(self.in_memory).enrol()
        socket = self.go_live()
        self.forward("a")
        self.assertEqual(len(self.take_pushes(socket)), 1)


class BatchTests(PickupTestCase):
    """Message Pickup 1.0."""

    def batch(self, **members: Any) -> list[bytes]:
        """Fetch a batch; its payloads."""
        message = self.wallet.answer(BATCH_PICKUP, **members)
        self.assertEqual((message.type.name, message.type.major), ("batch", 1))
        attachments = message.members["messages~attach"]
        self.assertTrue(all(one["@id"] == one["id"] for one in attachments))
        return [encoding.dumps(one["message"]) for one in attachments]

    def test_each_message_once(self) -> None:
        """A batch is removed by the next request."""
        sent = self.forward("a", "b", "c")
        self.assertEqual(self.batch(batch_size=2), sent[:2])
        self.assertEqual(self.count(), 3)
        self.assertEqual(self.batch(batch_size=2), sent[2:])
        self.assertEqual(self.count(), 1)
        self.assertEqual(self.batch(batch_size=2), [])
        self.assertEqual(self.count(), 0)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 3)

    def test_late_request(self) -> None:
        """The answer may have been lost, so the batch is handed out again, but not a third time."""
        first, second = self.forward("a"), self.forward("b")
        self.assertEqual(self.batch(batch_size=1), first)
        late = self.in_memory.config.queue.delivered_timeout + 1
        self.in_memory.clock.advance(late)
        self.assertEqual(self.batch(batch_size=1), first)
        self.in_memory.clock.advance(late)
        self.assertEqual(self.batch(batch_size=1), second)

    def test_new_messages_in_repeated_batch(self) -> None:
        """They have the same second chance as others."""
        first = self.forward("a")
        self.assertEqual(self.batch(), first)
        late = self.in_memory.config.queue.delivered_timeout + 1
        self.in_memory.clock.advance(late)
        new = self.forward("b", "c")
        self.assertEqual(self.batch(), first + new)
        self.in_memory.clock.advance(late)
        self.assertEqual(self.batch(), new)
        self.in_memory.clock.advance(late)
        self.assertEqual(self.batch(), [])

    def test_sizes(self) -> None:
        """Bounded by the configuration, which is the default."""
        for size in (0, -1, "2", True, None):
            self.assertEqual(self.wallet.answer(BATCH_PICKUP, batch_size=size).type.name, "problem-report", size)
        in_memory = InMemoryMediator(self, didcomm={"delivery_limit": 2})
        self.in_memory, self.wallet = in_memory, InMemoryV1Wallet(in_memory).enrol()
        sent = self.forward("a", "b", "c")
        self.assertEqual(self.batch(), sent[:2])
        self.assertEqual(self.batch(batch_size=50), sent[2:])

    def test_not_fetched(self) -> None:
        """A batch that could not be read removes nothing more."""
        sent = self.forward("a", "b")
        with self.in_memory.failing("fetch_messages", StoreUnavailable()):
            self.assertEqual(self.wallet.ask(BATCH_PICKUP, batch_size=1).status, 503)
        self.assertEqual(self.batch(batch_size=2), sent)

    def test_remembered_batches_are_bounded(self) -> None:
        """A forgotten batch is handed out again; the number of messages counts."""
        self.patch(pickup, "MAX_BATCH_IDS", 3)
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        sent = self.forward("a", "b")
        self.forward("c", "d", wallet=other)
        self.assertEqual(self.batch(batch_size=2), sent)
        other.answer(BATCH_PICKUP, batch_size=1)
        self.assertEqual(self.batch(batch_size=1), [])
        self.forward("e", "f", wallet=other)
        sent = self.forward("g")
        self.assertEqual(self.batch(batch_size=1), sent)
        other.answer(BATCH_PICKUP, batch_size=3)
        self.assertEqual(self.batch(batch_size=1), sent)

    def test_status_and_list(self) -> None:
        """They change nothing, and show nothing of others."""
        other = InMemoryV1Wallet(self.in_memory, "other").enrol()
        (payload,), _ = self.forward("a"), self.forward("b", wallet=other)
        status = self.wallet.answer("messagepickup/1.0/status-request")
        self.assertEqual((status.type.major, status.members["message_count"]), (1, 1))
        (mine,) = read_delivery(self.wallet.answer(DELIVERY_REQUEST, limit=1))
        (theirs,) = read_delivery(other.answer(DELIVERY_REQUEST, limit=1))
        for _ in range(2):
            listed = self.wallet.answer("messagepickup/1.0/list-pickup", message_ids=[theirs, mine, "unknown"])
            self.assertEqual(listed.type.name, "list-response")
            (attachment,) = listed.members["messages~attach"]
            self.assertEqual((attachment["id"], encoding.dumps(attachment["message"])), (mine, payload))
        for ids in (None, "a", [1], ["a"] * 10_001):
            report = self.wallet.answer("messagepickup/1.0/list-pickup", message_ids=ids)
            self.assertEqual(report.type.name, "problem-report")

    def test_list_is_bounded_in_bytes(self) -> None:
        """As a delivery is."""
        self.forward(*["x" * 200_000] * 4)
        account = self.wallet.key.did_key
        reading = self.in_memory.store.fetch_messages(account, None, limit=4, max_bytes=1_000_000)
        ids = [message.id for message in self.successResultOf(reading)]
        listed = self.wallet.answer("messagepickup/1.0/list-pickup", message_ids=ids)
        self.assertEqual([one["id"] for one in listed.members["messages~attach"]], ids[:2])

    def test_noop(self) -> None:
        """Nothing is answered."""
        reply = self.wallet.ask("messagepickup/1.0/noop")
        self.assertEqual((reply.status, reply.body), (202, b""))
