"""What waited for a DID when a socket subscribed to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

# Ids that are remembered for all sockets together, and for one subscription: 100 bytes each.
MAX_IDS = 100_000
MAX_IDS_EACH = 10_000

_Subscription = tuple[str, Hashable]


class Backlogs:
    """
    Ids of messages by subscription: the owner of the socket asks for these, and they are not pushed to it.

    Beyond :data:`MAX_IDS` the oldest are forgotten; of a message that is forgotten it is not known that it waited.
    """

    def __init__(self) -> None:
        self._backlogs: OrderedDict[_Subscription, tuple[float, frozenset[str]]] = OrderedDict()
        self._ids = 0

    def __len__(self) -> int:
        """How many ids are remembered."""
        return self._ids

    def put(self, did: str, session: Hashable, at: float, ids: Iterable[str]) -> None:
        """These waited at a time, and nothing else."""
        self.drop(did, session)
        backlog = frozenset(ids)
        if backlog:
            self._backlogs[did, session] = at, backlog
            self._ids += len(backlog)
        while self._ids > MAX_IDS:
            self.drop(*next(iter(self._backlogs)))

    def of(self, did: str, session: Hashable) -> tuple[float, frozenset[str]] | None:
        """The time and the ids of a subscription, if anything waited."""
        return self._backlogs.get((did, session))

    def has(self, did: str, session: Hashable, id_: str) -> bool:
        """Whether a message waited when the socket subscribed."""
        backlog = self._backlogs.get((did, session))
        return backlog is not None and id_ in backlog[1]

    def drop(self, did: str, session: Hashable) -> None:
        """The subscription is over."""
        backlog = self._backlogs.pop((did, session), None)
        if backlog is not None:
            self._ids -= len(backlog[1])

    def forget(self, before: float) -> None:
        """Nobody asks any more for what waited before a time."""
        for (did, session), (at, _) in list(self._backlogs.items()):
            if at < before:
                self.drop(did, session)
