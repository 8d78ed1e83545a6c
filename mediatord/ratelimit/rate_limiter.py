"""
Rate limits of senders, addresses and accounts (UC-021 AF-2, DIDComm reference 4.1, 4.2, 12): sliding windows that
admit exactly N requests in any period, with many keys.

Limits that are shared with other processes are in :mod:`mediatord.ratelimit.distributed_limiter`.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RateLimitExceeded
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.probe_markers import PROBE_CLIENT

# Whole seconds to wait, 0 if admitted; or an awaitable of them, if the store has to be asked.
WaitTime = int | Awaitable[int]

# Number of groups in which keys beyond `max_keys` share their allowance.
_SHARED_GROUPS = 4096
# A key with more entries than this merges admissions within this fraction of a period into one entry.
_FINE_PARTS = 600
# Likewise for all keys while `max_entries` is reached.
_COARSE_PARTS = 4


class SlidingWindowLimiter:
    """
    At most `limit` admissions per key in any `period` seconds; refused requests cost nothing.

    Memory is bounded, and a key with recent admissions is never evicted, so using many keys gains nothing. Keys
    beyond `max_keys` share :data:`_SHARED_GROUPS` allowances by a hash that is secret to the process. Admissions at
    the same time form one entry; beyond `max_entries` in total, the admissions of a key within a quarter of the
    period are counted at the latest of them, and within a 600th if the key has more than 600. Reaching a bound only
    delays clients; it never admits more than the limit.

    :ivar limit: of keys without one of their own; may be changed at any time.
    """

    def __init__(self, limit: int, period: float = 60.0, max_keys: int = 20_000, max_entries: int = 65_536) -> None:
        self.limit = limit
        self.period = period
        self._overrides: Mapping[str, int] = {}
        self._max_keys = max_keys
        self._max_entries = max_entries
        self._entry_count = 0
        self._entries: OrderedDict[int, array[float]] = OrderedDict()
        self._shared_entries: dict[int, array[float]] = {}
        self._shared_at = -math.inf

    def __len__(self) -> int:
        """Number of keys; shared groups count as one each."""
        return len(self._entries) + len(self._shared_entries)

    def set_limit(self, limit: int, overrides: Mapping[str, int] | None = None) -> None:
        """Change the limit. :param overrides: limits of single keys."""
        self.limit = limit
        self._overrides = overrides or {}

    def wait(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """
        Whole seconds until `cost` admissions are possible; 0 if they are now.

        :param limit: in place of that of the key.
        """
        name = hash(key)
        limit = self._overrides.get(key, self.limit) if limit is None else limit
        entries = self._entries.get(name) or self._shared_entries.get(name % _SHARED_GROUPS)
        if (entries[0] if entries else 0) + cost <= limit:  # what has expired would only be subtracted
            return 0
        return self._wait(entries, now, cost, limit)

    def has_debts(self, key: str, now: float) -> bool:
        """Whether something was used in advance, and is to be acquired before anything else."""
        return False

    def admit(self, key: str, now: float, cost: int = 1) -> WaitTime:
        """Admit `cost` times, or not at all; the seconds to wait."""
        # On the fast path of every message: no call more than necessary.
        name = hash(key)
        limit = self._overrides.get(key, self.limit)
        own = self._entries.get(name)
        entries = own or self._shared_entries.get(name % _SHARED_GROUPS)
        fits = (entries[0] if entries else 0) + cost <= limit
        is_current = entries is None or len(entries) == 1 or now - self.period < entries[1] <= now
        if not (fits and is_current) and (wait := self._wait(entries, now, cost, limit)):
            return wait
        if own is None:
            own = self._open_entries(name, now)
        else:
            self._entries.move_to_end(name)
        own[0] += cost
        size = len(own)
        if size > 1:
            parts = (
                _COARSE_PARTS if self._entry_count >= self._max_entries else _FINE_PARTS * (size > 2 * _FINE_PARTS)
            )
            if own[-2] == now or (parts and self._is_one_part(own[-2], now, parts)):
                own[-2] = now
                own[-1] += cost
                return 0
        own.append(now)
        own.append(cost)
        self._entry_count += 1
        return 0

    # Limits that are shared with other processes differ in these: DistributedLimiter says how.
    try_admit = charge_deferred = admit
    wait_after_debts = wait

    def refund(self, key: str, cost: int = 1) -> None:
        """Undo the latest admissions, as far as there are any."""
        name = hash(key)
        entries = self._entries.get(name) or self._shared_entries.get(name % _SHARED_GROUPS)
        while entries is not None and len(entries) > 1 and cost:
            amount = min(cost, int(entries[-1]))
            cost -= amount
            entries[0] -= amount
            entries[-1] -= amount
            if not entries[-1]:
                del entries[-2:]
                self._entry_count -= 1

    def _wait(self, entries: array[float] | None, now: float, cost: int, limit: int) -> int:
        if entries is None:
            return 0 if cost <= limit else math.ceil(self.period)
        # A clock set back must not shut anybody out for longer than a period.
        if len(entries) > 1 and not now - self.period < entries[1] <= now:
            self._drop_expired(entries, now)
        too_many = entries[0] + cost - limit
        if too_many <= 0:
            return 0
        for at in range(1, len(entries), 2):
            too_many -= entries[at + 1]
            if too_many <= 0:
                return max(1, math.ceil(entries[at] + self.period - now))
        return math.ceil(self.period)

    def _drop_expired(self, entries: array[float], now: float) -> None:
        """Drop entries that are older than a period."""
        oldest, at = now - self.period, 1
        while at < len(entries) and not oldest < entries[at] <= now:
            entries[0] -= entries[at + 1]
            at += 2
        del entries[1:at]
        self._entry_count -= at // 2

    def _is_one_part(self, last: float, now: float, parts: int) -> bool:
        step = self.period / parts
        return last < now and last // step == now // step

    def _open_entries(self, name: int, now: float) -> array[float]:
        """The entries of a key that has none of its own yet."""
        self._forget(now)
        shared = self._shared_entries.get(name % _SHARED_GROUPS)
        if len(self._entries) < self._max_keys:
            entries = self._entries[name] = self._copied(shared)
            return entries
        self._shared_at = now
        if shared is None:
            shared = self._shared_entries[name % _SHARED_GROUPS] = array("d", (0.0,))
        return shared

    def _copied(self, shared: array[float] | None) -> array[float]:
        """Initial entries of a key that used a shared group: those of the group, an upper bound of its own."""
        if shared is None or len(shared) == 1:
            return array("d", (0.0,))
        entries = array("d", shared)
        if self._entry_count >= self._max_entries:
            entries = array("d", (shared[0], shared[-2], shared[0]))
        self._entry_count += len(entries) // 2
        return entries

    def _forget(self, now: float) -> None:
        """Drop up to two expired keys, so that the table shrinks without any slow call."""
        for _ in range(2):
            if not self._entries:
                break
            entries = next(iter(self._entries.values()))
            if len(entries) > 1 and self._is_recent(entries[-2], now):
                break
            self._entry_count -= len(entries) // 2
            self._entries.popitem(last=False)
        if self._shared_entries and not self._is_recent(self._shared_at, now):
            self._entry_count -= sum(len(entries) // 2 for entries in self._shared_entries.values())
            self._shared_entries.clear()

    def _is_recent(self, moment: float, now: float) -> bool:
        return now - self.period < moment <= now


async def resolve_wait(wait: WaitTime) -> int:
    """The seconds to wait."""
    return wait if isinstance(wait, int) else await wait


# Makes a limiter: its name in the store, its limit, and the seconds of its period.
LimiterFactory = Callable[[str, int, float], SlidingWindowLimiter]


def make_local_limiter(name: str, limit: int, period: float) -> SlidingWindowLimiter:
    """A limiter of this process alone."""
    return SlidingWindowLimiter(limit, period)


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
class RateLimits:
    """
    Limits per minute.

    :param did: of a sender DID.
    :param ip: of an address.
    :param account: of an account.
    :param trusted: addresses that stand for many senders, such as other mediators, as rate limit keys
        (:meth:`~mediatord.http.client_address.ClientAddressResolver.rate_limit_key`).
    :param trusted_ip: of each of these.
    :param connections: new connections of DIDComm v1 per address, trusted or not.
    """

    did: int
    ip: int
    account: int
    trusted: frozenset[str] = frozenset()
    trusted_ip: int = 6000
    connections: int = 30

    def make_overrides(self, usual: int) -> dict[str, int]:
        """Limit of each trusted address, given the usual limit."""
        return dict.fromkeys(self.trusted, max(usual, self.trusted_ip))


class RateLimiter:
    """
    All per-minute limits: sender DIDs, addresses, accounts. The daemon's own probes are exempt.

    :param on_limit: called on every refusal with limiter name, key, address, and seconds to wait.
    :param make_limiter: makes the limiters, of which all but one may be shared with other processes.
    """

    def __init__(
        self,
        clock: IReactorTime,
        on_limit: RateLimitCallback,
        limits: RateLimits,
        make_limiter: LimiterFactory = make_local_limiter,
    ) -> None:
        self._clock = clock
        self._on_limit = on_limit
        self._senders = make_limiter("senders", limits.did, 60.0)
        self._peers = make_limiter("peers", limits.ip, 60.0)
        self._accounts = make_limiter("accounts", limits.account, 60.0)
        self._decryptions = make_limiter("openings", limits.account, 60.0)
        self._readers = make_limiter("readers", limits.account, 60.0)
        self._command_addresses = make_limiter("commanders", limits.account, 60.0)
        self._failed_decryptions = make_limiter("openings in vain", limits.ip, 60.0)
        self._lookups = make_limiter("lookups", _DID_LOOKUPS_PER_MINUTE, 60.0)
        self._connections = make_limiter("connections", limits.connections, 60.0)
        # Local to the process: sharing would cost more than what is counted.
        self._requests = SlidingWindowLimiter(limits.ip)
        self.set_limits(limits)

    def set_limits(self, limits: RateLimits) -> None:
        """Change all limits; requests of the last minute still count."""
        self._trusted = limits.trusted
        self._senders.set_limit(limits.did)
        self._accounts.set_limit(limits.account)
        self._connections.set_limit(limits.connections)
        commands = _ACCOUNTS_PER_ADDRESS * limits.account
        for limiter, limit in (
            (self._peers, limits.ip),
            (self._failed_decryptions, limits.ip),
            (self._decryptions, limits.account),
            (self._readers, limits.account),
            (self._command_addresses, commands),
            (self._requests, max(_MIN_REQUESTS, commands, _REQUESTS_PER_CHARGE * limits.ip)),
        ):
            limiter.set_limit(limit, limits.make_overrides(limit))

    def __len__(self) -> int:
        """Number of keys of all limiters."""
        buckets = (self._senders, self._peers, self._accounts, self._decryptions, self._readers, self._connections)
        return sum(
            map(len, (*buckets, self._command_addresses, self._failed_decryptions, self._lookups, self._requests))
        )

    def charge_request(self, peer: str, count: int = 1) -> bool:
        """
        Charge an address for requests or frames of any kind, before they are processed and on top of other charges.

        :return: whether it is within its limit.
        """
        return peer == PROBE_CLIENT or not self._requests.admit(peer, self._clock.seconds(), count)

    async def check_before_read(self, peer: str, size: int, cost: int = 1) -> None:
        """
        Refuse to parse requests of an address over its limit, to save CPU time, with one exception.

        Wallets behind that address may only pick up messages, which is charged to their accounts. Requests as small
        as theirs are still parsed, up to an account's limit, and until too many of them turn out invalid.

        :param size: size of the envelope in bytes.
        :param cost: what the address will be charged.
        :raise RateLimitExceeded: over the limit.
        """
        if peer == PROBE_CLIENT or not (wait := self._peers.wait_after_debts(peer, self._clock.seconds(), cost)):
            return
        wait = await resolve_wait(wait)
        if wait and size <= SMALL_REQUEST_BYTES:
            wait = await resolve_wait(self._failed_decryptions.wait_after_debts(peer, self._clock.seconds()))
            wait = wait or await resolve_wait(self._decryptions.admit(peer, self._clock.seconds()))
        if wait:
            self._refuse(wait, "ip", peer, peer)

    def may_read(self, peer: str, cost: int = 1) -> bool:
        """Whether :meth:`check_before_read` would succeed without asking the store."""
        now = self._clock.seconds()
        return peer == PROBE_CLIENT or not (self._peers.wait(peer, now, cost) or self._peers.has_debts(peer, now))

    def check_before_decryption(self, peer: str, *, authenticated: bool) -> None:
        """
        Second half of :meth:`check_before_read`: of an address over its limit, only authcrypts are decrypted.

        :raise RateLimitExceeded: over the limit.
        """
        if not authenticated:
            self.check_allowance(None, peer)

    def charge_failure(self, peer: str, size: int = 0) -> None:
        """
        Charge an address for a message that was unreadable, undecryptable or repeated.

        :param size: in bytes, where the cost depends on it.
        """
        now = self._clock.seconds()
        for _ in range(compute_request_cost(size) if peer != PROBE_CLIENT else 0):
            if self._peers.charge_deferred(peer, now):
                self._failed_decryptions.charge_deferred(peer, now)
                break

    async def charge_anonymous(self, peer: str, count: int = 1) -> None:
        """
        Charge an address for payloads to forward, or for a request without an account, by size.

        :raise RateLimitExceeded: over the limit.
        """
        if count and peer != PROBE_CLIENT and (wait := self._peers.admit(peer, self._clock.seconds(), count)):
            await self._refuse_after(wait, "ip", peer, peer)

    def try_charge_anonymous(self, peer: str, cost: int = 1) -> bool:
        """
        Charge an address for one payload if no store access is needed; equals :meth:`check_before_read`,
        :meth:`check_before_decryption` and :meth:`charge_anonymous` together.

        :return: False if nothing was charged and these have to decide.
        """
        return peer == PROBE_CLIENT or not self._peers.try_admit(peer, self._clock.seconds(), cost)

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
        if who is not None and (wait := self._senders.admit(who, self._clock.seconds(), count)):
            await self._refuse_after(wait, "did", proven or peer, peer)

    def check_allowance(self, account: str | None, peer: str) -> None:
        """
        Check, without charging, whether an account (or an address without one) may make a request.

        :raise RateLimitExceeded: over the limit.
        """
        if peer == PROBE_CLIENT:
            return
        limiter, limit, who = (self._peers, "ip", peer) if account is None else (self._accounts, "account", account)
        if wait := limiter.wait(who, self._clock.seconds()):
            self._refuse(wait, limit, who, peer)

    async def charge_account(self, did: str, peer: str, cost: int = 1) -> None:
        """
        Charge an account for its coordination and pickup requests, or its commands.

        :raise RateLimitExceeded: over the limit.
        """
        if peer != PROBE_CLIENT and (wait := self._accounts.admit(did, self._clock.seconds(), cost)):
            await self._refuse_after(wait, "account", did, peer)

    def try_charge_account(self, did: str, peer: str, cost: int = 1) -> bool:
        """
        As :meth:`charge_account` if no store access is needed.

        :return: False if nothing was charged and that has to decide.
        """
        return peer == PROBE_CLIENT or not self._accounts.try_admit(did, self._clock.seconds(), cost)

    async def charge_command(self, peer: str, size: int) -> None:
        """
        Charge an address for reading a command. DIDs are free to create, so their limits do not bound an address.

        :raise RateLimitExceeded: over the limit.
        """
        if wait := self._command_addresses.admit(peer, self._clock.seconds(), 1 + size // SMALL_REQUEST_BYTES):
            await self._refuse_after(wait, "account", peer, peer)

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
        await self._refuse_after(self._readers.admit(peer, self._clock.seconds()), "account", peer, peer)

    async def charge_connection(self, peer: str) -> None:
        """
        Charge an address for a new connection of DIDComm v1.

        :raise RateLimitExceeded: over the limit.
        """
        if peer != PROBE_CLIENT:
            await self._refuse_after(self._connections.admit(peer, self._clock.seconds()), "connections", peer, peer)

    async def charge_did_lookup(self, peer: str) -> int:
        """Charge an address for fetching a did:web document; returns the seconds to wait, or 0."""
        return await resolve_wait(self._lookups.admit(peer, self._clock.seconds()))

    async def _refuse_after(self, wait: WaitTime, limit: str, who: str, peer: str) -> None:
        if seconds := await resolve_wait(wait):
            self._refuse(seconds, limit, who, peer)

    def _refuse(self, wait: int, limit: str, who: str, peer: str) -> NoReturn:
        self._on_limit(limit, who, peer, wait)
        raise RateLimitExceeded(retry_after=wait)
