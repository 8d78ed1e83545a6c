"""Who may have how much of the mediator's time, in both halves (UC-021 AF-2, DIDComm reference 4.1, 4.2 and 12)."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RateLimited
from mediatord.protocol.limits import SlidingWindow

OnLimit = Callable[[str, str, str, int], None]

# No request of a wallet about its own mail is larger, in bytes.
SMALL = 65_536


# As many accounts as this may use up their minute behind one address.
_ACCOUNTS_BEHIND_ONE = 10


def weight(size: int) -> int:
    """What reading so many bytes costs, where that grows with them: one, and one more for each 64 KiB."""
    return 1 + size // SMALL


class Admission:
    """
    The buckets: a sender DID, an address, and an account's own business.

    :param on_limit: told of every refusal: bucket name, whose bucket, address, seconds to wait.
    """

    def __init__(
        self,
        clock: IReactorTime,
        on_limit: OnLimit,
        *,
        did_per_minute: int,
        ip_per_minute: int,
        account_per_minute: int,
    ) -> None:
        self._clock = clock
        self._on_limit = on_limit
        self._senders = SlidingWindow(did_per_minute)
        self._peers = SlidingWindow(ip_per_minute)
        self._accounts = SlidingWindow(account_per_minute)
        self._openings = SlidingWindow(account_per_minute)
        self._readers = SlidingWindow(account_per_minute)
        self._commanders = SlidingWindow(_ACCOUNTS_BEHIND_ONE * account_per_minute)
        self._openings_in_vain = SlidingWindow(ip_per_minute)

    def before_reading(self, peer: str, size: int) -> None:
        """
        Protect the CPU: from an address that has used up its minute nothing more is read, with one exception.

        Behind that address may be wallets that only fetch their mail, which is not theirs to pay for: what is as
        small as their requests are is still looked at, up to the limit of an account, and until that was in vain too
        often.

        :param size: bytes of the envelope.
        :raise RateLimited: not now.
        """
        now = self._clock.seconds()
        wait = self._peers.wait(peer, now)
        if wait and size <= SMALL:
            wait = self._openings_in_vain.wait(peer, now) or self._openings.admit(peer, now)
        self._refuse_if(wait, "ip", peer, peer)

    def before_opening(self, peer: str, *, authenticated: bool) -> None:
        """
        The second half of :meth:`before_reading`: only what claims an authenticated sender is opened as well.

        :raise RateLimited: not now.
        """
        if not authenticated:
            self._refuse_if(self._peers.wait(peer, self._clock.seconds()), "ip", peer, peer)

    def in_vain(self, peer: str, size: int = 0) -> None:
        """
        Charge an address for what could not be read or opened, or came before.

        :param size: bytes of it, where reading costs more the longer it is.
        """
        now = self._clock.seconds()
        for _ in range(weight(size)):
            if self._peers.admit(peer, now):
                self._openings_in_vain.admit(peer, now)
                break

    def stranger(self, peer: str, count: int = 1) -> None:
        """
        Charge an address for payloads to be forwarded, or for a request of somebody without an account.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(self._peers.admit(peer, self._clock.seconds(), count), "ip", peer, peer)

    def sender(self, proven: str | None, claimed: str | None, peer: str, count: int = 1) -> None:
        """
        Charge the sender for payloads: the proven DID; else the claimed one, for this address only, so that nobody
        can use up the allowance of somebody else; else only the address pays.

        :raise RateLimited: it is over its limit.
        """
        who = proven
        if who is None and claimed is not None:
            who = f"{peer} {claimed}"
        if who is not None:
            wait = self._senders.admit(who, self._clock.seconds(), count)
            self._refuse_if(wait, "did", proven or peer, peer)

    def has_allowance(self, account: str | None, peer: str) -> None:
        """
        Ask, without charging, whether an account may make a request; or an address, for somebody without one.

        :raise RateLimited: not now.
        """
        now = self._clock.seconds()
        if account is None:
            self._refuse_if(self._peers.wait(peer, now), "ip", peer, peer)
        else:
            self._refuse_if(self._accounts.wait(account, now), "account", account, peer)

    def account(self, did: str, peer: str, cost: int = 1) -> None:
        """
        Charge an account for its own coordination and pickup, or its own commands.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(self._accounts.admit(did, self._clock.seconds(), cost), "account", did, peer)

    def command(self, peer: str, size: int) -> None:
        """
        Charge an address for reading a command, whatever it is: DIDs cost nothing, so their own limits do not bound
        what one address can ask for.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(self._commanders.admit(peer, self._clock.seconds(), weight(size)), "account", peer, peer)

    def give_back(self, did: str, *, outgoing: bool, cost: int = 1) -> None:
        """Undo the last charge of :meth:`sender` or :meth:`account`: the DID had no part in what was refused."""
        (self._senders if outgoing else self._accounts).give_back(did, cost)

    def reader(self, peer: str) -> None:
        """
        Charge an address for reading what is public.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(self._readers.admit(peer, self._clock.seconds()), "account", peer, peer)

    def _refuse_if(self, wait: int, bucket: str, who: str, peer: str) -> None:
        if wait:
            self._on_limit(bucket, who, peer, wait)
            raise RateLimited(retry_after=wait)
