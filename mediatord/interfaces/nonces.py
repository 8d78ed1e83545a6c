"""What both halves were sent before."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.interfaces.cluster import CLOCKS_APART

# Seconds for which a claim is kept beyond its time. Whoever prunes may be ahead of whoever is asked next: each clock
# may be off by as much as is allowed, one this way and one that way.
KEPT_BEYOND = 2 * CLOCKS_APART + 1.0


class INonceCache(Interface):
    """What was received before, kept through a restart where the backend can. Bounded: the oldest goes first."""

    def claim(key: bytes, until: float) -> Deferred[bool]:
        """
        Insert unless present, atomically; fires with whether it was new.

        :param until: from then on, by the clock of whoever claims it again, it counts as not present.
        """

    def release(key: bytes) -> Deferred[None]:
        """Forget a claim, because what it stood for was not done."""

    def prune() -> Deferred[int]:
        """Forget what was over :data:`KEPT_BEYOND` seconds ago; fires with how many those were."""
