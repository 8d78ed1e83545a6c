"""No request is executed twice (reference section 11, row 24)."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.didcomm.replay_protection import (
    FULL_SHARE,
    LONG_RETENTION,
    LONG_RETENTION_SHARE,
    ORDINARY_SHARE,
    REPLAY_WINDOW,
)
from mediatord.errors import (
    ExpiredMessage,
    InvalidBody,
    MisaddressedMessage,
    RateLimitExceeded,
    ReplayCacheFull,
    ReplayedMessage,
    StoreUnavailable,
)
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.sqlite.memory_store import MemoryStore
from mediatord.wallet.didcomm_messages import anoncrypt, compose_message
from tests.in_memory_identities import PRIVATE, InMemoryIdentity
from tests.in_memory_mediator import CM2, CM3, MP, PING, InMemoryMediator, InMemoryWallet, code_of, pack_forward

HOUR = 3600.0
DAY = 86_400.0
ANOTHER = "did:example:another"


def change(action: str = "add", did: str = ANOTHER) -> dict[str, Any]:
    """The body of a recipient-update."""
    return {"updates": [{"recipient_did": did, "action": action}]}


class ReplayTestCase(SynchronousTestCase):
    in_steps = False

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(
            self,
            in_steps=self.in_steps,
            limits={"ip_per_minute": 10_000, "account_per_minute": 10_000},
            didcomm={"unused_account_ttl": 0},
        )
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def now(self) -> int:
        """The current time, as in messages."""
        return int(self.in_memory.clock.seconds())

    def advance(self, seconds: float) -> None:
        """Advance time and let the store forget old digests."""
        self.in_memory.clock.advance(seconds)
        self.successResultOf(self.in_memory.store.prune_nonces())

    def refusal_of(self, raw: bytes) -> type | None:
        """Why a message is refused."""
        return self.in_memory.receive(raw).fault

    def registered(self) -> list[str]:
        """The recipient DIDs of the account."""
        dids, _ = self.successResultOf(self.in_memory.store.list_recipients(self.bob.did, offset=0, limit=99))
        return dids


class DatedTests(ReplayTestCase):
    """Messages with a creation time."""

    def test_replay_is_never_executed(self) -> None:
        """A recorded message is refused now, within the window and years later."""
        for made in (0, -REPLAY_WINDOW, REPLAY_WINDOW - 1, REPLAY_WINDOW):
            raw = self.bob.pack(f"{CM3}/recipient-update", change("remove"), created_time=self.now() + made)
            self.assertIsNone(self.refusal_of(raw))
            for pause in (0, 1, HOUR / 2, HOUR - 1, HOUR, HOUR, HOUR, DAY, 29 * DAY, 400 * DAY):
                self.advance(pause)
                self.bob.ask(f"{CM3}/recipient-update", change())
                self.assertIn(self.refusal_of(raw), (ReplayedMessage, ExpiredMessage))
                self.assertIn(ANOTHER, self.registered())

    def test_all_requests(self) -> None:
        """Requests that only read are protected too, as they reveal data."""
        for type_, body in (
            (f"{MP}/status-request", {}),
            (f"{MP}/delivery-request", {"limit": 1}),
            (f"{MP}/messages-received", {"message_id_list": []}),
            (f"{CM3}/mediate-request", {}),
            (f"{CM2}/keylist-query", {}),
        ):
            raw = self.bob.pack(type_, body, created_time=self.now())
            self.assertIsNone(self.refusal_of(raw), type_)
            self.assertIs(self.refusal_of(raw), ReplayedMessage, type_)
            self.advance(HOUR + 1)
            self.assertIs(self.refusal_of(raw), ExpiredMessage, type_)

    def test_refuses_messages_older_than_an_hour(self) -> None:
        """A new message created more than an hour ago is refused; at an hour it is not."""
        now = self.now()
        for age, fault in ((REPLAY_WINDOW, None), (REPLAY_WINDOW + 1, ExpiredMessage), (10 * DAY, ExpiredMessage)):
            raw = self.bob.pack(f"{CM3}/recipient-update", change(), created_time=now - age)
            self.assertIs(self.refusal_of(raw), fault)
        events = self.in_memory.events("replay.drop")
        self.assertEqual([event["age_ms"] for event in events], [3_601_000, 864_000_000])

    def test_refusal_is_charged(self) -> None:
        """Replays are charged to the address."""
        in_memory = InMemoryMediator(self, limits={"ip_per_minute": 3})
        bob = InMemoryWallet(in_memory).enrol()
        raw = bob.pack(f"{MP}/status-request", created_time=int(in_memory.clock.seconds()) - 9999)
        there = "198.51.100.77"
        faults = [in_memory.receive(raw, peer=there).fault for _ in range(3)]
        self.assertEqual(faults, [ExpiredMessage] * 3)
        sent = pack_forward(in_memory, bob.did, bob.make_payload())
        self.assertEqual([in_memory.receive(sent, peer=peer).status for peer in (there, "198.51.100.78")], [429, 202])

    def test_anonymous_messages_and_forwards_may_be_old(self) -> None:
        """Messages that change nothing are served whatever their time."""
        made = self.now() - int(5 * DAY)
        ping = compose_message(PING, {"response_requested": False}, to=[self.in_memory.did], created_time=made)
        self.assertIsNone(self.refusal_of(anoncrypt(ping, self.in_memory.document)))
        sent = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload(), created_time=made)
        self.assertEqual([self.refusal_of(sent) for _ in range(3)], [None] * 3)


class PickupRequestTests(ReplayTestCase):
    """Requests that may be served twice without harm."""

    def restart(self) -> None:
        """Start another process on the same store."""
        self.in_memory.didcomm = DIDCommServices(self.in_memory.base, self.in_memory.config)

    def test_no_claim_is_waited_for(self) -> None:
        """Requests are served although their claims are not in the store, and refused when they come again."""
        for type_, claims in (("status-request", 1), ("delivery-request", 1), ("messages-received", 0)):
            raw, made = self.bob.pack(f"{MP}/{type_}", {"limit": 1, "message_id_list": ["x"]}), list[bytes]()

            def claim(key: bytes, *_: float, made: list[bytes] = made) -> Deferred[bool]:
                made.append(key)
                return Deferred()

            store: Any = self.in_memory.store
            self.patch(store, "claim_nonce", claim)
            self.assertEqual([self.refusal_of(raw) for _ in range(2)], [None, ReplayedMessage])
            self.assertEqual(len(made), claims, type_)

    def test_failed_claim_may_be_repeated(self) -> None:
        """A request that could not be claimed for its socket may be sent again."""
        raw, socket = self.bob.pack(f"{MP}/status-request"), self.in_memory.socket()
        with self.in_memory.failing("claim_nonce", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(raw, socket).status, 503)
        self.assertIsNone(self.in_memory.receive(raw, socket).fault)
        self.assertEqual(len(self.in_memory.events("conn.auth")), 1)

    def test_replay_at_other_process(self) -> None:
        """A replay is served by another process, but does not authenticate a socket there."""
        socket = self.in_memory.socket()
        for type_ in ("status-request", "delivery-request", "messages-received"):
            raw = self.bob.pack(f"{MP}/{type_}", {"limit": 1, "message_id_list": ["x"]})
            self.assertIsNone(self.refusal_of(raw))
            self.restart()
            self.assertIsNone(self.refusal_of(raw))
            self.restart()
            fault = None if type_ == "messages-received" else ReplayedMessage
            self.assertIs(self.in_memory.receive(raw, socket).fault, fault)
        self.assertEqual(self.in_memory.events("conn.auth"), [])


class UndatedTests(ReplayTestCase):
    """Messages without a creation time, or dated far in the future."""

    def test_registrations(self) -> None:
        """A change of registrations is remembered for 30 days; a new one with the same content is accepted."""
        for type_ in (f"{CM3}/recipient-update", f"{CM2}/keylist-update"):
            for headers in ({}, {"created_time": self.now() * 1000}, {"created_time": "soon"}):
                raw = self.bob.pack(type_, change("remove"), **headers)
                self.assertIsNone(self.refusal_of(raw))
                for pause in (HOUR, HOUR, 20 * DAY):
                    self.advance(pause)
                    self.bob.ask(f"{CM3}/recipient-update", change())
                    self.assertIs(self.refusal_of(raw), ReplayedMessage)
                    self.assertIn(ANOTHER, self.registered())
                self.assertIsNone(self.refusal_of(self.bob.pack(type_, change("remove"))))
        self.assertGreater(LONG_RETENTION, 20 * DAY + 2 * HOUR)

    def test_other_requests(self) -> None:
        """Requests without lasting changes are remembered for an hour."""
        raw = self.bob.pack(f"{MP}/status-request")
        self.assertIsNone(self.refusal_of(raw))
        self.advance(HOUR - 1)
        self.assertIs(self.refusal_of(raw), ReplayedMessage)
        self.advance(2)
        self.assertIsNone(self.refusal_of(raw))


class AcknowledgementTests(ReplayTestCase):
    """An acknowledgement, whose digest is kept in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload()))
        (self.delivered,) = self.bob.fetch()
        self.raw = self.acknowledgement()

    def acknowledgement(self, **headers: Any) -> bytes:
        """Pack a new acknowledgement of the queued message."""
        body = {"message_id_list": [self.delivered.id]}
        return self.bob.pack(f"{MP}/messages-received", body, return_route="all", **headers)

    def test_executed_once(self) -> None:
        """The second is refused and recorded."""
        self.assertEqual(self.in_memory.receive(self.raw).status, 200)
        for _ in range(3):
            self.assertIs(self.refusal_of(self.raw), ReplayedMessage)
        self.assertEqual(len(self.in_memory.events("replay.drop")), 3)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)

    def test_replay_does_not_charge_account(self) -> None:
        """Replays are charged to the address that sends them."""
        in_memory = InMemoryMediator(self, limits={"account_per_minute": 4})
        bob = InMemoryWallet(in_memory).enrol()
        raw = bob.pack(f"{MP}/messages-received", {"message_id_list": ["01"]}, return_route="all")
        self.assertEqual(in_memory.receive(raw).status, 200)
        for _ in range(5):
            self.assertIs(in_memory.receive(raw).fault, ReplayedMessage)
        self.assertEqual([bob.ask(f"{MP}/status-request").fault for _ in range(3)], [None, None, RateLimitExceeded])

    def test_replay_does_not_authenticate_socket(self) -> None:
        """A replay does not authenticate its socket."""
        self.assertEqual(self.in_memory.receive(self.raw).status, 200)
        socket = self.in_memory.socket()
        self.assertIs(self.in_memory.receive(self.raw, socket).fault, ReplayedMessage)
        self.assertEqual(self.in_memory.receive(self.acknowledgement(), socket).status, 200)
        self.assertEqual(self.in_memory.events("conn.auth"), [])
        self.bob.ask(f"{MP}/status-request", socket=socket)
        self.assertEqual(len(self.in_memory.events("conn.auth")), 1)

    def check_failing(self, *operations: str) -> None:
        """While one of these operations fails the same bytes may be repeated; then they remove the message."""
        for operation in operations:
            with self.in_memory.failing(operation, StoreUnavailable()):
                self.assertEqual(self.in_memory.receive(self.raw).status, 503)
            self.assertEqual(self.bob.count_queued(), 1)
        self.assertEqual(self.in_memory.receive(self.raw).status, 200)
        self.assertEqual(self.bob.count_queued(), 0)

    def test_failed_removal_may_be_repeated(self) -> None:
        """The same bytes may be sent again, and remove the message."""
        self.check_failing("acknowledge_each")

    def test_refused_acknowledgement_is_remembered(self) -> None:
        """It removes nothing, and is known afterwards."""
        expired = self.acknowledgement(expires_time=self.now() - 1)
        misaddressed = self.acknowledgement(to=["did:example:other"])
        malformed = self.bob.pack(f"{MP}/messages-received", {"message_id_list": [1]})
        for raw, fault in ((expired, ExpiredMessage), (misaddressed, MisaddressedMessage), (malformed, InvalidBody)):
            self.assertEqual([self.refusal_of(raw) for _ in range(2)], [fault, ReplayedMessage])
        self.assertIs(self.refusal_of(self.acknowledgement(created_time=self.now() - 3601)), ExpiredMessage)
        self.assertEqual(self.bob.count_queued(), 1)

    def test_no_status_without_reply(self) -> None:
        """Without a reply, no status is read."""
        raw = self.bob.pack(f"{MP}/messages-received", {"message_id_list": [self.delivered.id]}, return_route="none")
        with self.in_memory.failing("get_queue_status", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(raw).status, 202)
        self.assertEqual(self.bob.count_queued(), 0)


