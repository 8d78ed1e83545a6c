"""Who may have how much of the mediator's time (UC-021 AF-2, reference 4.1, 4.2 and 12)."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.exchange import Received
from mediatord.errors import RateLimited
from mediatord.protocol.limits import SlidingWindow

OnLimit = Callable[[str, str, str, int], None]


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

    def before_opening(self, peer: str, *, authenticated: bool) -> None:
        """
        Protect the CPU: an address that has used up its minute gets nothing more opened.

        Envelopes that claim an authenticated sender are opened all the same, up to the limit of an account: behind
        that address may be wallets that only fetch their mail, which is not theirs to pay for.

        :raise RateLimited: not now.
        """
        wait = self._peers.wait(peer, self._now())
        if wait and authenticated:
            wait = self._openings.admit(peer, self._now())
        self._refuse_if(wait, "ip", peer, peer)

    def opened_in_vain(self, peer: str) -> None:
        """Charge an address for an envelope that could not be opened."""
        self._peers.admit(peer, self._now())

    def stranger(self, peer: str) -> None:
        """
        Charge an address for a forward, or for a request of somebody without an account.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(self._peers.admit(peer, self._now()), "ip", peer, peer)

    def sender(self, received: Received, peer: str) -> None:
        """
        Charge the sender of a forward: the proven DID; else the claimed one, for this address only, so that nobody
        can use up the allowance of somebody else; else only the address pays.

        :raise RateLimited: it is over its limit.
        """
        who = received.sender
        if who is None and received.message.sender is not None:
            who = f"{peer} {received.message.sender}"
        if who is not None:
            self._refuse_if(self._senders.admit(who, self._now()), "did", received.sender or peer, peer)

    def account(self, did: str, peer: str) -> None:
        """
        Charge an account for its own coordination and pickup.

        :raise RateLimited: it is over its limit.
        """
        self._refuse_if(self._accounts.admit(did, self._now()), "account", did, peer)

    def _refuse_if(self, wait: int, bucket: str, who: str, peer: str) -> None:
        if wait:
            self._on_limit(bucket, who, peer, wait)
            raise RateLimited(retry_after=wait)

    def _now(self) -> float:
        return self._clock.seconds()
