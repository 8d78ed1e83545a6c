"""
Replay protection of DIDComm messages (reference section 11, row 24).

A forward may come twice by design. Any other authenticated message changes or shows something, and a recorded one
must not be served again, however much later. Since digests cannot be kept for ever, a replay is detected by its
digest or by its age.

* The digest of a message with `created_time` is kept for as long as the message is accepted, an hour from then; later
  the message is refused.
* The digest of one without it, or dated too far ahead, is kept for an hour, and for 30 days if it changes recipient
  DIDs or devices for push notifications, as a replay would change what is stored. Other messages change nothing
  lasting: a second grant changes nothing; the rest ends with the connection.

A digest is in the store before its message is served, with one exception. Requests of Message Pickup may be served
twice without harm: `messages-received` names ids, which are never used again, or digests; the others show, to the
wallet alone, what is queued for it. They do not wait for a commit: a replay is detected in memory, where the digests
of the latest are kept, and served after a restart or by another process. Harm could only come from a replay that
authenticates the socket of somebody else. So a request that authenticates a socket waits for its claim, others are
claimed meanwhile, and `messages-received` neither authenticates nor is claimed. Only a claim that is lost in a crash,
or for which there is no capacity, leaves a request that could authenticate a socket when it is repeated.

The capacity for digests is limited. When it is used up, only messages that change recipient DIDs or devices, or
rotate an account, are refused, with 503. Others may use a quarter of it; beyond that they are served without being
kept, since wallets that cannot enrol while others are busy would be worse than a query that is answered twice.
Digests kept for 30 days may use half; beyond that they are kept for an hour.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import NamedTuple

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.didcomm.messages import UnpackedMessage
from mediatord.errors import ExpiredMessage, ReplayCacheFull, ReplayedMessage, StoreUnavailable
from mediatord.protocol.didcomm.message import MessageType
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.interfaces.store import Account, INonceCache

_log = Logger()

# Seconds after `created_time` during which a message is accepted; clocks of wallets may be off by as much.
REPLAY_WINDOW = 3600.0
LONG_RETENTION = 30 * 86_400.0
# Seconds that a digest is kept after its message is no longer accepted.
_CLAIM_EXPIRY_MARGIN = 1.0
# Shares of the capacity: for digests that need not be kept, for those kept for long, and for those that have to be.
ORDINARY_SHARE, LONG_RETENTION_SHARE, FULL_SHARE = 0.25, 0.5, 1.0
# Messages that change the recipient DIDs or the devices of an account.
_LASTING_CHANGES = frozenset(
    (
        ("coordinatemediation", 2, "keylistupdate"),
        ("coordinatemediation", 3, "recipientupdate"),
        *(MessageType.parse(protocol.type("set")).key for protocol in PUSH_PROTOCOLS.values()),
    )
)
ACKNOWLEDGEMENT = ("messagepickup", 3, "messagesreceived")
_PICKUP_REQUESTS = frozenset(
    (ACKNOWLEDGEMENT, ("messagepickup", 3, "statusrequest"), ("messagepickup", 3, "deliveryrequest"))
)
# Digests that are kept in memory: 200 bytes each.
MAX_RECENT_DIGESTS = 10_000


class RecentDigests:
    """The digests of the latest messages of a kind, in memory. The length is their number."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digest: bytes, now: float = 0.0, until: float = inf) -> bool:
        """Keep a digest until a time, or as long as there is room; whether it is not kept already."""
        if self._digests.get(digest, -inf) > now:
            return False
        self._digests[digest] = until
        if len(self._digests) > MAX_RECENT_DIGESTS:
            self._digests.popitem(last=False)
        return True

    def discard(self, digest: bytes) -> None:
        """Forget a digest."""
        self._digests.pop(digest, None)


class ReplayRetention(NamedTuple):
    """
    How long a digest is kept.

    :param until: when it may be dropped.
    :param share: of the capacity that may be in use for it to be kept.
    :param fallback: retention where more is in use; None for none.
    :param needed: whether the message is refused if its digest cannot be kept.
    """

    until: float
    share: float
    fallback: ReplayRetention | None = None
    needed: bool = True