class AcknowledgementStepTests(AcknowledgementTests):
    """An acknowledgement on a store that reads the status after messages were removed."""

    in_steps = True

    def test_failed_step_may_be_repeated(self) -> None:
        """The same bytes may be sent again, and remove the message."""
        self.check_failing("acknowledge")

    def test_failed_status_may_be_repeated(self) -> None:
        """Removed messages are recorded, and the same bytes may be sent again."""
        with self.in_memory.failing("get_queue_status", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(self.raw).status, 503)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)
        self.assertEqual([self.refusal_of(self.raw) for _ in range(2)], [None, ReplayedMessage])
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)


NONCE_CAPACITY = 20


class SmallNonceCacheMediator(InMemoryMediator):
    """Mediator whose store remembers :data:`NONCE_CAPACITY` requests."""

    def __init__(self, test: SynchronousTestCase) -> None:
        super().__init__(test, limits={"ip_per_minute": 10_000, "account_per_minute": 10_000})
        for service in (self.didcomm.due, self.didcomm.housekeeping):
            service.stopService()
        self.store = MemoryStore(self.clock, QueueLimits(), max_nonces=NONCE_CAPACITY)
        test.successResultOf(self.store.open())
        self.base.store = self.store
        self.didcomm = DIDCommServices(self.base, self.config)
        self.decentrl = DecentrlServices(self.base, self.config)


