"""
Rate limits of senders, addresses and accounts, and the memory budget of requests (UC-021 AF-2, DIDComm reference 4.1,
4.2, 12).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RateLimitExceeded
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.distributed_limiter import KeyedLimiter, QuotaStore

MAX_MEMORY_PER_ADDRESS = 67_108_864
MAX_MEMORY_TOTAL = 268_435_456
# Memory of a request: its bytes encrypted and decrypted, and a bounded JSON tree. One byte of JSON made of the
# smallest objects takes about 46 bytes.
_COPIES_OF_REQUEST = 4
_MAX_TREE_BYTES = 12_000_000
_MAX_BYTES_PER_BYTE = 50
# Seconds that a request waits for memory; it would miss its deadline after that.
MEMORY_WAIT_SECONDS = 10.0


def estimate_request_memory(size: int) -> int:
    """Upper bound of the memory that a request of `size` bytes needs until it is answered."""
    return min(_MAX_BYTES_PER_BYTE * size, _COPIES_OF_REQUEST * size + _MAX_TREE_BYTES)


class RequestMemoryBudget:
    """
    Limits the memory of requests in progress, per address and in total.

    Requests are parsed before the store is asked, and a JSON tree takes many times the size of its text, so slow
    storage would let trees of many connections pile up. An address without other requests is always admitted.
    """

    def __init__(
        self,
        clock: IReactorTime,
        max_bytes_per_address: int = MAX_MEMORY_PER_ADDRESS,
        max_bytes_total: int = MAX_MEMORY_TOTAL,
    ) -> None:
        self._clock = clock
        self._max_bytes_per_address = max_bytes_per_address
        self._max_bytes_total = max_bytes_total
        self._taken: dict[str, int] = {}
        self._requests = 0
        self._total = 0
        self._waiting: dict[str, deque[tuple[int, Deferred[None]]]] = {}

    @property
    def held(self) -> tuple[int, int]:
        """Number of requests, and the bytes reserved for them."""
        return self._requests, self._total

    def try_acquire(self, peer: str, size: int) -> bool:
        """Reserve memory for a request if available; pair with :meth:`release`."""
        if peer == PROBE_CLIENT:
            return True
        if self._waiting and peer in self._waiting:
            return False
        return self._take(peer, estimate_request_memory(size))

    def _take(self, peer: str, size: int) -> bool:
        taken = self._taken.get(peer, 0)
        if taken and (taken + size > self._max_bytes_per_address or self._total + size > self._max_bytes_total):
            return False
        self._taken[peer] = taken + size
        self._total += size
        self._requests += 1
        return True

    async def acquire(self, peer: str, size: int) -> None:
        """
        Wait for memory; pair with :meth:`release`.

        :raise RateLimitExceeded: it takes too long.
        """
        turn: Deferred[None] = Deferred()
        place = (estimate_request_memory(size), turn)
        self._waiting.setdefault(peer, deque()).append(place)
        timer = self._clock.callLater(MEMORY_WAIT_SECONDS, self._give_up, peer, place)
        try:
            await turn
        finally:
            if timer.active():
                timer.cancel()

    def _give_up(self, peer: str, place: tuple[int, Deferred[None]]) -> None:
        waiting = self._waiting.get(peer, deque())
        if place not in waiting:  # admitted already
            return
        waiting.remove(place)
        if not waiting:
            del self._waiting[peer]
        place[1].errback(RateLimitExceeded(retry_after=5))

    def release(self, peer: str, size: int) -> None:
        """Return the memory of a request."""
        if peer == PROBE_CLIENT:
            return
        size = estimate_request_memory(size)
        left = self._taken[peer] - size
        if left:
            self._taken[peer] = left
        else:
            del self._taken[peer]
        self._total -= size
        self._requests -= 1
        if self._waiting:
            for other in list(self._waiting):
                self._admit(other)

    def _admit(self, peer: str) -> None:
        """Start the waiting requests of an address for which memory is available."""
        while waiting := self._waiting.get(peer):
            size, turn = waiting[0]
            if not self._take(peer, size):
                return
            waiting.popleft()
            if not waiting:
                del self._waiting[peer]
            # Called later, so that the releasing request is not delayed by others.
            self._clock.callLater(0, turn.callback, None)


RateLimitCallback = Callable[[str, str, str, int], None]

# Requests of wallets about their own messages are not larger, in bytes.
SMALL_REQUEST_BYTES = 65_536

# Accounts behind one address that can use up their limit.
_ACCOUNTS_PER_ADDRESS = 10
# Requests of any kind per address, relative to its limit of charged requests.
_REQUESTS_PER_CHARGE = 50
_MIN_REQUESTS = 1000
# did:web documents fetched per minute on behalf of one address (reference 8.5).
_DID_LOOKUPS_PER_MINUTE = 10


def compute_request_cost(size: int) -> int:
    """Cost of reading a request: one, and one more per 64 KiB."""
    return 1 + size // SMALL_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class TrustedAddresses:
    """
    Addresses that stand for many senders, such as other mediators.

    :param peers: as rate limit keys (:meth:`~mediatord.http.client_address.ClientAddressResolver.rate_limit_key`).
    :param per_minute: limit of each of them.
    """

    peers: frozenset[str] = frozenset()
    per_minute: int = 6000

    def make_overrides(self, usual: int) -> dict[str, int]:
        """Limit of each trusted address, given the usual limit."""
        return dict.fromkeys(self.peers, max(usual, self.per_minute))


class RateLimiter:
    """
    All per-minute limits: sender DIDs, addresses, accounts. The daemon's own probes are exempt.

    :param on_limit: called on every refusal with limiter name, key, address, and seconds to wait.
    :param quotas: quotas shared with other processes; None for a single process.
    :ivar memory: budget of requests in progress.
    """

    def __init__(
        self,
        clock: IReactorTime,
        on_limit: RateLimitCallback,
        *,
        did_per_minute: int,
        ip_per_minute: int,
        account_per_minute: int,
        trusted: TrustedAddresses = TrustedAddresses(),  # noqa: B008  it cannot change
        quotas: QuotaStore | None = None,
    ) -> None:
        def bucket(name: str, limit: int) -> KeyedLimiter:
            return KeyedLimiter(clock, name, limit, quotas)

        self._on_limit = on_limit
        self.memory = RequestMemoryBudget(clock)
        self._senders = bucket("senders", did_per_minute)
        self._peers = bucket("peers", ip_per_minute)
        self._accounts = bucket("accounts", account_per_minute)
        self._decryptions = bucket("openings", account_per_minute)
        self._readers = bucket("readers", account_per_minute)
        self._command_addresses = bucket("commanders", _ACCOUNTS_PER_ADDRESS * account_per_minute)
        self._failed_decryptions = bucket("openings in vain", ip_per_minute)
        self._lookups = bucket("lookups", _DID_LOOKUPS_PER_MINUTE)
        # Local to the process: sharing would cost more than what is counted.
        self._requests = KeyedLimiter(clock, "requests", ip_per_minute, None)
        self.set_limits(
            did_per_minute=did_per_minute,
            ip_per_minute=ip_per_minute,
            account_per_minute=account_per_minute,
            trusted=trusted,
        )

    def set_limits(
        self,
        *,
        did_per_minute: int,
        ip_per_minute: int,
        account_per_minute: int,
        trusted: TrustedAddresses = TrustedAddresses(),
    ) -> None:  # noqa: B008  it cannot change
        """Change all limits; requests of the last minute still count."""
        self._trusted = trusted.peers
        self._senders.set_limit(did_per_minute)
        self._accounts.set_limit(account_per_minute)
        for bucket in (self._peers, self._failed_decryptions):
            bucket.set_limit(ip_per_minute, trusted.make_overrides(ip_per_minute))
        for bucket in (self._decryptions, self._readers):
            bucket.set_limit(account_per_minute, trusted.make_overrides(account_per_minute))
        commands = _ACCOUNTS_PER_ADDRESS * account_per_minute
        self._command_addresses.set_limit(commands, trusted.make_overrides(commands))
        requests = max(_MIN_REQUESTS, commands, _REQUESTS_PER_CHARGE * ip_per_minute)
        self._requests.set_limit(requests, trusted.make_overrides(requests))

    def __len__(self) -> int:
        """Number of keys of all limiters."""
        buckets = (self._senders, self._peers, self._accounts, self._decryptions, self._readers)
        return sum(
            map(len, (*buckets, self._command_addresses, self._failed_decryptions, self._lookups, self._requests))
        )

    def charge_request(self, peer: str, count: int = 1) -> bool:
        """
        Charge an address for requests or frames of any kind, before they are processed and on top of other charges.

        :return: whether it is within its limit.
        """
        return peer == PROBE_CLIENT or self._requests.try_admit(peer, count)

    async def check_before_read(self, peer: str, size: int, cost: int = 1) -> None:
        """
        Refuse to parse requests of an address over its limit, to save CPU time, with one exception.

        Wallets behind that address may only pick up messages, which is charged to their accounts. Requests as small
        as theirs are still parsed, up to an account's limit, and until too many of them turn out invalid.

        :param size: size of the envelope in bytes.
        :param cost: what the address will be charged.
        :raise RateLimitExceeded: over the limit.
        """
        if peer == PROBE_CLIENT:
            return
        wait = await self._peers.wait_after_debts(peer, cost)
        if wait and size <= SMALL_REQUEST_BYTES:
            wait = await self._failed_decryptions.wait_after_debts(peer) or await self._decryptions.admit(peer)
        if wait:
            self._refuse_if(wait, "ip", peer, peer)

    def check_before_decryption(self, peer: str, *, authenticated: bool) -> None:
        """
        Second half of :meth:`check_before_read`: of an address over its limit, only authcrypts are decrypted.

        :raise RateLimitExceeded: over the limit.
        """
        if not authenticated and peer != PROBE_CLIENT:
            self._refuse_if(self._peers.wait(peer), "ip", peer, peer)

    def charge_failure(self, peer: str, size: int = 0) -> None:
        """
        Charge an address for a message that was unreadable, undecryptable or repeated.

        :param size: in bytes, where the cost depends on it.
        """
        for _ in range(compute_request_cost(size) if peer != PROBE_CLIENT else 0):
            if self._peers.charge_deferred(peer):
                self._failed_decryptions.charge_deferred(peer)
                break

    async def charge_anonymous(self, peer: str, count: int = 1) -> None:
        """
        Charge an address for payloads to forward, or for a request without an account, by size.

        :raise RateLimitExceeded: over the limit.
        """
        if count and peer != PROBE_CLIENT:
            self._refuse_if(await self._peers.admit(peer, count), "ip", peer, peer)

    def try_charge_anonymous(self, peer: str, cost: int = 1) -> bool:
        """
        Charge an address for one payload if no store access is needed; equals :meth:`check_before_read`,
        :meth:`check_before_decryption` and :meth:`charge_anonymous` together.

        :return: False if nothing was charged and these have to decide.
        """
        return peer == PROBE_CLIENT or self._peers.try_admit(peer, cost)

    def refund_anonymous(self, peer: str, cost: int = 1) -> None:
        """Undo :meth:`try_charge_anonymous`."""
        if peer != PROBE_CLIENT:
            self._peers.refund(peer, cost)

    async def charge_sender(self, proven: str | None, claimed: str | None, peer: str, count: int = 1) -> None:
        """
        Charge the sender of payloads: its authenticated DID; else the claimed DID, per address, so that nobody can
        use up somebody else's limit; else nobody. Senders behind trusted addresses are exempt.

        :raise RateLimitExceeded: over the limit.
        """
        if peer == PROBE_CLIENT or peer in self._trusted:
            return
        who = proven
        if who is None and claimed is not None:
            who = f"{peer} {canonicalize_did(claimed)}"
        if who is not None:
            self._refuse_if(await self._senders.admit(who, count), "did", proven or peer, peer)

    def check_allowance(self, account: str | None, peer: str) -> None:
        """
        Check, without charging, whether an account (or an address without one) may make a request.

        :raise RateLimitExceeded: over the limit.
        """
        if peer == PROBE_CLIENT:
            return
        if account is None:
            self._refuse_if(self._peers.wait(peer), "ip", peer, peer)
        elif wait := self._accounts.wait(account):
            self._refuse_if(wait, "account", account, peer)

    async def charge_account(self, did: str, peer: str, cost: int = 1) -> None:
        """
        Charge an account for its coordination and pickup requests, or its commands.

        :raise RateLimitExceeded: over the limit.
        """
        if peer != PROBE_CLIENT and (wait := await self._accounts.admit(did, cost)):
            self._refuse_if(wait, "account", did, peer)

    async def charge_command(self, peer: str, size: int) -> None:
        """
        Charge an address for reading a command. DIDs are free to create, so their limits do not bound an address.

        :raise RateLimitExceeded: over the limit.
        """
        self._refuse_if(await self._command_addresses.admit(peer, compute_request_cost(size)), "account", peer, peer)

    def refund(self, did: str, peer: str, *, outgoing: bool, cost: int = 1) -> None:
        """Undo the last :meth:`charge_sender` or :meth:`charge_account`, when the DID was not at fault."""
        if not outgoing:
            self._accounts.refund(did, cost)
        elif peer not in self._trusted:
            self._senders.refund(did, cost)

    async def charge_public_read(self, peer: str) -> None:
        """
        Charge an address for reading a public channel.

        :raise RateLimitExceeded: over the limit.
        """
        self._refuse_if(await self._readers.admit(peer), "account", peer, peer)

    async def charge_did_lookup(self, peer: str) -> int:
        """Charge an address for fetching a did:web document; returns the seconds to wait, or 0."""
        return await self._lookups.admit(peer)

    def _refuse_if(self, wait: int, bucket: str, who: str, peer: str) -> None:
        if wait:
            self._on_limit(bucket, who, peer, wait)
            raise RateLimitExceeded(retry_after=wait)
