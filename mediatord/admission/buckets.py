"""Who may have how much of the mediator's time, in both halves (UC-021 AF-2, DIDComm reference 4.1, 4.2 and 12)."""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from mediatord.admission.allowances import Allowances
from mediatord.admission.share import Share
from mediatord.errors import RateLimited
from mediatord.protocol.limits import SlidingWindow
from mediatord.synthetic import ITSELF

OnLimit = Callable[[str, str, str, int], None]

# No request of a wallet about its own mail is larger, in bytes.
SMALL = 65_536


# As many accounts as this may use up their minute behind one address.
_ACCOUNTS_BEHIND_ONE = 10
# did:web documents that one address may make us fetch in a minute (reference 8.5).
_LOOKUPS = 10


def weight(size: int) -> int:
    """What reading so many bytes costs, where that grows with them: one, and one more for each 64 KiB."""
    return 1 + size // SMALL


class Bucket:
    """
    One limit, for many keys: exactly in this process, and with all others as far as the store answers; while it does
    not, this process has its part of the limit.

    Waits are whole seconds, and 0 means that it is admitted.
    """

    def __init__(
        self, clock: IReactorTime, name: str, limit: int, allowances: Allowances | None, period: float = 60.0
    ) -> None:
        self._clock = clock
        self._window = SlidingWindow(limit, period)
        self._share = None
        if allowances is not None:

            def alone(key: str, more: int) -> float:
                return self._window.wait(key, clock.seconds(), more, allowances.part(self._window.limit))

            self._share = Share(clock, allowances, name, limit, alone=alone, period=period)

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._window)

    def change(self, limit: int) -> None:
        """Go by another limit from now on."""
        if limit != self._window.limit:
            self._window.limit = limit
            if self._share is not None:
                self._share.change(limit)

    def wait(self, key: str) -> int:
        """Whether `key` is known to be over its limit."""
        wait = self._window.wait(key, self._clock.seconds())
        if wait or self._share is None:
            return wait
        return math.ceil(self._share.wait(key))

    async def standing(self, key: str) -> int:
        """The same, once everything it used is paid for."""
        wait = self.wait(key)
        if not wait and self._share is not None and self._share.owes(key):
            wait = math.ceil(await self._share.take(key, 0))
        return wait

    async def admit(self, key: str, cost: int = 1) -> int:
        """Charge `key`; what is refused costs nothing."""
        wait = self._window.admit(key, self._clock.seconds(), cost)
        if not wait and self._share is not None:
            wait = math.ceil(await self._share.take(key, cost))
            if wait:
                self._window.give_back(key, cost)
        return wait

    def admit_at_once(self, key: str) -> bool:
        """Charge `key` once if that is known to be within its limit without asking anybody."""
        if self._window.admit(key, self._clock.seconds()):
            return False
        if self._share is None or self._share.take_at_once(key, 1):
            return True
        self._window.give_back(key)
        return False

    def owe(self, key: str) -> int:
        """Charge `key` for what was done already; the other processes know later."""
        wait = self._window.admit(key, self._clock.seconds())
        if not wait and self._share is not None:
            wait = math.ceil(self._share.owe(key, 1))
            if wait:
                self._window.give_back(key)
        return wait

    def give_back(self, key: str, cost: int) -> None:
        """Undo a charge; the other processes know later."""
        self._window.give_back(key, cost)
        if self._share is not None:
            self._share.give_back(key, cost)


