"""Limits on registrations per address, and expiry of unused accounts (docs/reference/limits.md)."""

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


class RegistrationLimitTests(SynchronousTestCase):
    def make_mediator(self, **limits: Any) -> ReloadableMediator:
        roomy = {"ip_per_minute": 100_000, "account_per_minute": 100_000}
        return ReloadableMediator(self, limits={**roomy, **limits})

    def grant(
        self, in_memory: InMemoryMediator, wallet: InMemoryWallet | None = None, peer: str = PEER
    ) -> tuple[InMemoryWallet, RequestReply]:
        wallet = wallet or InMemoryWallet(in_memory)
        return wallet, wallet.ask(f"{CM3}/mediate-request", socket=FakeSocket(peer))

    def add_recipients(self, wallet: InMemoryWallet, *dids: str, peer: str = PEER) -> RequestReply:
        updates = [{"recipient_did": did, "action": "add"} for did in dids]
        return wallet.ask(f"{CM3}/recipient-update", {"updates": updates}, socket=FakeSocket(peer))

    def assert_refused(self, reply: RequestReply, wallet: InMemoryWallet, status: int, code: str) -> None:
        self.assertEqual((reply.status, code_of(reply, wallet)), (status, code))

    def test_accounts_per_address(self) -> None:
        """So many a day with any DIDs; existing accounts and other addresses are not affected."""
        in_memory = self.make_mediator(accounts_per_address_per_day=3)
        first, reply = self.grant(in_memory)
        self.assertEqual([reply.status, *(self.grant(in_memory)[1].status for _ in range(2))], [200] * 3)
        wallet, reply = self.grant(in_memory)
        self.assert_refused(reply, wallet, 429, LIMITED)
        self.assertEqual(reply.retry_after, DAY)
        self.assertEqual(in_memory.events("limit.hit")[-1]["limit"], "accounts_per_address_per_day")
        self.assertEqual(in_memory.counter("mediator_rejected_total", reason="registration_limited"), 1)
        self.assertEqual(self.grant(in_memory, first)[1].status, 200)
        self.assertEqual(self.add_recipients(first, first.did).status, 200)
        self.assertEqual(self.grant(in_memory, wallet, NEIGHBOUR)[1].status, 200)
        in_memory.clock.advance(DAY + 1)
        self.assertEqual(self.grant(in_memory)[1].status, 200)

    def test_bytes_per_address(self) -> None:
        """An address stores a limited number of bytes a day; what is registered already is free."""
        in_memory = self.make_mediator(registration_bytes_per_address_per_day=100_000)
        bob = InMemoryWallet(in_memory).enrol()
        long = [f"did:example:{number:07d}{'x' * 7_900}" for number in range(100)]
        statuses = [self.add_recipients(bob, did).status for did in long]
        self.assertEqual(sorted(set(statuses)), [200, 429])
        done = statuses.count(200)
        usage = self.successResultOf(in_memory.store.get_account_usage())
        self.assertTrue(90_000 < usage.bytes <= 100_000, usage)
        self.assert_refused(self.add_recipients(bob, long[-1]), bob, 429, LIMITED)
        # A wallet registers all its DIDs again when it starts.
        self.assertEqual(self.add_recipients(bob, bob.did, *long[:done]).status, 200)
        self.assertEqual(self.add_recipients(bob, long[-1], peer=NEIGHBOUR).status, 200)
        # Another account's DID, or an invalid one, is not stored.
        eve, _ = self.grant(in_memory, peer=NEIGHBOUR)
        for _ in range(30):
            self.assertEqual(self.add_recipients(eve, *long[:done], "x" * 7_000, peer=NEIGHBOUR).status, 200)
        # Further spellings of one DID are.
        statuses = [self.add_recipients(bob, f"{bob.did}#{number}{'x' * 200}").status for number in range(30)]
        self.assertEqual(statuses[-1], 429)

    def test_account_moves(self) -> None:
        """Each move leaves a DID that is stored for good, so it is charged like a registration."""
        in_memory = self.make_mediator(registration_bytes_per_address_per_day=3_000)
        holder = InMemoryWallet(in_memory).enrol()
        for _ in range(100):
            new, signing = InMemoryWallet(in_memory), holder.identity.signing
            claim = FromPriorClaims(signing.kid, holder.did, new.did, int(in_memory.clock.seconds()))
            token = make_from_prior(claim, signing.private)
            reply = new.ask(f"{MP}/status-request", {}, from_prior=token)
            if reply.status != 200:
                break
            holder = new
        self.assert_refused(reply, new, 429, LIMITED)
        self.assertEqual(holder.count_queued(), 0)

    def test_failed_moves(self) -> None:
        """What was not stored is not charged, whatever the failure."""
        in_memory = self.make_mediator(registration_bytes_per_address_per_day=3_000)
        holder, new = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory)
        claim = FromPriorClaims(holder.identity.signing.kid, holder.did, new.did, int(in_memory.clock.seconds()))
        token = make_from_prior(claim, holder.identity.signing.private)
        with in_memory.failing("move_account", StoreUnavailable()):
            for _ in range(40):
                self.assertEqual(new.ask(f"{MP}/status-request", {}, from_prior=token).status, 503)
        self.assertEqual(new.ask(f"{MP}/status-request", {}, from_prior=token).status, 200)

    def test_account_removed_meanwhile(self) -> None:
        """A granted account exists, although the store caches accounts for a while."""
        in_memory = self.make_mediator()
        bob = InMemoryWallet(in_memory).enrol()
        remembered = self.successResultOf(in_memory.store.get_account(bob.did))
        now = in_memory.clock.seconds()
        self.successResultOf(in_memory.store.expire_accounts(1, unused_before=now, idle_before=None))
        # As another process has it cached.
        in_memory.store.get_account = lambda did: succeed(remembered)  # type: ignore[method-assign]  # for this instance
        self.assertIsNone(self.successResultOf(in_memory.store.find_owner(bob.did)))
        self.assertEqual(self.grant(in_memory, bob)[1].status, 200)
        self.add_recipients(bob, bob.did)
        self.assertEqual(self.successResultOf(in_memory.store.find_owner(bob.did)), bob.did)

    def test_total_limits(self) -> None:
        """Beyond the total limits there are no new accounts and registrations from any address; all else works."""
        in_memory = self.make_mediator(accounts=2, registration_bytes=20_000)
        bob, eve = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory).enrol()
        wallet, reply = self.grant(in_memory, peer=NEIGHBOUR)
        self.assert_refused(reply, wallet, 503, FULL)
        large = [f"did:example:{number}{'x' * 7_900}" for number in range(3)]
        self.assertEqual(self.add_recipients(eve, *large[:2]).status, 200)
        self.assert_refused(self.add_recipients(eve, large[2]), eve, 503, FULL)
        self.assert_refused(self.add_recipients(eve, large[2], peer=NEIGHBOUR), eve, 503, FULL)
        self.assertEqual(self.add_recipients(eve, *large[:2]).status, 200)
        self.assertEqual(in_memory.receive(pack_forward(in_memory, bob.did, bob.make_payload())).status, 202)
        self.assertEqual(bob.count_queued(), 1)
        in_memory.reload("limits", accounts=3)
        self.assertEqual(self.grant(in_memory, wallet)[1].status, 200)

    def test_trusted_peers(self) -> None:
        """A trusted peer network has as much more a day as it has requests a minute."""
        in_memory = self.make_mediator(
            accounts_per_address_per_day=2, ip_per_minute=100, trusted_peers=[f"{PEER}/32"], trusted_per_minute=300
        )
        self.assertEqual([self.grant(in_memory)[1].status for _ in range(7)], [200] * 6 + [429])
        self.assertEqual([self.grant(in_memory, peer=NEIGHBOUR)[1].status for _ in range(3)], [200] * 2 + [429])
        in_memory.reload("limits", trusted_peers=[])
        self.assertEqual(self.grant(in_memory)[1].status, 429)

    def test_daemon_itself(self) -> None:
        """Registrations of the daemon itself are free."""
        in_memory = self.make_mediator(accounts_per_address_per_day=1)
        for _ in range(3):
            in_memory.run(in_memory.base.registrations.charge(PROBE_CLIENT, 100, 1))

    def test_decentrl(self) -> None:
        """Registrations of identities are charged too, and refused before anything is stored."""
        in_memory = self.make_mediator(accounts_per_address_per_day=2)

        def register(peer: str = PEER) -> RequestReply:
            ann = InMemoryIdentity(in_memory, "ann")
            payload = {"type": "REQUEST_COMMUNICATION_CONTRACT", **ann.registration_request()}
            return in_memory.receive_command(ann.command(payload), peer)

        self.assertEqual([register().status for _ in range(2)], [200, 200])
        reply = register()
        self.assertEqual((reply.status, json.loads(reply.body)["code"]), (429, "RATE_LIMITED"))
        self.assertEqual(reply.retry_after, DAY)
        self.assertEqual(register(NEIGHBOUR).status, 200)


