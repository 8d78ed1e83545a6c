"""No request is carried out twice, whenever it comes again (reference section 11, row 24)."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.didcomm.dispatcher import (
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


class ReplayCase(SynchronousTestCase):
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
        """As a message says it."""
        return int(self.in_memory.clock.seconds())

    def later(self, seconds: float) -> None:
        """Let time pass, and the store forget what it may."""
        self.in_memory.clock.advance(seconds)
        self.successResultOf(self.in_memory.store.prune_nonces())

    def fault_of(self, raw: bytes) -> type | None:
        """Why a message is refused."""
        return self.in_memory.receive(raw).fault

    def registered(self) -> list[str]:
        """The recipient DIDs of the account."""
        dids, _ = self.successResultOf(self.in_memory.store.list_recipients(self.bob.did, offset=0, limit=99))
        return dids


class DatedTests(ReplayCase):
    """Messages that say when they were made."""

    def test_never_again(self) -> None:
        """Somebody who recorded it may send it again now, within the window or years later: it is not done."""
        for made in (0, -REPLAY_WINDOW, REPLAY_WINDOW - 1, REPLAY_WINDOW):
            raw = self.bob.pack(f"{CM3}/recipient-update", change("remove"), created_time=self.now() + made)
            self.assertIsNone(self.fault_of(raw))
            for pause in (0, 1, HOUR / 2, HOUR - 1, HOUR, HOUR, HOUR, DAY, 29 * DAY, 400 * DAY):
                self.later(pause)
                self.bob.ask(f"{CM3}/recipient-update", change())
                self.assertIn(self.fault_of(raw), (ReplayedMessage, ExpiredMessage))
                self.assertIn(ANOTHER, self.registered())

    def test_every_request(self) -> None:
        """Not only what changes registrations: nothing that shows anything to whoever repeats it, either."""
        for type_, body in (
            (f"{MP}/status-request", {}),
            (f"{MP}/delivery-request", {"limit": 1}),
            (f"{MP}/messages-received", {"message_id_list": []}),
            (f"{CM3}/mediate-request", {}),
            (f"{CM2}/keylist-query", {}),
        ):
            raw = self.bob.pack(type_, body, created_time=self.now())
            self.assertIsNone(self.fault_of(raw), type_)
            self.assertIs(self.fault_of(raw), ReplayedMessage, type_)
            self.later(HOUR + 1)
            self.assertIs(self.fault_of(raw), ExpiredMessage, type_)

    def test_too_old(self) -> None:
        """What was made more than an hour ago is refused although it never came; at an hour it is not."""
        now = self.now()
        for age, fault in ((REPLAY_WINDOW, None), (REPLAY_WINDOW + 1, ExpiredMessage), (10 * DAY, ExpiredMessage)):
            raw = self.bob.pack(f"{CM3}/recipient-update", change(), created_time=now - age)
            self.assertIs(self.fault_of(raw), fault)
        events = self.in_memory.events("replay.drop")
        self.assertEqual([event["age_ms"] for event in events], [3_601_000, 864_000_000])

    def test_refusal_is_charged(self) -> None:
        """Whoever repeats old messages pays for it by address."""
        in_memory = InMemoryMediator(self, limits={"ip_per_minute": 3})
        bob = InMemoryWallet(in_memory).enrol()
        raw = bob.pack(f"{MP}/status-request", created_time=int(in_memory.clock.seconds()) - 9999)
        there = "198.51.100.77"
        faults = [in_memory.receive(raw, peer=there).fault for _ in range(3)]
        self.assertEqual(faults, [ExpiredMessage] * 3)
        sent = pack_forward(in_memory, bob.did, bob.letter())
        self.assertEqual([in_memory.receive(sent, peer=peer).status for peer in (there, "198.51.100.78")], [429, 202])

    def test_anonymous_and_forwards(self) -> None:
        """Messages that change nothing and are of nobody are served whenever they were made."""
        made = self.now() - int(5 * DAY)
        ping = compose_message(PING, {"response_requested": False}, to=[self.in_memory.did], created_time=made)
        self.assertIsNone(self.fault_of(anoncrypt(ping, self.in_memory.document)))
        sent = pack_forward(self.in_memory, self.bob.did, self.bob.letter(), created_time=made)
        self.assertEqual([self.fault_of(sent) for _ in range(3)], [None] * 3)


class UndatedTests(ReplayCase):
    """Messages that do not say when they were made, or are dated so far ahead that nobody can go by it."""

    def test_registrations(self) -> None:
        """A change of registrations is remembered for 30 days; the same again, made anew, is fine."""
        for type_ in (f"{CM3}/recipient-update", f"{CM2}/keylist-update"):
            for headers in ({}, {"created_time": self.now() * 1000}, {"created_time": "soon"}):
                raw = self.bob.pack(type_, change("remove"), **headers)
                self.assertIsNone(self.fault_of(raw))
                for pause in (HOUR, HOUR, 20 * DAY):
                    self.later(pause)
                    self.bob.ask(f"{CM3}/recipient-update", change())
                    self.assertIs(self.fault_of(raw), ReplayedMessage)
                    self.assertIn(ANOTHER, self.registered())
                self.assertIsNone(self.fault_of(self.bob.pack(type_, change("remove"))))
        self.assertGreater(LONG_RETENTION, 20 * DAY + 2 * HOUR)

    def test_others(self) -> None:
        """What changes nothing that stays is remembered for an hour."""
        raw = self.bob.pack(f"{MP}/status-request")
        self.assertIsNone(self.fault_of(raw))
        self.later(HOUR - 1)
        self.assertIs(self.fault_of(raw), ReplayedMessage)
        self.later(2)
        self.assertIsNone(self.fault_of(raw))


class AcknowledgementTests(ReplayCase):
    """An acknowledgement, whose digest is claimed in the operation that removes the messages."""

    def setUp(self) -> None:
        super().setUp()
        self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.letter()))
        (self.delivered,) = self.bob.fetch()
        self.raw = self.acknowledgement()

    def acknowledgement(self, **headers: Any) -> bytes:
        """A new one of the message that waits."""
        body = {"message_id_list": [self.delivered.id]}
        return self.bob.pack(f"{MP}/messages-received", body, return_route="all", **headers)

    def test_once(self) -> None:
        """The second is refused and recorded."""
        self.assertEqual(self.in_memory.receive(self.raw).status, 200)
        for _ in range(3):
            self.assertIs(self.fault_of(self.raw), ReplayedMessage)
        self.assertEqual(len(self.in_memory.events("replay.drop")), 3)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)

    def test_replay_costs_the_account_nothing(self) -> None:
        """Replays are charged to the peer that sends them."""
        in_memory = InMemoryMediator(self, limits={"account_per_minute": 4})
        bob = InMemoryWallet(in_memory).enrol()
        raw = bob.pack(f"{MP}/messages-received", {"message_id_list": ["01"]}, return_route="all")
        self.assertEqual(in_memory.receive(raw).status, 200)
        for _ in range(5):
            self.assertIs(in_memory.receive(raw).fault, ReplayedMessage)
        self.assertEqual([bob.ask(f"{MP}/status-request").fault for _ in range(3)], [None, None, RateLimitExceeded])

    def test_replay_on_a_socket_that_is_not_authenticated(self) -> None:
        """It does not authenticate the socket."""
        self.assertEqual(self.in_memory.receive(self.raw).status, 200)
        socket = self.in_memory.socket()
        self.assertIs(self.in_memory.receive(self.raw, socket).fault, ReplayedMessage)
        self.assertEqual(self.in_memory.events("conn.auth"), [])
        self.assertEqual(self.in_memory.receive(self.acknowledgement(), socket).status, 200)
        self.assertEqual(len(self.in_memory.events("conn.auth")), 1)

    def check_failing(self, *operations: str) -> None:
        """While one of these fails the same bytes may come again; then they remove the message."""
        for operation in operations:
            with self.in_memory.failing(operation, StoreUnavailable()):
                self.assertEqual(self.in_memory.receive(self.raw).status, 503)
            self.assertEqual(self.bob.waiting(), 1)
        self.assertEqual(self.in_memory.receive(self.raw).status, 200)
        self.assertEqual(self.bob.waiting(), 0)

    def test_removal_fails(self) -> None:
        """The same bytes may come again, and remove the message."""
        self.check_failing("acknowledge_once")

    def test_refused(self) -> None:
        """One that is refused removes nothing, and is known afterwards."""
        expired = self.acknowledgement(expires_time=self.now() - 1)
        misaddressed = self.acknowledgement(to=["did:example:other"])
        malformed = self.bob.pack(f"{MP}/messages-received", {"message_id_list": [1]})
        for raw, fault in ((expired, ExpiredMessage), (misaddressed, MisaddressedMessage), (malformed, InvalidBody)):
            self.assertEqual([self.fault_of(raw) for _ in range(2)], [fault, ReplayedMessage])
        self.assertIs(self.fault_of(self.acknowledgement(created_time=self.now() - 3601)), ExpiredMessage)
        self.assertEqual(self.bob.waiting(), 1)

    def test_no_reply(self) -> None:
        """Without a reply, no status is read."""
        raw = self.bob.pack(f"{MP}/messages-received", {"message_id_list": [self.delivered.id]}, return_route="none")
        with self.in_memory.failing("get_queue_status", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(raw).status, 202)
        self.assertEqual(self.bob.waiting(), 0)


class AcknowledgementStepTests(AcknowledgementTests):
    """An acknowledgement, whose digest is claimed before the messages are removed, and their status read after it."""

    in_steps = True

    def test_step_fails(self) -> None:
        """The same bytes may come again, and remove the message."""
        self.check_failing("acknowledge", "claim_nonce")

    def test_status_fails(self) -> None:
        """What was removed is recorded, and the same bytes may come again."""
        with self.in_memory.failing("get_queue_status", StoreUnavailable()):
            self.assertEqual(self.in_memory.receive(self.raw).status, 503)
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)
        self.assertEqual([self.fault_of(self.raw) for _ in range(2)], [None, ReplayedMessage])
        self.assertEqual(len(self.in_memory.events("msg.ack")), 1)


ROOM = 20


class SmallNonceCacheMediator(InMemoryMediator):
    """A house whose store remembers :data:`ROOM` requests."""

    def __init__(self, test: SynchronousTestCase) -> None:
        super().__init__(test, limits={"ip_per_minute": 10_000, "account_per_minute": 10_000})
        for service in (self.didcomm.due, self.didcomm.housekeeping):
            service.stopService()
        self.store = MemoryStore(self.clock, QueueLimits(), max_nonces=ROOM)
        test.successResultOf(self.store.open())
        self.base.store = self.store
        self.didcomm = DIDCommServices(self.base, self.config)
        self.decentrl = DecentrlServices(self.base, self.config)


class FullTests(SynchronousTestCase):
    """What was received before takes all the room there is, or much of it."""

    def setUp(self) -> None:
        self.in_memory = SmallNonceCacheMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.taken = self.refused = 0

    def fill(self, part: float) -> None:
        """Have so much of the room be taken."""
        in_memory, part_taken = self.in_memory, int(part * ROOM)
        for _ in range(ROOM):
            self.taken += 1
            claimed = in_memory.store.claim_nonce(
                b"%d" % self.taken, in_memory.clock.seconds() + HOUR, part_taken / ROOM
            )
            claimed.addErrback(lambda failure: failure.trap(ReplayCacheFull))

    def dated(self, type_: str = f"{CM3}/recipient-update", guest: InMemoryWallet | None = None) -> bytes:
        """A request that says when it was made."""
        headers = {"created_time": int(self.in_memory.clock.seconds()), "return_route": "all"}
        return (guest or self.bob).pack(type_, change(), **headers)

    def test_half(self) -> None:
        """Beyond that, undated changes of registrations are remembered for an hour instead of 30 days."""
        self.fill(LONG_RETENTION_SHARE)
        raw = self.bob.pack(f"{CM3}/recipient-update", change())
        self.assertEqual(self.in_memory.receive(raw).status, 200)
        self.assertIs(self.in_memory.receive(raw).fault, ReplayedMessage)
        self.in_memory.clock.advance(HOUR + 1 + NONCE_GRACE_SECONDS)
        self.successResultOf(self.in_memory.store.prune_nonces())
        self.assertEqual(self.in_memory.receive(raw).status, 200)

    def test_full(self) -> None:
        """Changes are refused rather than any be forgotten, and not done; what came before is known."""
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

    def test_mail_goes_on(self) -> None:
        """Whatever others have filled: forwards, enrolment, pickup and acknowledgements are served all the same."""
        self.fill(FULL_SHARE)
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.letter())).status, 202
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
        self.assertEqual(self.bob.waiting(), 0)
        self.assertEqual(InMemoryWallet(self.in_memory).ask(f"{CM3}/mediate-request").status, 200)

    def test_what_need_not_be_remembered(self) -> None:
        """It uses a quarter of the room at most, and is known as far as it is in that."""
        known = self.bob.pack(f"{MP}/status-request")
        self.assertEqual(self.in_memory.receive(known).status, 200)
        self.fill(ORDINARY_SHARE)
        for _ in range(ROOM):
            self.assertEqual(self.bob.ask(f"{MP}/status-request").status, 200)
        self.assertEqual(self.in_memory.receive(known).fault, ReplayedMessage)
        self.assertEqual(self.in_memory.receive(self.dated()).status, 200)

    def test_forged_commands(self) -> None:
        """What anybody can make up takes half of the room at most."""
        alice = InMemoryIdentity(self.in_memory, "alice")
        alice.register()
        for _ in range(ROOM):
            forged = json.loads(alice.command({"type": "QUERY_EVENTS"}))
            forged["header"]["timestamp"] += 1
            self.assertEqual(self.in_memory.obey(json.dumps(forged).encode()).status, 401)
        self.assertEqual(self.in_memory.obey(alice.command({"type": "QUERY_EVENTS"})).status, 200)
        self.assertEqual(self.in_memory.receive(self.dated()).status, 200)

    def test_commands(self) -> None:
        """A command is refused and not carried out, and may come again; a forged one is told that it is forged."""
        alice, bob = InMemoryIdentity(self.in_memory, "alice"), InMemoryIdentity(self.in_memory, "bob")
        alice.register()
        bob.register()
        bob.befriend(alice)
        self.fill(1)
        command = alice.command("hello", to=bob.did, channel=PRIVATE)
        for _ in range(3):
            reply = self.in_memory.obey(command)
            self.assertEqual((reply.status, json.loads(reply.body)["code"]), (503, "UNAVAILABLE"))
        forged = json.loads(alice.command({"type": "QUERY_EVENTS"}))
        forged["header"]["timestamp"] += 1
        self.assertEqual(self.in_memory.obey(json.dumps(forged).encode()).status, 401)
        self.in_memory.clock.advance(1)
        self.successResultOf(self.in_memory.store.release_nonce(b"1"))
        self.assertEqual(self.in_memory.obey(command).status, 200)
        self.assertEqual(json.loads(self.in_memory.obey(command).body)["code"], "DUPLICATE_NONCE")