class FullTests(SynchronousTestCase):
    """Remembered requests use all or much of the space."""

    def setUp(self) -> None:
        self.in_memory = SmallNonceCacheMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.taken = self.refused = 0

    def fill(self, part: float) -> None:
        """Fill a part of the space."""
        in_memory, part_taken = self.in_memory, int(part * NONCE_CAPACITY)
        for _ in range(NONCE_CAPACITY):
            self.taken += 1
            claimed = in_memory.store.claim_nonce(
                b"%d" % self.taken, in_memory.clock.seconds() + HOUR, part_taken / NONCE_CAPACITY
            )
            claimed.addErrback(lambda failure: failure.trap(ReplayCacheFull))

    def dated(self, type_: str = f"{CM3}/recipient-update", guest: InMemoryWallet | None = None) -> bytes:
        """Pack a request with a creation time."""
        headers = {"created_time": int(self.in_memory.clock.seconds()), "return_route": "all"}
        return (guest or self.bob).pack(type_, change(), **headers)

    def test_half_full(self) -> None:
        """Above half, undated changes are remembered for an hour instead of 30 days."""
        self.fill(LONG_RETENTION_SHARE)
        raw = self.bob.pack(f"{CM3}/recipient-update", change())
        self.assertEqual(self.in_memory.receive(raw).status, 200)
        self.assertIs(self.in_memory.receive(raw).fault, ReplayedMessage)
        self.in_memory.clock.advance(HOUR + 1 + NONCE_GRACE_SECONDS)
        self.successResultOf(self.in_memory.store.prune_nonces())
        self.assertEqual(self.in_memory.receive(raw).status, 200)

    def test_full(self) -> None:
        """Changes are refused rather than others forgotten; remembered ones stay known."""
        first = self.dated()
        self.assertEqual(self.in_memory.receive(first).status, 200)
        self.fill(FULL_SHARE)
        for raw in (self.dated(), self.bob.pack(f"{CM3}/recipient-update", change("remove"))):
            reply = self.in_memory.receive(raw)
            self.assertEqual((reply.status, reply.retry_after), (503, 60))
            self.assertEqual(code_of(reply, self.bob), "e.p.me.res.storage")
            self.assertEqual(self.in_memory.receive(first).fault, ReplayedMessage)
        dids, _ = self.successResultOf(self.in_memory.store.list_recipients(self.bob.did, offset=0, limit=9))
        self.assertIn(ANOTHER, dids)

    def test_messages_are_served_when_full(self) -> None:
        """Forwards, enrolment, pickup and acknowledgements are served nevertheless."""
        self.fill(FULL_SHARE)
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())).status, 202
        )
        (message,) = self.bob.fetch()
        for type_, body in (
            (f"{MP}/status-request", {}),
            (f"{MP}/delivery-request", {"limit": 1}),
            (f"{MP}/messages-received", {"message_id_list": [message.id]}),
            (f"{CM3}/mediate-request", {}),
        ):
            raw = self.bob.pack(type_, body)
            self.assertEqual([self.in_memory.receive(raw).status for _ in range(2)], [200, 200], type_)
        self.assertEqual(self.bob.count_queued(), 0)
        self.assertEqual(InMemoryWallet(self.in_memory).ask(f"{CM3}/mediate-request").status, 200)

    def test_optional_digests_use_a_quarter(self) -> None:
        """Digests that need not be remembered use at most a quarter."""
        known = self.bob.pack(f"{MP}/status-request")
        self.assertEqual(self.in_memory.receive(known).status, 200)
        self.fill(ORDINARY_SHARE)
        for _ in range(NONCE_CAPACITY):
            self.assertEqual(self.bob.ask(f"{MP}/status-request").status, 200)
        self.assertEqual(self.in_memory.receive(known).fault, ReplayedMessage)
        self.assertEqual(self.in_memory.receive(self.dated()).status, 200)

    def test_unverified_digests_use_half(self) -> None:
        """Digests that anybody can produce use at most half."""
        alice = InMemoryIdentity(self.in_memory, "alice")
        alice.register()
        for _ in range(NONCE_CAPACITY):
            forged = json.loads(alice.command({"type": "QUERY_EVENTS"}))
            forged["header"]["timestamp"] += 1
            self.assertEqual(self.in_memory.receive_command(json.dumps(forged).encode()).status, 401)
        self.assertEqual(self.in_memory.receive_command(alice.command({"type": "QUERY_EVENTS"})).status, 200)
        self.assertEqual(self.in_memory.receive(self.dated()).status, 200)

    def test_commands(self) -> None:
        """A command is refused and may be repeated; a forged one is reported as forged."""
        alice, bob = InMemoryIdentity(self.in_memory, "alice"), InMemoryIdentity(self.in_memory, "bob")
        alice.register()
        bob.register()
        bob.save_contract_with(alice)
        self.fill(1)
        command = alice.command("hello", to=bob.did, channel=PRIVATE)
        for _ in range(3):
            reply = self.in_memory.receive_command(command)
            self.assertEqual((reply.status, json.loads(reply.body)["code"]), (503, "UNAVAILABLE"))
        forged = json.loads(alice.command({"type": "QUERY_EVENTS"}))
        forged["header"]["timestamp"] += 1
        self.assertEqual(self.in_memory.receive_command(json.dumps(forged).encode()).status, 401)
        self.in_memory.clock.advance(1)
        self.successResultOf(self.in_memory.store.release_nonce(b"1"))
        self.assertEqual(self.in_memory.receive_command(command).status, 200)
        self.assertEqual(json.loads(self.in_memory.receive_command(command).body)["code"], "DUPLICATE_NONCE")