class SharedLimitTests(SynchronousTestCase):
    """Several processes on one store."""

    def setUp(self) -> None:
        self.clock = InMemoryReactor()
        self.clock.advance(NOW)
        self.store = MemoryStore(self.clock, QueueLimits(10, 10_000))
        self.successResultOf(self.store.open())
        self.cluster = CountingClusterStore(self.store.cluster)

    def make_process(self, limits: RegistrationLimits) -> RegistrationQuota:
        allowances = QuotaStore(self.clock, self.cluster, lambda: 2)  # type: ignore[arg-type]  # it stands for one
        return RegistrationQuota(self.clock, self.store, lambda *_: None, limits, allowances.make_limiter)

    def is_admitted(self, quota: RegistrationQuota, peer: str = PEER) -> bool:
        """Whether one more account is admitted."""
        answers: list[bool] = []
        enrolled: Deferred[Any] = Deferred.fromCoroutine(quota.charge(peer, 10, 1))
        enrolled.addCallbacks(lambda _: True, lambda failure: not failure.trap(RateLimitExceeded)).addCallback(
            answers.append
        )
        (answer,) = answers
        return answer

    def test_shared_limit(self) -> None:
        """Both together admit no more than one would, except for their leases."""
        limits = RegistrationLimits(accounts_per_day=40)
        processes = [self.make_process(limits), self.make_process(limits)]
        admitted = sum(self.is_admitted(processes[number % 2]) for number in range(100))
        self.assertTrue(38 <= admitted <= 40, admitted)
        self.clock.advance(DAY + DAY / QUOTA_WINDOW_SLOTS + 1)
        self.assertTrue(self.is_admitted(processes[0]))

    def test_usage_is_read_periodically(self) -> None:
        """The store is queried every few seconds, and local admissions count meanwhile."""
        quota = self.make_process(RegistrationLimits(accounts=5))
        reads: list[None] = []
        real = self.store.get_account_usage

        def account_usage() -> Deferred[AccountUsage]:
            reads.append(None)
            return real()

        self.store.get_account_usage = account_usage  # type: ignore[method-assign]  # to count
        admitted = [self.is_admitted(quota, f"192.0.2.{number}") for number in range(8)]
        self.assertEqual((admitted, len(reads)), ([True] * 5 + [False] * 3, 1))
        self.clock.advance(USAGE_CACHE_SECONDS)
        self.assertTrue(self.is_admitted(quota))
        self.assertEqual(len(reads), 2)


