"""How much an address may have stored for good, and accounts that nobody uses (docs/reference/limits.md)."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.housekeeping import ACCOUNTS_PER_STEP
from mediatord.errors import RateLimitExceeded, StoreUnavailable
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.admission import RequestReply
from mediatord.ratelimit.distributed_limiter import QuotaStore
from mediatord.ratelimit.registration import USAGE_CACHE_SECONDS, RegistrationLimits, RegistrationQuota
from mediatord.store.interfaces.cluster_and_quotas import QUOTA_WINDOW_SLOTS
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import AccountUsage
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.from_prior import FromPriorClaims, make_from_prior
from tests.in_memory_identities import InMemoryIdentity
from tests.in_memory_mediator import (
    CM3,
    MP,
    NOW,
    PEER,
    FakeSocket,
    InMemoryMediator,
    InMemoryReactor,
    InMemoryWallet,
    code_of,
    pack_forward,
)
from tests.ratelimit.rate_limiter_processes import CountingClusterStore
from tests.ratelimit.test_access_control import ReloadableMediator

DAY = 86_400.0
LIMITED, FULL = "e.m.req.registration-limited", "e.m.me.res.registrations"
NEIGHBOUR = "192.0.2.2"


class LimitTests(SynchronousTestCase):
    def in_memory(self, **limits: Any) -> ReloadableMediator:
        roomy = {"ip_per_minute": 100_000, "account_per_minute": 100_000}
        return ReloadableMediator(self, limits={**roomy, **limits})

    def grant(
        self, in_memory: InMemoryMediator, guest: InMemoryWallet | None = None, peer: str = PEER
    ) -> tuple[InMemoryWallet, RequestReply]:
        guest = guest or InMemoryWallet(in_memory)
        return guest, guest.ask(f"{CM3}/mediate-request", socket=FakeSocket(peer))

    def add(self, guest: InMemoryWallet, *dids: str, peer: str = PEER) -> RequestReply:
        updates = [{"recipient_did": did, "action": "add"} for did in dids]
        return guest.ask(f"{CM3}/recipient-update", {"updates": updates}, socket=FakeSocket(peer))

    def refused(self, reply: RequestReply, guest: InMemoryWallet, status: int, code: str) -> None:
        self.assertEqual((reply.status, code_of(reply, guest)), (status, code))

    def test_accounts_of_an_address(self) -> None:
        """So many a day, whatever DIDs they have; those that are there go on, and so do other addresses."""
        in_memory = self.in_memory(accounts_per_address_per_day=3)
        first, reply = self.grant(in_memory)
        self.assertEqual([reply.status, *(self.grant(in_memory)[1].status for _ in range(2))], [200] * 3)
        guest, reply = self.grant(in_memory)
        self.refused(reply, guest, 429, LIMITED)
        self.assertEqual(reply.retry_after, DAY)
        self.assertEqual(in_memory.events("limit.hit")[-1]["limit"], "accounts_per_address_per_day")
        self.assertEqual(in_memory.counter("mediator_rejected_total", reason="registration_limited"), 1)
        self.assertEqual(self.grant(in_memory, first)[1].status, 200)
        self.assertEqual(self.add(first, first.did).status, 200)
        self.assertEqual(self.grant(in_memory, guest, NEIGHBOUR)[1].status, 200)
        in_memory.clock.advance(DAY + 1)
        self.assertEqual(self.grant(in_memory)[1].status, 200)

    def test_bytes_of_an_address(self) -> None:
        """However it goes about it, an address has no more stored in a day; what is registered costs nothing."""
        in_memory = self.in_memory(registration_bytes_per_address_per_day=100_000)
        bob = InMemoryWallet(in_memory).enrol()
        long = [f"did:example:{number:07d}{'x' * 7_900}" for number in range(100)]
        statuses = [self.add(bob, did).status for did in long]
        self.assertEqual(sorted(set(statuses)), [200, 429])
        done = statuses.count(200)
        usage = self.successResultOf(in_memory.store.get_account_usage())
        self.assertTrue(90_000 < usage.bytes <= 100_000, usage)
        self.refused(self.add(bob, long[-1]), bob, 429, LIMITED)
        # Who registers again all it has, as wallets do when they start, has it.
        self.assertEqual(self.add(bob, bob.did, *long[:done]).status, 200)
        self.assertEqual(self.add(bob, long[-1], peer=NEIGHBOUR).status, 200)
        # What is somebody else's, or is no DID, was not stored.
        eve, _ = self.grant(in_memory, peer=NEIGHBOUR)
        for _ in range(30):
            self.assertEqual(self.add(eve, *long[:done], "x" * 7_000, peer=NEIGHBOUR).status, 200)
        # But more names of one DID are.
        statuses = [self.add(bob, f"{bob.did}#{number}{'x' * 200}").status for number in range(30)]
        self.assertEqual(statuses[-1], 429)

    def test_moves_of_an_account(self) -> None:
        """Each leaves a DID behind that is kept for good, so it is charged like a registration."""
        in_memory = self.in_memory(registration_bytes_per_address_per_day=3_000)
        holder = InMemoryWallet(in_memory).enrol()
        for _ in range(100):
            new, signing = InMemoryWallet(in_memory), holder.identity.signing
            claim = FromPriorClaims(signing.kid, holder.did, new.did, int(in_memory.clock.seconds()))
            token = make_from_prior(claim, signing.private)
            reply = new.ask(f"{MP}/status-request", {}, from_prior=token)
            if reply.status != 200:
                break
            holder = new
        self.refused(reply, new, 429, LIMITED)
        self.assertEqual(holder.waiting(), 0)

    def test_moves_that_fail(self) -> None:
        """What was not stored is not charged, whatever went wrong."""
        in_memory = self.in_memory(registration_bytes_per_address_per_day=3_000)
        holder, new = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory)
        claim = FromPriorClaims(holder.identity.signing.kid, holder.did, new.did, int(in_memory.clock.seconds()))
        token = make_from_prior(claim, holder.identity.signing.private)
        with in_memory.failing("move_account", StoreUnavailable()):
            for _ in range(40):
                self.assertEqual(new.ask(f"{MP}/status-request", {}, from_prior=token).status, 503)
        self.assertEqual(new.ask(f"{MP}/status-request", {}, from_prior=token).status, 200)

    def test_account_that_was_removed_meanwhile(self) -> None:
        """Whoever is told that it is enrolled is, although the store remembers an account for a while."""
        in_memory = self.in_memory()
        bob = InMemoryWallet(in_memory).enrol()
        remembered = self.successResultOf(in_memory.store.get_account(bob.did))
        now = in_memory.clock.seconds()
        self.successResultOf(in_memory.store.expire_accounts(1, unused_before=now, idle_before=None))
        in_memory.store.get_account = lambda did: succeed(remembered)  # type: ignore[method-assign]  # as others remember it
        self.assertIsNone(self.successResultOf(in_memory.store.find_owner(bob.did)))
        self.assertEqual(self.grant(in_memory, bob)[1].status, 200)
        self.add(bob, bob.did)
        self.assertEqual(self.successResultOf(in_memory.store.find_owner(bob.did)), bob.did)

    def test_all_addresses(self) -> None:
        """Beyond the limits in all nobody is enrolled and nothing registered, from wherever; all else goes on."""
        in_memory = self.in_memory(accounts=2, registration_bytes=20_000)
        bob, eve = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory).enrol()
        guest, reply = self.grant(in_memory, peer=NEIGHBOUR)
        self.refused(reply, guest, 503, FULL)
        large = [f"did:example:{number}{'x' * 7_900}" for number in range(3)]
        self.assertEqual(self.add(eve, *large[:2]).status, 200)
        self.refused(self.add(eve, large[2]), eve, 503, FULL)
        self.refused(self.add(eve, large[2], peer=NEIGHBOUR), eve, 503, FULL)
        self.assertEqual(self.add(eve, *large[:2]).status, 200)
        self.assertEqual(in_memory.receive(pack_forward(in_memory, bob.did, bob.letter())).status, 202)
        self.assertEqual(bob.waiting(), 1)
        in_memory.change("limits", accounts=3)
        self.assertEqual(self.grant(in_memory, guest)[1].status, 200)

    def test_trusted_peers(self) -> None:
        """An address behind which are many has as many times more in a day as it has requests in a minute."""
        in_memory = self.in_memory(
            accounts_per_address_per_day=2, ip_per_minute=100, trusted_peers=[f"{PEER}/32"], trusted_per_minute=300
        )
        self.assertEqual([self.grant(in_memory)[1].status for _ in range(7)], [200] * 6 + [429])
        self.assertEqual([self.grant(in_memory, peer=NEIGHBOUR)[1].status for _ in range(3)], [200] * 2 + [429])
        in_memory.change("limits", trusted_peers=[])
        self.assertEqual(self.grant(in_memory)[1].status, 429)

    def test_the_daemon_itself(self) -> None:
        """What it sends to itself is charged to nobody."""
        in_memory = self.in_memory(accounts_per_address_per_day=1)
        for _ in range(3):
            in_memory.done(in_memory.base.registrations.charge(PROBE_CLIENT, 100, 1))

    def test_decentrl(self) -> None:
        """Registrations of identities are charged likewise, and refused before anything is stored."""
        in_memory = self.in_memory(accounts_per_address_per_day=2)

        def register(peer: str = PEER) -> RequestReply:
            ann = InMemoryIdentity(in_memory, "ann")
            payload = {"type": "REQUEST_COMMUNICATION_CONTRACT", **ann.registration()}
            return in_memory.obey(ann.command(payload), peer)

        self.assertEqual([register().status for _ in range(2)], [200, 200])
        reply = register()
        self.assertEqual((reply.status, json.loads(reply.body)["code"]), (429, "RATE_LIMITED"))
        self.assertEqual(reply.retry_after, DAY)
        self.assertEqual(register(NEIGHBOUR).status, 200)


class SharedTests(SynchronousTestCase):
    """Several processes on one store."""

    def setUp(self) -> None:
        self.clock = InMemoryReactor()
        self.clock.advance(NOW)
        self.store = MemoryStore(self.clock, QueueLimits(10, 10_000))
        self.successResultOf(self.store.open())
        self.cluster = CountingClusterStore(self.store.cluster)

    def process(self, limits: RegistrationLimits) -> RegistrationQuota:
        allowances = QuotaStore(self.clock, self.cluster, lambda: 2)  # type: ignore[arg-type]  # it stands for one
        return RegistrationQuota(self.clock, self.store, lambda *_: None, limits, allowances.make_limiter)

    def admitted(self, quota: RegistrationQuota, peer: str = PEER) -> bool:
        """Whether an account more is."""
        answers: list[bool] = []
        enrolled: Deferred[Any] = Deferred.fromCoroutine(quota.charge(peer, 10, 1))
        enrolled.addCallbacks(lambda _: True, lambda failure: not failure.trap(RateLimitExceeded)).addCallback(
            answers.append
        )
        (answer,) = answers
        return answer

    def test_one_allowance(self) -> None:
        """Both together admit no more than one would, but for what they hold of it."""
        limits = RegistrationLimits(accounts_per_day=40)
        processes = [self.process(limits), self.process(limits)]
        admitted = sum(self.admitted(processes[number % 2]) for number in range(100))
        self.assertTrue(38 <= admitted <= 40, admitted)
        self.clock.advance(DAY + DAY / QUOTA_WINDOW_SLOTS + 1)
        self.assertTrue(self.admitted(processes[0]))

    def test_asked_now_and_then(self) -> None:
        """The store is asked how much there is every few seconds, and what was admitted here counts meanwhile."""
        quota = self.process(RegistrationLimits(accounts=5))
        asked: list[None] = []
        real = self.store.get_account_usage

        def account_usage() -> Deferred[AccountUsage]:
            asked.append(None)
            return real()

        self.store.get_account_usage = account_usage  # type: ignore[method-assign]  # to count
        admitted = [self.admitted(quota, f"192.0.2.{number}") for number in range(8)]
        self.assertEqual((admitted, len(asked)), ([True] * 5 + [False] * 3, 1))
        self.clock.advance(USAGE_CACHE_SECONDS)
        self.assertTrue(self.admitted(quota))
        self.assertEqual(len(asked), 2)


class ExpiryTests(SynchronousTestCase):
    """What housekeeping does about accounts that nobody uses."""

    def a_house(self, **settings: Any) -> InMemoryMediator:
        return InMemoryMediator(self, limits={"ip_per_minute": 100_000}, queue={"ttl": "1d"}, didcomm=settings)

    def pass_days(self, in_memory: InMemoryMediator, days: float) -> None:
        """In steps as long as a round of housekeeping."""
        in_memory.clock.pump([3_600.0] * int(days * 24))

    def has_account(self, in_memory: InMemoryMediator, guest: InMemoryWallet) -> bool:
        return self.successResultOf(in_memory.store.get_account(guest.did)) is not None

    def test_unused(self) -> None:
        """An account that nothing came for, without contact after its first day, goes after a week, and is logged."""
        in_memory = self.a_house()
        unused, addressed, came_back, live, silent = (InMemoryWallet(in_memory).enrol() for _ in range(5))
        self.assertEqual(in_memory.receive(pack_forward(in_memory, addressed.did, addressed.letter())).status, 202)
        socket = live.go_live()
        self.pass_days(in_memory, 2)
        self.assertEqual(came_back.waiting(), 0)
        self.pass_days(in_memory, 4.9)
        self.assertTrue(self.has_account(in_memory, unused))
        self.pass_days(in_memory, 0.3)
        self.assertEqual(
            [self.has_account(in_memory, one) for one in (unused, addressed, came_back, live, silent)],
            [False, True, True, True, False],
        )
        self.assertEqual(socket.codes, [])
        self.assertEqual(in_memory.counter("mediator_accounts_expired_total", reason="unused"), 2)
        events = in_memory.events("acct.expire")
        self.assertEqual([(one["reason"], one["n_removed"]) for one in events], [("unused", 1)] * 2)
        reply = in_memory.receive(pack_forward(in_memory, unused.did, unused.letter()))
        self.assertEqual(reply.status, 400)
        unused.enrol()
        self.pass_days(in_memory, 2)
        self.assertTrue(self.has_account(in_memory, addressed))

    def test_never(self) -> None:
        """With 0 accounts stay; and without contact they do by default, once they were used."""
        in_memory = self.a_house(unused_account_ttl=0)
        unused = InMemoryWallet(in_memory).enrol()
        self.pass_days(in_memory, 9)
        self.assertTrue(self.has_account(in_memory, unused))

    def test_idle(self) -> None:
        """Where that is wanted, used accounts go after so long without contact, which is noted once a day."""
        in_memory = self.a_house(idle_account_ttl="20d")
        gone, there = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory).enrol()
        for guest in (gone, there):
            self.assertEqual(in_memory.receive(pack_forward(in_memory, guest.did, guest.letter())).status, 202)
        touched: list[str] = []
        real = in_memory.store.record_contact

        def touch(did: str) -> Deferred[None]:
            touched.append(did)
            return real(did)

        in_memory.store.record_contact = touch  # type: ignore[method-assign]  # to count
        for _ in range(12):
            self.pass_days(in_memory, 2)
            for _ in range(3):
                there.waiting()
        self.assertEqual(touched, [there.did] * 12)
        self.assertEqual([self.has_account(in_memory, one) for one in (gone, there)], [False, True])
        self.assertEqual(in_memory.counter("mediator_accounts_expired_total", reason="idle"), 1)

    def test_slices(self) -> None:
        """Many go a few at a time, in one round."""
        in_memory = self.a_house()
        for number in range(3 * ACCOUNTS_PER_STEP):
            self.successResultOf(in_memory.store.grant(f"did:example:{number}"))
        self.pass_days(in_memory, 7)
        in_memory.clock.pump([0.02] * 10)
        self.assertEqual(self.successResultOf(in_memory.store.get_account_usage()).accounts, 0)
