"""Where sockets of a DID were seen last, so that a hint need not wait for the store to say so again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from twisted.internet.interfaces import IReactorTime

from mediatord.interfaces import Node

# DIDs that are remembered, and for how many seconds after the store was asked about one.
MAX_DIDS = 10_000
KEPT = 60.0


class Trails:
    """
    What the store has said lately of DIDs with sockets at other nodes.

    It is a guess: whoever goes by it asks the store as well.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._live: frozenset[str] = frozenset()
        self._seen: OrderedDict[str, tuple[float, tuple[Node, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def keep(self, live: Collection[str]) -> None:
        """
        Of other nodes nothing is recalled.

        :param live: boots.
        """
        self._live = frozenset(live)

    def recall(self, did: str) -> Sequence[Node]:
        """The nodes that had sockets of a DID, as far as that is known."""
        until, nodes = self._seen.get(did, (0.0, ()))
        if until <= self._clock.seconds():
            return ()
        return [node for node in nodes if node.boot in self._live]

    def note(self, did: str, nodes: Sequence[Node]) -> None:
        """These have them, and no others."""
        self._seen.pop(did, None)
        if nodes:
            self._seen[did] = self._clock.seconds() + KEPT, tuple(nodes)
            if len(self._seen) > MAX_DIDS:
                self._seen.popitem(last=False)
