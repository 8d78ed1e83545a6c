"""The main flow of UC-021: enrol, forward, push or pick up, acknowledge."""

import hashlib
import json

from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.pickup import MAX_PUSH_BYTES
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.wallet.didcomm_client import read_delivery
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, compose_message
from tests.in_memory_mediator import CM2, CM3, MP, NOW, InMemoryMediator, InMemoryWallet, code_of, pack_forward
from tests.wallet_identities import generate_identity


class OfflineTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def forward(self, *payloads: bytes, **headers: object) -> int:
        return self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, *payloads, **headers)).status

    def test_message_stays_until_acknowledged(self) -> None:
        """Stored, counted, delivered as often as requested, removed once acknowledged (UC-021 steps 8, 7)."""
        message = self.bob.make_payload()
        reply = self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, message))
        self.assertEqual((reply.status, reply.body), (202, b""))
        for _ in range(2):
            (delivered,) = self.bob.fetch()
            self.assertEqual((delivered.payload, delivered.form), (message, "json"))
        status = self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.assertEqual(status.body["message_count"], 0)
        again = self.bob.answer(f"{MP}/delivery-request", {"limit": 10})
        self.assertTrue(again.message.type.uri.endswith("/status"))
        self.assertEqual(
            [
                self.in_memory.counter(f"mediator_messages_{name}_total")
                for name in ("forwarded", "stored", "delivered")
            ],
            [1, 1, 1],
        )

    def test_delivered_message_decrypts(self) -> None:
        """The recipient decrypts exactly what the sender wrote."""
        self.forward(self.bob.make_payload("secret words"))
        self.assertEqual(self.bob.open(self.bob.fetch()[0].payload).text, "secret words")

    def test_attachments_are_separate_messages_in_order(self) -> None:
        """Each attachment is queued as its own message (reference 4.4)."""
        messages = [self.bob.make_payload(text) for text in "abc"]
        self.assertEqual(self.forward(*messages), 202)
        self.assertEqual([delivered.payload for delivered in self.bob.fetch()], messages)
        self.assertEqual(self.in_memory.counter("mediator_messages_forwarded_total"), 3)

    def test_one_invalid_attachment_stores_none(self) -> None:
        """All or nothing (reference 4.4)."""
        good = {"data": {"json": json.loads(self.bob.make_payload())}}
        attachments = [good, {"data": {"json": {"plain": 1}}}]
        message = compose_message(FORWARD, {"next": self.bob.did}, attachments=attachments)
        reply = self.in_memory.receive(anoncrypt(message, self.in_memory.document))
        self.assertEqual((reply.status, code_of(reply)), (400, "e.p.msg.bad-attachment"))
        self.assertEqual(self.bob.count_queued(), 0)

    def test_base64_is_preserved(self) -> None:
        """Decision D10."""
        message = self.bob.make_payload()
        self.forward(message, form="base64")
        (delivered,) = self.bob.fetch()
        self.assertEqual((delivered.payload, delivered.form), (message, "base64"))

    def test_oldest_messages_first(self) -> None:
        """Oldest first, at most `limit`; an acknowledgement removes only what it names (reference 6.1)."""
        for text in "abcd":
            self.forward(self.bob.make_payload(text))
        delivered = self.bob.fetch(3)
        self.assertEqual([self.bob.open(one.payload).text for one in delivered], ["a", "b", "c"])
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered[1].id]})
        texts = [self.bob.open(one.payload).text for one in self.bob.fetch(9)]
        self.assertEqual(texts, ["a", "c", "d"])

    def test_acknowledges_by_digest(self) -> None:
        """The SHA-256 of a payload also names it (reference 6.1)."""
        message = self.bob.make_payload()
        self.forward(message)
        status = self.bob.answer(
            f"{MP}/messages-received", {"message_id_list": [hashlib.sha256(message).hexdigest()]}
        )
        self.assertEqual(status.body["message_count"], 0)

    def test_ignores_acknowledgement_of_foreign_messages(self) -> None:
        """Ids of other accounts' messages are ignored (reference 6.1)."""
        self.forward(self.bob.make_payload())
        (delivered,) = self.bob.fetch()
        eve = InMemoryWallet(self.in_memory).enrol()
        eve.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.assertEqual(self.bob.count_queued(), 1)

    def test_messages_expire(self) -> None:
        """After the TTL a message is gone, for readers and for housekeeping (UC-021 AF-5)."""
        self.forward(self.bob.make_payload())
        self.in_memory.clock.advance(72 * 3600 - 1)
        self.assertEqual(self.bob.count_queued(), 1)
        self.in_memory.clock.advance(1)
        self.assertEqual(self.bob.count_queued(), 0)
        self.in_memory.clock.pump([1] * 20)
        self.assertEqual(self.in_memory.counter("mediator_messages_expired_total"), 1)
        self.assertEqual([event["reason"] for event in self.in_memory.events("msg.expire")], ["ttl"])

    def test_expires_time_shortens_ttl(self) -> None:
        """A forward may ask for less than the TTL (reference 4.5)."""
        self.forward(self.bob.make_payload(), expires_time=int(NOW) + 100)
        self.in_memory.clock.advance(99)
        self.assertEqual(self.bob.count_queued(), 1)
        self.in_memory.clock.advance(2)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_status_has_ages_and_sizes(self) -> None:
        """Whole seconds, and bytes of payload (reference 6)."""
        message = self.bob.make_payload()
        self.forward(message)
        self.in_memory.clock.advance(10)
        self.forward(message)
        self.in_memory.clock.advance(5)
        body = self.bob.answer(f"{MP}/status-request", {"recipient_did": self.bob.did}).body
        self.assertEqual(body["message_count"], 2)
        self.assertEqual(body["longest_waited_seconds"], 15)
        self.assertEqual(body["oldest_received_time"], int(NOW))
        self.assertEqual(body["newest_received_time"], int(NOW) + 10)
        self.assertEqual(body["total_bytes"], 2 * len(message))
        self.assertEqual(body["recipient_did"], self.bob.did)

    def test_accepts_authenticated_forwards(self) -> None:
        """Decision D12: both encryptions, with or without `to`."""
        alice = InMemoryWallet(self.in_memory)
        body = {"next": self.bob.did}
        attachments = [{"data": {"json": json.loads(self.bob.make_payload())}}]
        reply = alice.ask(FORWARD, body, attachments=attachments, to=None)
        self.assertEqual((reply.status, reply.body), (202, b""))

    def test_ignores_please_ack(self) -> None:
        """Mediators must not answer it (reference 4.5)."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload(), please_ack=[""], id="f")
        self.assertEqual(self.in_memory.receive(raw).body, b"")

    def test_repeated_forward_is_stored_twice(self) -> None:
        """A sender that lost its 202 sends the same bytes again (section 11, row 24)."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())
        self.assertEqual([self.in_memory.receive(raw).status for _ in range(2)], [202, 202])
        self.assertEqual(self.bob.count_queued(), 2)


