"""Who may have how much of the mediator's time, in both halves (UC-021 AF-2, DIDComm reference 4.1, 4.2 and 12)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from mediatord.admission.allowances import Allowances
from mediatord.admission.bucket import Bucket
from mediatord.admission.working_memory import WorkingMemory
from mediatord.errors import RateLimited
from mediatord.protocol.canonical_did import canonical_did
from mediatord.synthetic import ITSELF

OnLimit = Callable[[str, str, str, int], None]

# No request of a wallet about its own mail is larger, in bytes.
SMALL = 65_536


# As many accounts as this may use up their minute behind one address.
_ACCOUNTS_BEHIND_ONE = 10
# Requests of an address, valid or not, for each that may be charged for a payload.
_REQUESTS_BEHIND_ONE = 50
_LEAST_REQUESTS = 1000
# did:web documents that one address may make us fetch in a minute (reference 8.5).
_LOOKUPS = 10


def weight(size: int) -> int:
    """What reading so many bytes costs, where that grows with them: one, and one more for each 64 KiB."""
    return 1 + size // SMALL


@dataclass(frozen=True, slots=True)
class Trusted:
    """
    Addresses behind which are many senders, such as another mediator.

    :param peers: what they are called where somebody pays (:meth:`~mediatord.web.peers.Peers.payer`).
    :param per_minute: of each of them, where others have less.
    """

    peers: frozenset[str] = frozenset()
    per_minute: int = 6000

    def limits(self, usual: int) -> dict[str, int]:
        """The limit of each of them where others have the usual one."""
        return dict.fromkeys(self.peers, max(usual, self.per_minute))


class Admission:
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
        on_limit: OnLimit,
        *,
        did_per_minute: int,
        ip_per_minute: int,
        account_per_minute: int,
        trusted: Trusted = Trusted(),  # noqa: B008  it cannot change
        allowances: Allowances | None = None,
    ) -> None:
        def bucket(name: str, limit: int) -> Bucket:
            return Bucket(clock, name, limit, allowances)

        self._on_limit = on_limit
        self.memory = WorkingMemory(clock)
        self._senders = bucket("senders", did_per_minute)
        self._peers = bucket("peers", ip_per_minute)
        self._accounts = bucket("accounts", account_per_minute)
        self._openings = bucket("openings", account_per_minute)
        self._readers = bucket("readers", account_per_minute)
        self._commanders = bucket("commanders", _ACCOUNTS_BEHIND_ONE * account_per_minute)
        self._openings_in_vain = bucket("openings in vain", ip_per_minute)
        self._lookups = bucket("lookups", _LOOKUPS)
        # Of this process alone: asking others would cost more than what is counted.
        self._requests = Bucket(clock, "requests", ip_per_minute, None)
        self.change(
            did_per_minute=did_per_minute,
            ip_per_minute=ip_per_minute,
            account_per_minute=account_per_minute,
            trusted=trusted,
        )

    def change(
        self, *, did_per_minute: int, ip_per_minute: int, account_per_minute: int, trusted: Trusted = Trusted()
    ) -> None:  # noqa: B008  it cannot change
        """Go by other limits; what was used within the last minute counts."""
        self._trusted = trusted.peers
        self._senders.change(did_per_minute)
        self._accounts.change(account_per_minute)
        for bucket in (self._peers, self._openings_in_vain):
            bucket.change(ip_per_minute, trusted.limits(ip_per_minute))
        for bucket in (self._openings, self._readers):
            bucket.change(account_per_minute, trusted.limits(account_per_minute))
        commands = _ACCOUNTS_BEHIND_ONE * account_per_minute
        self._commanders.change(commands, trusted.limits(commands))
        requests = max(_LEAST_REQUESTS, commands, _REQUESTS_BEHIND_ONE * ip_per_minute)
        self._requests.change(requests, trusted.limits(requests))

    def __len__(self) -> int:
        """How many keys are remembered, over all buckets."""
        buckets = (self._senders, self._peers, self._accounts, self._openings, self._readers)
        return sum(map(len, (*buckets, self._commanders, self._openings_in_vain, self._lookups, self._requests)))

    def request(self, peer: str, count: int = 1) -> bool:
        """
        Charge an address for requests or frames of any kind, before anything is done about them, and whether or not
        they are charged for something else as well.

        :return: whether it is within its limit.
        """
        return peer == ITSELF or self._requests.admit_at_once(peer, count)

    async def before_reading(self, peer: str, size: int, cost: int = 1) -> None:
        """
        Protect the CPU: from an address that has used up its minute nothing more is read, with one exception.

        Behind that address may be wallets that only fetch their mail, which is not theirs to pay for: what is as
        small as their requests are is still looked at, up to the limit of an account, and until that was in vain too
        often.

        :param size: bytes of the envelope.
        :param cost: what the address will be charged for it.
        :raise RateLimited: not now.
        """
        if peer == ITSELF:
            return
        wait = await self._peers.standing(peer, cost)
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
        Charge an address for payloads to be forwarded, or for a request of somebody without an account, by size.

        :raise RateLimited: it is over its limit.
        """
        if count and peer != ITSELF:
            self._refuse_if(await self._peers.admit(peer, count), "ip", peer, peer)

    def stranger_at_once(self, peer: str, cost: int = 1) -> bool:
        """
        Charge an address for one payload, which may be read, opened and forwarded then: what :meth:`before_reading`,
        :meth:`before_opening` and :meth:`stranger` come to, where nobody has to be asked and nothing is refused.

        :return: whether that was so; otherwise nothing was charged, and they decide.
        """
        return peer == ITSELF or self._peers.admit_at_once(peer, cost)

    def not_a_stranger(self, peer: str, cost: int = 1) -> None:
        """Undo :meth:`stranger_at_once`."""
        if peer != ITSELF:
            self._peers.give_back(peer, cost)

    async def sender(self, proven: str | None, claimed: str | None, peer: str, count: int = 1) -> None:
        """
        Charge the sender for payloads: the proven DID; else the claimed one, for this address only, so that nobody
        can use up the allowance of somebody else; else only the address pays. What a trusted address passes on is
        not charged to its sender.

        :raise RateLimited: it is over its limit.
        """
        if peer == ITSELF or peer in self._trusted:
            return
        who = proven
        if who is None and claimed is not None:
            who = f"{peer} {canonical_did(claimed)}"
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

    def give_back(self, did: str, peer: str, *, outgoing: bool, cost: int = 1) -> None:
        """Undo the last charge of :meth:`sender` or :meth:`account`: the DID had no part in what was refused."""
        if not outgoing:
            self._accounts.give_back(did, cost)
        elif peer not in self._trusted:
            self._senders.give_back(did, cost)

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
