"""
Who may have an account in one half of the mediator, and whom it does not serve at all.

How many accounts may be opened, and how many bytes registered: by an address in a day, and in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RegistrationCapacityExceeded, RegistrationLimitExceeded
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.protocol.probe_requests import PROBE_CLIENT
from mediatord.ratelimit.distributed_limiter import KeyedLimiter, QuotaStore
from mediatord.ratelimit.rate_limiter import RateLimitCallback
from mediatord.store.interfaces.accounts import AccountUsage, IAccountStore

_WILDCARD_SUFFIX = ":*"


class AccessList:
    """
    DIDs by name, and all DIDs below one that ends in `:*`, such as `did:web:example.com:*`. What is denied is denied,
    whatever else is allowed. A DID is meant in all its forms (:mod:`mediatord.protocol.canonical_did`).
    """

    def __init__(self) -> None:
        self._allowed: _DIDPatterns | None = None
        self._denied = _DIDPatterns(())

    def set_lists(self, allow: Iterable[str] | None, deny: Iterable[str]) -> None:
        """
        Go by other lists from now on.

        :param allow: who may have an account; None for everybody.
        :param deny: who may have none and is refused what it authenticates.
        """
        self._allowed = None if allow is None else _DIDPatterns(allow)
        self._denied = _DIDPatterns(deny)

    def allows(self, did: str) -> bool:
        """Whether it may have an account."""
        return not self.denies(did) and (self._allowed is None or did in self._allowed)

    def denies(self, did: str) -> bool:
        """Whether it is not served."""
        return did in self._denied


class _DIDPatterns:
    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        below = [name.removesuffix(_WILDCARD_SUFFIX) for name in names if name.endswith(_WILDCARD_SUFFIX)]
        self._exact = frozenset(compute_did_digest(name) for name in names if not name.endswith(_WILDCARD_SUFFIX))
        self._below = tuple(f"{name}:" for one in below for name in (one, canonicalize_did(one)))

    def __contains__(self, did: str) -> bool:
        if self._below and any(one.startswith(self._below) for one in (did, canonicalize_did(did))):
            return True
        return bool(self._exact) and compute_did_digest(did) in self._exact


DAY_SECONDS = 86_400.0
# Seconds for which what the store said of all accounts is taken for true, but for what was admitted here since.
USAGE_CACHE_SECONDS = 10.0
# Seconds after which trying again makes sense when there is no room in all: somebody has to leave.
_CAPACITY_RETRY_SECONDS = 3_600


@dataclass(frozen=True, slots=True)
class RegistrationLimits:
    """
    :param accounts_per_day: accounts and Decentrl registrations that one address may make in 24 hours.
    :param bytes_per_day: of DIDs and registrations that one address may have stored in 24 hours.
    :param accounts: of all addresses together, as long as there are so many.
    :param bytes: of all DIDs and registrations.
    :param trusted: addresses that have more in a day than others.
    :param trusted_factor: how many times as much they have.
    """

    accounts_per_day: int = 1000
    bytes_per_day: int = 4_194_304
    accounts: int = 1_000_000
    bytes: int = 1_073_741_824
    trusted: frozenset[str] = frozenset()
    trusted_factor: int = 1

    def make_overrides(self, usual: int) -> dict[str, int]:
        """The limits of trusted addresses where others have the usual one."""
        return dict.fromkeys(self.trusted, usual * self.trusted_factor)


class RegistrationQuota:
    """
    Charges addresses for what is stored without an end. Nothing is charged for what the daemon sends to itself.

    The limits of an address are kept in memory, of a bounded number of addresses, and shared with other processes as
    far as the store answers. Those in all are compared with what the store says every few seconds, so that several
    processes together may be over them by what they admit meanwhile.

    :param on_limit: as for :class:`RateLimiter`.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IAccountStore,
        on_limit: RateLimitCallback,
        limits: RegistrationLimits,
        allowances: QuotaStore | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._on_limit = on_limit
        self._limits = limits
        self._accounts = KeyedLimiter(clock, "accounts a day", limits.accounts_per_day, allowances, DAY_SECONDS)
        self._bytes = KeyedLimiter(clock, "registered bytes a day", limits.bytes_per_day, allowances, DAY_SECONDS)
        self.set_limits(limits)
        self._usage = AccountUsage(0, 0)
        self._asked_at = -inf

    def __len__(self) -> int:
        """How many keys are remembered, over both limits."""
        return len(self._accounts) + len(self._bytes)

    def set_limits(self, limits: RegistrationLimits) -> None:
        """Go by other limits; what was used within the last day counts."""
        self._limits = limits
        self._accounts.set_limit(limits.accounts_per_day, limits.make_overrides(limits.accounts_per_day))
        self._bytes.set_limit(limits.bytes_per_day, limits.make_overrides(limits.bytes_per_day))

    async def usage(self) -> AccountUsage:
        """
        What all accounts take.

        :raise StoreUnavailable: it is not known.
        """
        now = self._clock.seconds()
        if not 0 <= now - self._asked_at < USAGE_CACHE_SECONDS:
            self._usage = await self._store.get_account_usage()
            self._asked_at = now
        return self._usage

    async def charge_account(self, peer: str, size: int) -> None:
        """
        Charge an address for an account with a DID of so many bytes, or for a Decentrl registration.

        :raise RegistrationLimitExceeded: the address has had its share of today.
        :raise RegistrationCapacityExceeded: there is no room for anybody.
        """
        if peer != PROBE_CLIENT:
            await self._charge(peer, 1, size)

    async def charge_registration(self, peer: str, size: int) -> None:
        """
        Charge an address for registrations of so many bytes.

        :raise RegistrationLimitExceeded: as :meth:`enrol`; likewise RegistrationCapacityExceeded.
        """
        if peer != PROBE_CLIENT and size:
            await self._charge(peer, 0, size)

    def refund(self, peer: str, size: int, accounts: int = 0) -> None:
        """Undo a charge, of what was not stored."""
        if peer == PROBE_CLIENT:
            return
        self._usage = AccountUsage(self._usage.accounts - accounts, self._usage.bytes - size)
        if size:
            self._bytes.refund(peer, size)
        if accounts:
            self._accounts.refund(peer, accounts)

    async def _charge(self, peer: str, accounts: int, size: int) -> None:
        usage = await self.usage()
        after = AccountUsage(usage.accounts + accounts, usage.bytes + size)
        if accounts and after.accounts > self._limits.accounts:
            self._refuse_all("accounts", peer)
        if after.bytes > self._limits.bytes:
            self._refuse_all("registration_bytes", peer)
        if accounts:
            self._refuse_if(await self._accounts.admit(peer, accounts), "accounts_per_address_per_day", peer)
        wait = await self._bytes.admit(peer, size)
        if wait and accounts:
            self._accounts.refund(peer, accounts)
        self._refuse_if(wait, "registration_bytes_per_address_per_day", peer)
        self._usage = AccountUsage(self._usage.accounts + accounts, self._usage.bytes + size)

    def _refuse_if(self, wait: int, limit: str, peer: str) -> None:
        if wait:
            self._on_limit(limit, peer, peer, wait)
            raise RegistrationLimitExceeded(retry_after=wait)

    def _refuse_all(self, limit: str, peer: str) -> None:
        self._on_limit(limit, peer, peer, _CAPACITY_RETRY_SECONDS)
        raise RegistrationCapacityExceeded