class QueueLimitTests(SynchronousTestCase):
    def test_full_queue_evicts_oldest_message(self) -> None:
        """FIFO eviction; the sender still gets its 202 (UC-021 AF-4)."""
        in_memory = InMemoryMediator(self, queue={"max_messages": 3})
        bob = InMemoryWallet(in_memory).enrol()
        for text in "abcd":
            self.assertEqual(in_memory.receive(pack_forward(in_memory, bob.did, bob.make_payload(text))).status, 202)
        texts = [bob.open(delivered.payload).text for delivered in bob.fetch()]
        self.assertEqual(texts, ["b", "c", "d"])
        self.assertEqual(in_memory.counter("mediator_messages_evicted_total"), 1)
        self.assertEqual([event["reason"] for event in in_memory.events("msg.evict")], ["fifo_count"])


class LiveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def forward(self, text: str = "hello", **headers: object) -> None:
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload(text), **headers)
        self.assertEqual(self.in_memory.receive(raw).status, 202)

    def read_push(self, frame: bytes) -> tuple[str, str]:
        """Id and text of a pushed delivery."""
        message = self.bob.open(frame).message
        self.assertEqual((message.thid, message.body), (None, {}))
        (delivered,) = read_delivery(message)
        return delivered.id, self.bob.open(delivered.payload).text

    def test_live_socket_gets_messages_at_once(self) -> None:
        """Pushed as a delivery, kept until acknowledged (UC-021 step 7, decision D11)."""
        socket = self.bob.go_live()
        self.forward()
        id_, text = self.read_push(socket.frames[-1])
        self.assertEqual(text, "hello")
        self.assertEqual(self.bob.count_queued(), 1)
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [id_]})
        self.assertEqual(self.bob.count_queued(), 0)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 0)
        self.assertEqual(self.in_memory.counter("mediator_messages_delivered_total"), 1)
        self.assertEqual(self.in_memory.events("msg.ack")[0]["path"], "live")

    def test_acknowledgement_is_recorded_before_other_workers_know(self) -> None:
        """They are asked to forget the push, and not waited for."""
        self.forward()
        (delivered,) = self.bob.fetch()
        recorded: list[object] = []
        self.in_memory.didcomm.live._resolve_elsewhere = lambda account, id_: recorded.append(
            (account, id_, self.in_memory.counter("mediator_messages_delivered_total"))
        )
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.assertEqual(recorded, [(self.bob.did, delivered.id, 1)])

    def test_socket_without_live_mode_gets_nothing(self) -> None:
        """While live mode is off, messages are only queued (reference 6.3)."""
        socket = self.in_memory.socket()
        self.bob.answer(f"{MP}/status-request", socket=socket)
        self.forward()
        self.assertEqual(socket.frames, [])

    def test_backlog_is_not_pushed(self) -> None:
        """Enabling live mode pushes no older messages (reference 6.3)."""
        self.forward()
        socket = self.bob.go_live()
        self.assertEqual(socket.frames, [])

    def test_all_live_sockets_get_message_and_one_acknowledges(self) -> None:
        """Several devices (reference 6.3)."""
        sockets = [self.bob.go_live(), self.bob.go_live()]
        self.forward()
        (first, _), (second, _) = (self.read_push(socket.frames[-1]) for socket in sockets)
        self.assertEqual(first, second)
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [first]}, socket=sockets[1])
        self.assertEqual(self.bob.count_queued(), 0)

    def forward_several(self, *texts: str) -> list[list[str]]:
        """Forward several messages at once; the texts in each delivery that is pushed."""
        socket = self.bob.go_live()
        raw = pack_forward(self.in_memory, self.bob.did, *map(self.bob.make_payload, texts))
        self.assertEqual(self.in_memory.receive(raw).status, 202)
        deliveries = [read_delivery(self.bob.open(frame).message) for frame in socket.frames]
        return [[self.bob.open(one.payload).text for one in delivery] for delivery in deliveries]

    def test_delivery_of_several_messages(self) -> None:
        """What is stored together is pushed together, within the limit of a delivery."""
        self.assertEqual(self.forward_several("a", "b", "c"), [["a", "b", "c"]])

    def test_number_of_messages_in_a_push(self) -> None:
        """`didcomm.delivery_limit` holds for pushes too."""
        self.in_memory = InMemoryMediator(self, didcomm={"delivery_limit": 2})
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.assertEqual(self.forward_several("a", "b", "c"), [["a", "b"], ["c"]])

    def test_bytes_of_a_push(self) -> None:
        """Payloads that are pushed together are bounded in bytes; a larger one is pushed by itself."""
        half = "x" * (MAX_PUSH_BYTES // 2)  # a third more when encrypted
        large = "y" * MAX_PUSH_BYTES
        self.assertEqual(self.forward_several("a", half, "b", large, "c"), [["a", half, "b"], [large], ["c"]])

    def test_socket_that_takes_no_more_of_a_batch(self) -> None:
        """Each message of a refused delivery stays queued; another socket gets them all the same."""
        refusing, socket = self.bob.go_live(), self.bob.go_live()
        refusing.takes = False
        self.assertEqual(self.forward_several("a", "b"), [["a", "b"]])
        self.assertEqual((len(refusing.frames), len(socket.frames)), (0, 1))
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 0)
        self.assertEqual(self.bob.count_queued(), 2)

    def test_live_mode_is_per_socket(self) -> None:
        """Disabling it on one socket leaves the other live (reference 6.3)."""
        first, second = self.bob.go_live(), self.bob.go_live()
        self.bob.answer(f"{MP}/live-delivery-change", {"live_delivery": False}, socket=first)
        self.forward()
        self.assertEqual((len(first.frames), len(second.frames)), (0, 1))

    def test_two_wallets_on_one_socket(self) -> None:
        """Each gets its own messages, encrypted to it."""
        carol = InMemoryWallet(self.in_memory).enrol()
        socket = self.bob.go_live()
        carol.answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
        self.forward("for bob")
        self.in_memory.receive(pack_forward(self.in_memory, carol.did, carol.make_payload("for carol")))
        self.assertEqual(self.read_push(socket.frames[0])[1], "for bob")
        (delivered,) = read_delivery(carol.open(socket.frames[1]).message)
        self.assertEqual(carol.open(delivered.payload).text, "for carol")

    def test_closed_socket_makes_messages_pending(self) -> None:
        """Pending again, counted as stored, and delivered on reconnect (UC-021 AF-6)."""
        socket = self.bob.go_live()
        self.forward()
        self.in_memory.base.connections.closed(socket)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)
        self.assertEqual(len(self.bob.fetch()), 1)

    def test_unacknowledged_push_is_pending_after_timeout(self) -> None:
        """`queue.delivered_timeout` (reference 6.3)."""
        self.bob.go_live()
        self.forward()
        self.in_memory.clock.pump([1] * 58)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 0)
        self.in_memory.clock.pump([1] * 4)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)

    def test_second_push_counts_beside_first(self) -> None:
        """Two reads of the store may overlap; the message is pending again when its last socket is gone."""
        first, second = self.bob.go_live(), self.bob.go_live()
        second.takes = False
        self.forward()
        first.takes, second.takes = False, True
        (message,) = self.successResultOf(
            self.in_memory.store.fetch_messages(self.bob.did, None, limit=1, max_bytes=1)
        )
        self.assertIn(message.id, self.in_memory.didcomm.live.push([message]))
        self.in_memory.base.connections.closed(second)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 0)
        self.in_memory.base.connections.closed(first)
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)

    def test_stalled_socket_leaves_message_queued(self) -> None:
        """A push never blocks (reference 6.3)."""
        socket = self.bob.go_live()
        socket.takes = False
        self.forward()
        self.assertEqual(self.in_memory.counter("mediator_messages_stored_total"), 1)
        self.assertEqual(self.bob.count_queued(), 1)

    def test_delayed_message_is_invisible_until_due(self) -> None:
        """To status, delivery and live push (reference 4.5)."""
        socket = self.bob.go_live()
        self.forward(delay_milli=5000)
        self.in_memory.clock.advance(4.9)
        self.assertEqual((self.bob.count_queued(), socket.frames), (0, []))
        self.in_memory.clock.advance(0.2)
        self.assertEqual(self.read_push(socket.frames[-1])[1], "hello")
        self.assertEqual(self.bob.count_queued(), 1)

    def test_delays_end_in_their_own_order(self) -> None:
        """The longer delay continues after the shorter one."""
        socket = self.bob.go_live()
        self.forward("late", delay_milli=9000)
        self.forward("soon", delay_milli=2000)
        self.in_memory.clock.advance(3)
        self.assertEqual([self.read_push(frame)[1] for frame in socket.frames], ["soon"])
        self.in_memory.clock.advance(7)
        self.assertEqual([self.read_push(frame)[1] for frame in socket.frames], ["soon", "late"])

    def test_delays_are_capped_and_negative_ones_random(self) -> None:
        """At most max_delay; a negative one is random within its size (reference 4.5)."""
        in_memory = InMemoryMediator(self, didcomm={"max_delay": "10s"})
        bob = InMemoryWallet(in_memory).enrol()
        for milli in (10**9, -(10**9), -1000):
            in_memory.receive(pack_forward(in_memory, bob.did, bob.make_payload(), delay_milli=milli))
        in_memory.clock.advance(1.01)
        self.assertGreaterEqual(bob.count_queued(), 1)
        in_memory.clock.advance(9)
        self.assertEqual(bob.count_queued(), 3)

    def test_raw_push(self) -> None:
        """`live_push: raw` pushes the inner envelope itself (reference 6.3)."""
        in_memory = InMemoryMediator(self, didcomm={"live_push": "raw"})
        bob = InMemoryWallet(in_memory).enrol()
        socket = bob.go_live()
        messages = [bob.make_payload(), bob.make_payload()]
        in_memory.receive(pack_forward(in_memory, bob.did, *messages))
        self.assertEqual(socket.frames, messages)

    def test_live_by_default(self) -> None:
        """`live_default_on` serves wallets that never enable it (reference 6.3)."""
        in_memory = InMemoryMediator(self, didcomm={"live_default_on": True})
        bob = InMemoryWallet(in_memory).enrol()
        socket = in_memory.socket()
        bob.answer(f"{MP}/status-request", socket=socket)
        in_memory.receive(pack_forward(in_memory, bob.did, bob.make_payload()))
        self.assertEqual(len(socket.frames), 1)


class CoordinationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)

    def test_grants_in_both_versions(self) -> None:
        """Decision D13; a second request gets the same grant."""
        bob = InMemoryWallet(self.in_memory)
        for _ in range(2):
            self.assertEqual(bob.answer(f"{CM2}/mediate-request").body, {"routing_did": self.in_memory.did})
            self.assertEqual(bob.answer(f"{CM3}/mediate-request").body, {"routing_did": [self.in_memory.did]})

    def test_grant_alone_registers_nothing(self) -> None:
        """Only `add` does (reference 5.3)."""
        bob = InMemoryWallet(self.in_memory)
        bob.answer(f"{CM3}/mediate-request")
        reply = self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.make_payload()))
        self.assertEqual((reply.status, code_of(reply)), (400, "e.p.me.res.not-found"))

    def test_all_results_of_update(self) -> None:
        """One result per entry, in order (reference 5.3)."""
        bob, eve = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory).enrol()
        key = generate_identity("did:key").did
        cases = [
            (key, "add", "success"),
            (key, "add", "no_change"),
            (f"{key}#key-1", "add", "success"),
            (eve.did, "add", "client_error"),
            ("not a did", "add", "client_error"),
            ("", "add", "client_error"),
            (self.in_memory.did, "add", "client_error"),
            (self.in_memory.base.identity.now.web_did, "add", "client_error"),
            (key, "remove", "success"),
            (key, "remove", "no_change"),
            (eve.did, "remove", "no_change"),
            (key, "explode", "client_error"),
        ]
        for version, name in ((CM3, "recipient-update"), (CM2, "keylist-update")):
            updates = [{"recipient_did": did, "action": action} for did, action, _ in cases]
            answer = bob.answer(f"{version}/{name}", {"updates": updates})
            self.assertEqual(answer.message.type.uri, f"{version}/{name}-response")
            expected = [{"recipient_did": did, "action": action, "result": result} for did, action, result in cases]
            self.assertEqual(answer.body, {"updated": expected})
            bob.answer(f"{version}/{name}", {"updates": [{"recipient_did": f"{key}#key-1", "action": "remove"}]})

    def test_query_pages(self) -> None:
        """In order of registration (reference 5.3)."""
        dids = [f"did:example:{number}" for number in range(5)]
        bob = InMemoryWallet(self.in_memory).enrol(*dids)
        everything = bob.answer(f"{CM3}/recipient-query").body
        self.assertEqual(everything, {"dids": [{"recipient_did": did} for did in dids]})
        page = bob.answer(f"{CM2}/keylist-query", {"paginate": {"limit": 2, "offset": 1}}).body
        self.assertEqual(
            page,
            {
                "keys": [{"recipient_did": did} for did in dids[1:3]],
                "pagination": {"count": 2, "offset": 1, "remaining": 2},
            },
        )

    def test_removal_keeps_queued_messages(self) -> None:
        """Further forwards are refused, queued messages stay for the account (reference 5.3)."""
        bob = InMemoryWallet(self.in_memory).enrol()
        raw = pack_forward(self.in_memory, bob.did, bob.make_payload())
        self.in_memory.receive(raw)
        bob.answer(f"{CM3}/recipient-update", {"updates": [{"recipient_did": bob.did, "action": "remove"}]})
        self.assertEqual(self.in_memory.receive(raw).status, 400)
        self.assertEqual(bob.count_queued(), 1)

    def test_allow_list_denies_others(self) -> None:
        """Section 11, row 27."""
        bob = WalletIdentity.generate()
        in_memory = InMemoryMediator(self, didcomm={"registration": "allow-list", "allow": [bob.did]})
        self.assertTrue(
            InMemoryWallet(in_memory, bob).answer(f"{CM3}/mediate-request").message.type.uri.endswith("mediate-grant")
        )
        for version in (CM2, CM3):
            denied = InMemoryWallet(in_memory).answer(f"{version}/mediate-request")
            self.assertEqual((denied.message.type.uri, denied.body), (f"{version}/mediate-deny", {}))

    def test_limits_recipients(self) -> None:
        """`didcomm.max_recipients`: one more is a client_error."""
        in_memory = InMemoryMediator(self, didcomm={"max_recipients": 2})
        bob = InMemoryWallet(in_memory).enrol("did:example:1", "did:example:2")
        updates = [{"recipient_did": "did:example:3", "action": "add"}]
        updated = bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual(updated[0]["result"], "client_error")

    def test_returns_did_web_if_addressed_by_it(self) -> None:
        """The grant has the form of the DID that the client used (reference 5.3)."""
        identity = self.in_memory.base.identity.now
        self.in_memory.document = parse_did_document(identity.web_did, identity.web_document)
        self.in_memory.did = identity.web_did
        bob = InMemoryWallet(self.in_memory, generate_identity(curve="P-384"))
        bob.documents.add(self.in_memory.document)
        grant = bob.answer(f"{CM3}/mediate-request")
        self.assertEqual(grant.body, {"routing_did": [identity.web_did]})
        self.assertEqual(grant.sender, identity.web_did)

    def test_peer_4_long_and_short_forms_are_equal(self) -> None:
        """A long form in `next` finds a short form's registration, and vice versa (reference 8.4)."""
        bob = InMemoryWallet(self.in_memory, generate_identity("did:peer:4", endpoint=self.in_memory.did)).enrol()
        short = bob.did.rpartition(":")[0]
        for next_ in (bob.did, short, f"{bob.did}#key-1"):
            self.assertEqual(
                self.in_memory.receive(pack_forward(self.in_memory, next_, bob.make_payload())).status, 202
            )
        self.assertEqual(bob.count_queued(), 3)
        narrowed = bob.answer(f"{MP}/status-request", {"recipient_did": short}).body
        self.assertEqual((narrowed["message_count"], narrowed["recipient_did"]), (3, short))
