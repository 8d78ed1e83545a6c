"""What both halves were sent before."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.interfaces.cluster import CLOCKS_APART

# Seconds for which a claim is kept beyond its time. Whoever prunes may be ahead of whoever is asked next: each clock
# may be off by as much as is allowed, one this way and one that way.
KEPT_BEYOND = 2 * CLOCKS_APART + 1.0


class INonceCache(Interface):
    """
    What was received before, kept through a restart where the backend can. Bounded: where there is no room nothing is
    claimed, and what is there stays, so that nobody can have a claim forgotten by making others.
    """

    def claim(key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        """
        Insert unless present, atomically; fires with whether it was new.

        :param until: from then on, by the clock of whoever claims it again, it counts as not present.
        :param share: of all the room there is, how much may be taken already, whoever took it.
        :raise ReplayMemoryFull: it would be new, and more is taken; those that are over count until they are pruned.
            Nodes of a cluster may notice that a little late.
        """

    def release(key: bytes) -> Deferred[None]:
        """Forget a claim, because what it stood for was not done."""

    def prune() -> Deferred[int]:
        """Forget what was over :data:`KEPT_BEYOND` seconds ago; fires with how many those were."""
