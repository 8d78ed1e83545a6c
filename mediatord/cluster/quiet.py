"""DIDs without sockets at other nodes, where it shows without a question that none has come since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Protocol

# DIDs that are remembered; with DIDs of two thousand characters that is 20 MiB at most.
MAX_DIDS = 10_000


class Arrivals(Protocol):
    """What nodes that share memory tell each other of sockets that come."""

    def came(self, dids: Iterable[str]) -> None:
        """Sockets of these are here, and the store knows it."""

    def sign(self, did: str) -> Hashable:
        """Something that was never the same before a socket of a DID came to another node and after that."""


class Unseen:
    """Arrivals of nodes that share nothing but the store: what one has said may be over at any time."""

    def came(self, dids: Iterable[str]) -> None:
        """It is for the store to say."""

    def sign(self, did: str) -> None:
        """There is none."""


class Quiet:
    """
    What the store has said of DIDs that have no socket at another node.

    As good as a new question is, as far as there are signs: a node shows one after the store knows of a socket, and
    before anybody is told that it is live. So what is stored before the sign is seen is waiting when the socket is
    told how much waits.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._signs: OrderedDict[str, Hashable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._signs)

    def holds(self, did: str) -> bool:
        """Whether the store would say so now as well."""
        sign = self._signs.get(did)
        if sign is None:
            return False
        if sign == self._arrivals.sign(did):
            return True
        del self._signs[did]
        return False

    def sign(self, did: str) -> Hashable:
        """To be taken before the store is asked."""
        return self._arrivals.sign(did)

    def note(self, did: str, sign: Hashable) -> None:
        """The store has said so. :param sign: as it was before that."""
        if sign is None:
            return
        self._signs.pop(did, None)
        self._signs[did] = sign
        if len(self._signs) > MAX_DIDS:
            self._signs.popitem(last=False)
