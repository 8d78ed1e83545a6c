"""
Bounding the memory of requests that are being served.

A request is parsed before the store is asked about it, and a tree of JSON takes many times the bytes of its text.
Those of many connections would add up while the store is slow, so a request is parsed when there is room for it.

Who may have how much of the mediator's time, in both halves (UC-021 AF-2, DIDComm reference 4.1, 4.2 and 12).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RateLimitExceeded
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.probe_requests import PROBE_CLIENT
from mediatord.ratelimit.distributed_limiter import KeyedLimiter, QuotaStore

MAX_MEMORY_PER_ADDRESS = 67_108_864
MAX_MEMORY_TOTAL = 268_435_456
# What a request may come to: its bytes, sealed and open, and a tree of as many values as are allowed. Of JSON that is
# nothing but the smallest objects, a byte becomes about 46.
_COPIES_OF_REQUEST = 4
_MAX_TREE_BYTES = 12_000_000
_MAX_BYTES_PER_BYTE = 50
# Seconds that a request waits for room; it is answered late by then anyway.
MEMORY_WAIT_SECONDS = 10.0


def estimate_request_memory(size: int) -> int:
    """Bytes of memory that a request of so many bytes may take, until it is answered."""
    return min(_MAX_BYTES_PER_BYTE * size, _COPIES_OF_REQUEST * size + _MAX_TREE_BYTES)


class RequestMemoryBudget:
    """
    Counts what requests may take, for each address and for all.

    A request of an address that has no other always has room for itself.
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
        """Requests, and bytes that they may take."""
        return self._requests, self._total

    def try_acquire(self, peer: str, size: int) -> bool:
        """Whether a request may be parsed at once; if so, :meth:`give_back` follows."""
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
        Wait until a request may be parsed, where it may not at once; :meth:`give_back` follows.

        :raise RateLimitExceeded: that takes too long.
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
        if place not in waiting:  # it has room, and is about to begin
            return
        waiting.remove(place)
        if not waiting:
            del self._waiting[peer]
        place[1].errback(RateLimitExceeded(retry_after=5))

    def release(self, peer: str, size: int) -> None:
        """A request is answered, or given up."""
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
        """Let those requests of an address begin that there is room for."""
        while waiting := self._waiting.get(peer):
            size, turn = waiting[0]
            if not self._take(peer, size):
                return
            waiting.popleft()
            if not waiting:
                del self._waiting[peer]
            # In a call of its own: whoever gives back is not held up by what others do then.
            self._clock.callLater(0, turn.callback, None)


RateLimitCallback = Callable[[str, str, str, int], None]

# No request of a wallet about its own mail is larger, in bytes.
SMALL_REQUEST_BYTES = 65_536

# As many accounts as this may use up their minute behind one address.
_ACCOUNTS_PER_ADDRESS = 10
# Requests of an address, valid or not, for each that may be charged for a payload.
_REQUESTS_PER_CHARGE = 50
_MIN_REQUESTS = 1000
# did:web documents that one address may make us fetch in a minute (reference 8.5).
_DID_LOOKUPS_PER_MINUTE = 10


def compute_request_cost(size: int) -> int:
    """What reading so many bytes costs, where that grows with them: one, and one more for each 64 KiB."""
    return 1 + size // SMALL_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class TrustedAddresses:
    """
    Addresses behind which are many senders, such as another mediator.

    :param peers: what they are called where somebody pays (:meth:`~mediatord.http.client_address.ClientAddressResolver.payer`).
    :param per_minute: of each of them, where others have less.
    """

    peers: frozenset[str] = frozenset()
    per_minute: int = 6000

    def make_overrides(self, usual: int) -> dict[str, int]:
        """The limit of each of them where others have the usual one."""
        return dict.fromkeys(self.peers, max(usual, self.per_minute))