class AccountExpiryTests(SynchronousTestCase):
    """Expiry of unused accounts by housekeeping."""

    def make_mediator(self, **settings: Any) -> InMemoryMediator:
        return InMemoryMediator(self, limits={"ip_per_minute": 100_000}, queue={"ttl": "1d"}, didcomm=settings)

    def pass_days(self, in_memory: InMemoryMediator, days: float) -> None:
        """Let days pass, in steps of one housekeeping round."""
        in_memory.clock.pump([3_600.0] * int(days * 24))

    def has_account(self, in_memory: InMemoryMediator, wallet: InMemoryWallet) -> bool:
        return self.successResultOf(in_memory.store.get_account(wallet.did)) is not None

    def test_unused_account(self) -> None:
        """An account without messages or contact after its first day expires after a week, and is logged."""
        in_memory = self.make_mediator()
        unused, addressed, came_back, live, silent = (InMemoryWallet(in_memory).enrol() for _ in range(5))
        self.assertEqual(
            in_memory.receive(pack_forward(in_memory, addressed.did, addressed.make_payload())).status, 202
        )
        socket = live.go_live()
        self.pass_days(in_memory, 2)
        self.assertEqual(came_back.count_queued(), 0)
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
        self.assertEqual([(event["reason"], event["n_removed"]) for event in events], [("unused", 1)] * 2)
        reply = in_memory.receive(pack_forward(in_memory, unused.did, unused.make_payload()))
        self.assertEqual(reply.status, 400)
        unused.enrol()
        self.pass_days(in_memory, 2)
        self.assertTrue(self.has_account(in_memory, addressed))

    def test_expiry_disabled(self) -> None:
        """With 0 accounts never expire; used ones without contact do not by default."""
        in_memory = self.make_mediator(unused_account_ttl=0)
        unused = InMemoryWallet(in_memory).enrol()
        self.pass_days(in_memory, 9)
        self.assertTrue(self.has_account(in_memory, unused))

    def test_idle_account(self) -> None:
        """If configured, used accounts expire after a time without contact, which is recorded once a day."""
        in_memory = self.make_mediator(idle_account_ttl="20d")
        unused, used = InMemoryWallet(in_memory).enrol(), InMemoryWallet(in_memory).enrol()
        for wallet in (unused, used):
            self.assertEqual(
                in_memory.receive(pack_forward(in_memory, wallet.did, wallet.make_payload())).status, 202
            )
        touched: list[str] = []
        real = in_memory.store.record_contact

        def touch(did: str) -> Deferred[None]:
            touched.append(did)
            return real(did)

        in_memory.store.record_contact = touch  # type: ignore[method-assign]  # to count
        for _ in range(12):
            self.pass_days(in_memory, 2)
            for _ in range(3):
                used.count_queued()
        self.assertEqual(touched, [used.did] * 12)
        self.assertEqual([self.has_account(in_memory, one) for one in (unused, used)], [False, True])
        self.assertEqual(in_memory.counter("mediator_accounts_expired_total", reason="idle"), 1)

    def test_expires_in_small_steps(self) -> None:
        """Many expire a few at a time in one round."""
        in_memory = self.make_mediator()
        for number in range(3 * ACCOUNTS_PER_STEP):
            self.successResultOf(in_memory.store.grant(f"did:example:{number}"))
        self.pass_days(in_memory, 7)
        in_memory.clock.pump([0.02] * 10)
        self.assertEqual(self.successResultOf(in_memory.store.get_account_usage()).accounts, 0)
