"""
For how long a request is remembered, so that nobody can repeat it (reference section 11, row 24).

A forward may come twice by design. Any other authenticated message changes or shows something: whoever has recorded
one must not have it carried out again, however much later. It cannot be remembered for ever, so it is told by two
things: whether it is remembered, and when it was made.

* One that says when it was made is remembered for as long as it is taken, an hour from then, and refused after that.
* One that does not say so, or is dated too far ahead, is remembered for an hour, and for 30 days where it is about
  which DIDs are registered: of those a repetition would change what is stored. The others change nothing that stays
  (`messages-received` names ids, which are never used again, or digests; a grant is the same the second time), and
  end with the connection that they came on.

There is room for so many at most. Only what changes registrations, or moves an account, is refused with 503 where it
is taken. All else may use a quarter, and beyond that is carried out without being remembered: mail that nobody can
fetch or acknowledge because others are busy would be worse than a question that is answered twice. What is remembered
for long may use half; beyond that it is remembered for an hour.
"""

from __future__ import annotations

from typing import NamedTuple

from mediatord.didcomm.exchange import Received
from mediatord.errors import MessageExpired, ReplayMemoryFull
from mediatord.interfaces import Account, INonceCache

# Seconds from when a message says it was made to when it is taken at last; clocks of wallets may be off by that much.
WINDOW = 3600.0
LONG = 30 * 86_400.0
# Seconds by which a claim outlives the last moment at which its message is taken.
_MARGIN = 1.0
# Of all the room there is: for what need not be remembered, for what is remembered for long, and for what has to be.
OTHERS, LONG_ONES, ALL = 0.25, 0.5, 1.0
# What changes the registrations of an account.
_REGISTRATIONS = frozenset(
    (("coordinatemediation", 2, "keylistupdate"), ("coordinatemediation", 3, "recipientupdate"))
)


class Memory(NamedTuple):
    """
    :param until: when it may be forgotten.
    :param share: of all the room there is, how much may be taken already.
    :param otherwise: how it is remembered where that is taken; None for not at all.
    :param needed: whether it is refused if it cannot be remembered.
    """

    until: float
    share: float
    otherwise: Memory | None = None
    needed: bool = True


def memory_of(received: Received, account: Account | None, now: float) -> Memory:
    """
    How a message is to be remembered.

    :param account: of its sender.
    :raise MessageExpired: it was made too long ago for anybody to know whether it came before.
    """
    # What nobody is proven to have sent changes nothing, and shows nothing.
    made = None if received.correspondent is None else received.message.created_time
    registers = account is not None and received.message.type.key in _REGISTRATIONS
    needed = registers or received.message.from_prior is not None
    share = ALL if needed else OTHERS
    if made is not None and made <= now + WINDOW:
        if made < now - WINDOW:
            raise MessageExpired
        return Memory(max(now, made) + WINDOW + _MARGIN, share, needed=needed)
    brief = Memory(now + WINDOW, share, needed=needed)
    return Memory(now + LONG, LONG_ONES, otherwise=brief) if registers else brief


async def remember(store: INonceCache, digest: bytes, memory: Memory) -> bool:
    """
    Whether a message with this digest is new, as far as that has to be known.

    :raise ReplayMemoryFull: it would be, and has to be remembered.
    """
    try:
        return await store.claim(digest, memory.until, memory.share)
    except ReplayMemoryFull:
        if memory.otherwise is not None:
            return await remember(store, digest, memory.otherwise)
        if memory.needed:
            raise
        return True
