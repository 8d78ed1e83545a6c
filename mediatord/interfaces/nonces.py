"""What both halves were sent before."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from zope.interface import Interface


class INonceCache(Interface):
    """What was received before, kept through a restart where the backend can. Bounded: the oldest goes first."""

    def claim(key: bytes, until: float) -> Deferred[bool]:
        """Insert unless present, atomically; fires with whether it was new. May be forgotten after `until`."""

    def release(key: bytes) -> Deferred[None]:
        """Forget a claim, because what it stood for was not done."""

    def prune() -> Deferred[int]:
        """Forget what may be forgotten; fires with how many those were."""