class Admission:
    """
    The buckets: a sender DID, an address, and an account's own business. Nothing is charged for what the daemon sends
    to itself.

    :param on_limit: told of every refusal: bucket name, whose bucket, address, seconds to wait.
    :param allowances: what is shared with other processes; None when this is the only one.
    """

    def __init__(
        self,
        clock: IReactorTime,
        on_limit: OnLimit,
        *,
        did_per_minute: int,
        ip_per_minute: int,
        account_per_minute: int,
        allowances: Allowances | None = None,
    ) -> None:
        def bucket(name: str, limit: int) -> Bucket:
            return Bucket(clock, name, limit, allowances)

        self._on_limit = on_limit
        self._senders = bucket("senders", did_per_minute)
        self._peers = bucket("peers", ip_per_minute)
        self._accounts = bucket("accounts", account_per_minute)
        self._openings = bucket("openings", account_per_minute)
        self._readers = bucket("readers", account_per_minute)
        self._commanders = bucket("commanders", _ACCOUNTS_BEHIND_ONE * account_per_minute)
        self._openings_in_vain = bucket("openings in vain", ip_per_minute)
        self._lookups = bucket("lookups", _LOOKUPS)

    def change(self, *, did_per_minute: int, ip_per_minute: int, account_per_minute: int) -> None:
        """Go by other limits; what was used within the last minute counts."""
        self._senders.change(did_per_minute)
        for bucket in (self._peers, self._openings_in_vain):
            bucket.change(ip_per_minute)
        for bucket in (self._accounts, self._openings, self._readers):
            bucket.change(account_per_minute)
        self._commanders.change(_ACCOUNTS_BEHIND_ONE * account_per_minute)

    def __len__(self) -> int:
        """How many keys are remembered, over all buckets."""
        buckets = (self._senders, self._peers, self._accounts, self._openings, self._readers)
        return sum(map(len, (*buckets, self._commanders, self._openings_in_vain, self._lookups)))

    async def before_reading(self, peer: str, size: int) -> None:
        """
        Protect the CPU: from an address that has used up its minute nothing more is read, with one exception.

        Behind that address may be wallets that only fetch their mail, which is not theirs to pay for: what is as
        small as their requests are is still looked at, up to the limit of an account, and until that was in vain too
        often.

        :param size: bytes of the envelope.
        :raise RateLimited: not now.
        """
        if peer == ITSELF:
            return
        wait = await self._peers.standing(peer)
        if wait and size <= SMALL:
            wait = await self._openings_in_vain.standing(peer) or await self._openings.admit(peer)
        self._refuse_if(wait, "ip", peer, peer)

    def before_opening(self, peer: str, *, authenticated: bool) -> None:
        """
        The second half of :meth:`before_reading`: only what claims an authenticated sender is opened as well.

        :raise RateLimited: not now.
        """
        if not authenticated and peer != ITSELF:
            self._refuse_if(self._peers.wait(peer), "ip", peer, peer)

    def in_vain(self, peer: str, size: int = 0) -> None:
        """
        Charge an address for what could not be read or opened, or came before.

        :param size: bytes of it, where reading costs more the longer it is.
        """
        for _ in range(weight(size) if peer != ITSELF else 0):
            if self._peers.owe(peer):
                self._openings_in_vain.owe(peer)
                break

    async def stranger(self, peer: str, count: int = 1) -> None:
        """
        Charge an address for payloads to be forwarded, or for a request of somebody without an account.

        :raise RateLimited: it is over its limit.
        """
        if count and peer != ITSELF:
            self._refuse_if(await self._peers.admit(peer, count), "ip", peer, peer)

    def stranger_at_once(self, peer: str) -> bool:
        """
        Charge an address for one payload, which may be read, opened and forwarded then: what :meth:`before_reading`,
        :meth:`before_opening` and :meth:`stranger` come to, where nobody has to be asked and nothing is refused.

        :return: whether that was so; otherwise nothing was charged, and they decide.
        """
        return peer == ITSELF or self._peers.admit_at_once(peer)

    def not_a_stranger(self, peer: str) -> None:
        """Undo :meth:`stranger_at_once`."""
        if peer != ITSELF:
            self._peers.give_back(peer, 1)

    async def sender(self, proven: str | None, claimed: str | None, peer: str, count: int = 1) -> None:
        """
        Charge the sender for payloads: the proven DID; else the claimed one, for this address only, so that nobody
        can use up the allowance of somebody else; else only the address pays.

        :raise RateLimited: it is over its limit.
        """
        if peer == ITSELF:
            return
        who = proven
        if who is None and claimed is not None:
            who = f"{peer} {claimed}"
        if who is not None:
            self._refuse_if(await self._senders.admit(who, count), "did", proven or peer, peer)

    def has_allowance(self, account: str | None, peer: str) -> None:
        """
        Ask, without charging, whether an account may make a request; or an address, for somebody without one.

        :raise RateLimited: not now.
        """
        if peer == ITSELF:
            return
        if account is None:
            self._refuse_if(self._peers.wait(peer), "ip", peer, peer)
        else:
            self._refuse_if(self._accounts.wait(account), "account", account, peer)

    async def account(self, did: str, peer: str, cost: int = 1) -> None:
        """
        Charge an account for its own coordination and pickup, or its own commands.

        :raise RateLimited: it is over its limit.
        """
        if peer != ITSELF:
            self._refuse_if(await self._accounts.admit(did, cost), "account", did, peer)

    async def command(self, peer: str, size: int) -> None:
        """
        Charge an address for reading a command, whatever it is: DIDs cost nothing, so their own limits do not bound
        what one address can ask for.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(await self._commanders.admit(peer, weight(size)), "account", peer, peer)

    def give_back(self, did: str, *, outgoing: bool, cost: int = 1) -> None:
        """Undo the last charge of :meth:`sender` or :meth:`account`: the DID had no part in what was refused."""
        (self._senders if outgoing else self._accounts).give_back(did, cost)

    async def reader(self, peer: str) -> None:
        """
        Charge an address for reading what is public.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(await self._readers.admit(peer), "account", peer, peer)

    async def lookup(self, peer: str) -> int:
        """Charge an address for a did:web document that has to be fetched; seconds to wait, or 0."""
        return await self._lookups.admit(peer)

    def _refuse_if(self, wait: int, bucket: str, who: str, peer: str) -> None:
        if wait:
            self._on_limit(bucket, who, peer, wait)
            raise RateLimited(retry_after=wait)