def choose_replay_retention(received: UnpackedMessage, account: Account | None, now: float) -> ReplayRetention:
    """
    Retention of a message's digest.

    :param account: of its sender.
    :raise ExpiredMessage: its `created_time` is so long ago that its digest may have been dropped.
    """
    # Without an authenticated sender a message neither changes nor shows anything.
    made = None if received.authcrypt_sender is None else received.message.created_time
    registers = account is not None and received.message.type.key in _LASTING_CHANGES
    needed = registers or received.message.from_prior is not None
    share = FULL_SHARE if needed else ORDINARY_SHARE
    if made is not None and made <= now + REPLAY_WINDOW:
        if made < now - REPLAY_WINDOW:
            raise ExpiredMessage
        return ReplayRetention(max(now, made) + REPLAY_WINDOW + _CLAIM_EXPIRY_MARGIN, share, needed=needed)
    brief = ReplayRetention(now + REPLAY_WINDOW, share, needed=needed)
    return ReplayRetention(now + LONG_RETENTION, LONG_RETENTION_SHARE, fallback=brief) if registers else brief


def is_pickup_request(received: UnpackedMessage) -> bool:
    """Whether a message may be served twice without harm, unless it authenticates a socket."""
    return received.message.type.key in _PICKUP_REQUESTS and received.message.from_prior is None


class ReplayProtection:
    """Claims the digests of messages, in the store or in memory."""

    def __init__(self, store: INonceCache, clock: IReactorTime) -> None:
        self._store = store
        self._clock = clock
        self._recent = RecentDigests()

    def __len__(self) -> int:
        """Number of digests in memory."""
        return len(self._recent)

    async def claim(self, received: UnpackedMessage, account: Account | None, *, binds: bool) -> None:
        """
        Keep the digest of a message.

        :param account: of its sender.
        :param binds: whether the message authenticates the socket that it came on.
        :raise ReplayedMessage: the message came before.
        :raise ExpiredMessage: it is too old for that to be known.
        :raise ReplayCacheFull: the digest cannot be kept, and has to be.
        """
        if is_pickup_request(received):
            retention = self.claim_in_memory(received, account)
            if not binds:
                if received.message.type.key != ACKNOWLEDGEMENT:
                    claimed = self._store.claim_nonce(received.digest, retention.until, retention.share)
                    claimed.addErrback(_log_unexpected)
                return
        else:
            retention = choose_replay_retention(received, account, self._clock.seconds())
        try:
            await self.claim_digest(received.digest, retention)
        except ReplayedMessage:
            raise
        except BaseException:
            self.cancel(received)
            raise

    async def claim_digest(self, digest: bytes, retention: ReplayRetention) -> None:
        """
        Keep a digest in the store.

        :raise ReplayedMessage: it is there already.
        :raise ReplayCacheFull: it cannot be kept, and has to be.
        """
        if not await self._claim(digest, retention):
            raise ReplayedMessage

    def claim_in_memory(self, received: UnpackedMessage, account: Account | None) -> ReplayRetention:
        """As :meth:`claim`, for a pickup request that does not authenticate a socket; how long its digest is kept."""
        now = self._clock.seconds()
        retention = choose_replay_retention(received, account, now)
        if not self._recent.add(received.digest, now, retention.until):
            raise ReplayedMessage
        return retention

    async def release(self, received: UnpackedMessage, *, binds: bool) -> None:
        """
        Forget the digest of a message that was not served.

        :raise StoreUnavailable: it cannot be forgotten.
        """
        self.cancel(received)
        if binds or not is_pickup_request(received):
            await self._store.release_nonce(received.digest)

    def cancel(self, received: UnpackedMessage) -> None:
        """As :meth:`release`, for a pickup request that does not authenticate a socket."""
        self._recent.discard(received.digest)

    async def _claim(self, digest: bytes, retention: ReplayRetention) -> bool:
        """Whether the digest is new, or need not be known."""
        try:
            return await self._store.claim_nonce(digest, retention.until, retention.share)
        except ReplayCacheFull:
            if retention.fallback is not None:
                return await self._claim(digest, retention.fallback)
            if retention.needed:
                raise
            return True


def _log_unexpected(failure: Failure) -> None:
    """A claim that nobody waits for need not succeed, as when the store is not available."""
    if not failure.check(StoreUnavailable):
        _log.failure("claiming a digest failed", redact_failure(failure))
