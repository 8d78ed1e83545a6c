"""Who may register an account: access lists, and quotas per address and in total."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RegistrationCapacityExceeded, RegistrationLimitExceeded
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.rate_limiter import LimiterFactory, RateLimitCallback, make_local_limiter, resolve_wait
from mediatord.store.interfaces.store import AccountUsage, IAccountStore

_WILDCARD_SUFFIX = ":*"


class AccessList:
    """
    Allow and deny lists of DIDs, for one protocol.

    Entries are DIDs, or patterns ending in `:*` such as `did:web:example.com:*`. Deny takes precedence. Entries match
    all forms of a DID (:mod:`mediatord.protocol.canonical_did`).
    """

    def __init__(self) -> None:
        self._allowed: _DIDPatterns | None = None
        self._denied: _DIDPatterns | None = None

    def set_lists(self, allow: Collection[str] | None, deny: Collection[str]) -> None:
        """
        Replace the lists.

        :param allow: DIDs that may have an account; None for all.
        :param deny: DIDs that may not, and whose authenticated requests are refused.
        """
        self._allowed = None if allow is None else _DIDPatterns(allow)
        self._denied = _DIDPatterns(deny) if deny else None

    def allows(self, did: str) -> bool:
        """Whether a DID may have an account."""
        return not self.denies(did) and (self._allowed is None or did in self._allowed)

    def denies(self, did: str) -> bool:
        """Whether a DID is denied."""
        return self._denied is not None and did in self._denied


class _DIDPatterns:
    def __init__(self, names: Collection[str]) -> None:
        below = [name.removesuffix(_WILDCARD_SUFFIX) for name in names if name.endswith(_WILDCARD_SUFFIX)]
        self._exact = frozenset(compute_did_digest(name) for name in names if not name.endswith(_WILDCARD_SUFFIX))
        self._below = tuple(f"{name}:" for one in below for name in (one, canonicalize_did(one)))

    def __contains__(self, did: str) -> bool:
        if self._below and any(one.startswith(self._below) for one in (did, canonicalize_did(did))):
            return True
        return bool(self._exact) and compute_did_digest(did) in self._exact


DAY_SECONDS = 86_400.0
# Seconds for which the usage reported by the store is used, plus what this process admitted since.
USAGE_CACHE_SECONDS = 10.0
# Retry-After when total capacity is exhausted: others have to leave first.
_CAPACITY_RETRY_SECONDS = 3_600


@dataclass(frozen=True, slots=True)
class RegistrationLimits:
    """
    Limits of registrations.

    :param accounts_per_day: accounts and Decentrl registrations per address in 24 hours.
    :param bytes_per_day: bytes of DIDs and registrations per address in 24 hours.
    :param accounts: total number of accounts.
    :param bytes: total bytes of DIDs and registrations.
    :param trusted: addresses with higher daily limits.
    :param trusted_factor: factor of these limits.
    """

    accounts_per_day: int = 1000
    bytes_per_day: int = 4_194_304
    accounts: int = 1_000_000
    bytes: int = 1_073_741_824
    trusted: frozenset[str] = frozenset()
    trusted_factor: int = 1

    def make_overrides(self, usual: int) -> dict[str, int]:
        """Limits of trusted addresses, given the usual limit."""
        return dict.fromkeys(self.trusted, usual * self.trusted_factor)


class RegistrationQuota:
    """
    Charges addresses for data that is stored without expiry. The daemon's own probes are exempt.

    Limits per address are kept in memory for a bounded number of addresses, and shared with other processes as far as
    the store responds. Totals are compared with the store every few seconds, so several processes may exceed them by
    what they admit in between.

    :param on_limit: as for :class:`~mediatord.ratelimit.rate_limiter.RateLimiter`, and so is `make_limiter`.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IAccountStore,
        on_limit: RateLimitCallback,
        limits: RegistrationLimits,
        make_limiter: LimiterFactory = make_local_limiter,
    ) -> None:
        self._clock = clock
        self._store = store
        self._on_limit = on_limit
        self._limits = limits
        self._accounts = make_limiter("accounts a day", limits.accounts_per_day, DAY_SECONDS)
        self._bytes = make_limiter("registered bytes a day", limits.bytes_per_day, DAY_SECONDS)
        self.set_limits(limits)
        self._usage = AccountUsage(0, 0)
        self._asked_at = -inf

    def __len__(self) -> int:
        """Number of keys of both limiters."""
        return len(self._accounts) + len(self._bytes)

    def set_limits(self, limits: RegistrationLimits) -> None:
        """Change the limits; registrations of the last day still count."""
        self._limits = limits
        self._accounts.set_limit(limits.accounts_per_day, limits.make_overrides(limits.accounts_per_day))
        self._bytes.set_limit(limits.bytes_per_day, limits.make_overrides(limits.bytes_per_day))

    async def usage(self) -> AccountUsage:
        """
        Usage of all accounts.

        :raise StoreUnavailable: unknown.
        """
        now = self._clock.seconds()
        if not 0 <= now - self._asked_at < USAGE_CACHE_SECONDS:
            self._usage = await self._store.get_account_usage()
            self._asked_at = now
        return self._usage

    async def charge(self, peer: str, size: int, accounts: int = 0) -> None:
        """
        Charge an address for registrations of `size` bytes.

        :param accounts: 1 for an account with a DID of `size` bytes, or for a Decentrl registration.
        :raise RegistrationLimitExceeded: the address is over its daily limit.
        :raise RegistrationCapacityExceeded: total capacity is exhausted.
        """
        if peer == PROBE_CLIENT or not (size or accounts):
            return
        usage = await self.usage()
        after = AccountUsage(usage.accounts + accounts, usage.bytes + size)
        if accounts and after.accounts > self._limits.accounts:
            self._refuse_all("accounts", peer)
        if after.bytes > self._limits.bytes:
            self._refuse_all("registration_bytes", peer)
        if accounts:
            wait = await resolve_wait(self._accounts.admit(peer, self._clock.seconds(), accounts))
            self._refuse_if(wait, "accounts_per_address_per_day", peer)
        wait = await resolve_wait(self._bytes.admit(peer, self._clock.seconds(), size))
        if wait and accounts:
            self._accounts.refund(peer, accounts)
        self._refuse_if(wait, "registration_bytes_per_address_per_day", peer)
        self._usage = AccountUsage(self._usage.accounts + accounts, self._usage.bytes + size)

    def refund(self, peer: str, size: int, accounts: int = 0) -> None:
        """Undo a charge for something that was not stored."""
        if peer == PROBE_CLIENT:
            return
        self._usage = AccountUsage(self._usage.accounts - accounts, self._usage.bytes - size)
        if size:
            self._bytes.refund(peer, size)
        if accounts:
            self._accounts.refund(peer, accounts)

    def _refuse_if(self, wait: int, limit: str, peer: str) -> None:
        if wait:
            self._on_limit(limit, peer, peer, wait)
            raise RegistrationLimitExceeded(retry_after=wait)

    def _refuse_all(self, limit: str, peer: str) -> None:
        self._on_limit(limit, peer, peer, _CAPACITY_RETRY_SECONDS)
        raise RegistrationCapacityExceeded