class RateLimiter:
    """
    The buckets: a sender DID, an address, and an account's own business. Nothing is charged for what the daemon sends
    to itself.

    :param on_limit: told of every refusal: bucket name, whose bucket, address, seconds to wait.
    :param allowances: what is shared with other processes; None when this is the only one.
    :ivar memory: of requests that are being served.
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
        allowances: QuotaStore | None = None,
    ) -> None:
        def bucket(name: str, limit: int) -> KeyedLimiter:
            return KeyedLimiter(clock, name, limit, allowances)

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
        # Of this process alone: asking others would cost more than what is counted.
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
        """Go by other limits; what was used within the last minute counts."""
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
        """How many keys are remembered, over all buckets."""
        buckets = (self._senders, self._peers, self._accounts, self._decryptions, self._readers)
        return sum(
            map(len, (*buckets, self._command_addresses, self._failed_decryptions, self._lookups, self._requests))
        )

    def charge_request(self, peer: str, count: int = 1) -> bool:
        """
        Charge an address for requests or frames of any kind, before anything is done about them, and whether or not
        they are charged for something else as well.

        :return: whether it is within its limit.
        """
        return peer == PROBE_CLIENT or self._requests.try_admit(peer, count)

    async def check_before_read(self, peer: str, size: int, cost: int = 1) -> None:
        """
        Protect the CPU: from an address that has used up its minute nothing more is read, with one exception.

        Behind that address may be wallets that only fetch their mail, which is not theirs to pay for: what is as
        small as their requests are is still looked at, up to the limit of an account, and until that was in vain too
        often.

        :param size: bytes of the envelope.
        :param cost: what the address will be charged for it.
        :raise RateLimitExceeded: not now.
        """
        if peer == PROBE_CLIENT:
            return
        wait = await self._peers.wait_after_debts(peer, cost)
        if wait and size <= SMALL_REQUEST_BYTES:
            wait = await self._failed_decryptions.wait_after_debts(peer) or await self._decryptions.admit(peer)
        self._refuse_if(wait, "ip", peer, peer)

    def check_before_decryption(self, peer: str, *, authenticated: bool) -> None:
        """
        The second half of :meth:`before_reading`: only what claims an authenticated sender is opened as well.

        :raise RateLimitExceeded: not now.
        """
        if not authenticated and peer != PROBE_CLIENT:
            self._refuse_if(self._peers.wait(peer), "ip", peer, peer)

    def charge_failure(self, peer: str, size: int = 0) -> None:
        """
        Charge an address for what could not be read or opened, or came before.

        :param size: bytes of it, where reading costs more the longer it is.
        """
        for _ in range(compute_request_cost(size) if peer != PROBE_CLIENT else 0):
            if self._peers.charge_deferred(peer):
                self._failed_decryptions.charge_deferred(peer)
                break

    async def charge_anonymous(self, peer: str, count: int = 1) -> None:
        """
        Charge an address for payloads to be forwarded, or for a request of somebody without an account, by size.

        :raise RateLimitExceeded: it is over its limit.
        """
        if count and peer != PROBE_CLIENT:
            self._refuse_if(await self._peers.admit(peer, count), "ip", peer, peer)

    def try_charge_anonymous(self, peer: str, cost: int = 1) -> bool:
        """
        Charge an address for one payload, which may be read, opened and forwarded then: what :meth:`before_reading`,
        :meth:`before_opening` and :meth:`stranger` come to, where nobody has to be asked and nothing is refused.

        :return: whether that was so; otherwise nothing was charged, and they decide.
        """
        return peer == PROBE_CLIENT or self._peers.try_admit(peer, cost)

    def refund_anonymous(self, peer: str, cost: int = 1) -> None:
        """Undo :meth:`stranger_at_once`."""
        if peer != PROBE_CLIENT:
            self._peers.refund(peer, cost)

    async def charge_sender(self, proven: str | None, claimed: str | None, peer: str, count: int = 1) -> None:
        """
        Charge the sender for payloads: the proven DID; else the claimed one, for this address only, so that nobody
        can use up the allowance of somebody else; else only the address pays. What a trusted address passes on is
        not charged to its sender.

        :raise RateLimitExceeded: it is over its limit.
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
        Ask, without charging, whether an account may make a request; or an address, for somebody without one.

        :raise RateLimitExceeded: not now.
        """
        if peer == PROBE_CLIENT:
            return
        if account is None:
            self._refuse_if(self._peers.wait(peer), "ip", peer, peer)
        else:
            self._refuse_if(self._accounts.wait(account), "account", account, peer)

    async def charge_account(self, did: str, peer: str, cost: int = 1) -> None:
        """
        Charge an account for its own coordination and pickup, or its own commands.

        :raise RateLimitExceeded: it is over its limit.
        """
        if peer != PROBE_CLIENT:
            self._refuse_if(await self._accounts.admit(did, cost), "account", did, peer)

    async def charge_command(self, peer: str, size: int) -> None:
        """
        Charge an address for reading a command, whatever it is: DIDs cost nothing, so their own limits do not bound
        what one address can ask for.

        :raise RateLimitExceeded: it is over its limit.
        """
        self._refuse_if(await self._command_addresses.admit(peer, compute_request_cost(size)), "account", peer, peer)

    def refund(self, did: str, peer: str, *, outgoing: bool, cost: int = 1) -> None:
        """Undo the last charge of :meth:`sender` or :meth:`account`: the DID had no part in what was refused."""
        if not outgoing:
            self._accounts.refund(did, cost)
        elif peer not in self._trusted:
            self._senders.refund(did, cost)

    async def charge_public_read(self, peer: str) -> None:
        """
        Charge an address for reading what is public.

        :raise RateLimitExceeded: it is over its limit.
        """
        self._refuse_if(await self._readers.admit(peer), "account", peer, peer)

    async def charge_did_lookup(self, peer: str) -> int:
        """Charge an address for a did:web document that has to be fetched; seconds to wait, or 0."""
        return await self._lookups.admit(peer)

    def _refuse_if(self, wait: int, bucket: str, who: str, peer: str) -> None:
        if wait:
            self._on_limit(bucket, who, peer, wait)
            raise RateLimitExceeded(retry_after=wait)
