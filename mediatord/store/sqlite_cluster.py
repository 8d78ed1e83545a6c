"""The cluster side of the store in one SQLite file, for several processes on one host."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.interfaces import ClusterRefused, IClusterStore, Node, Presence
from mediatord.store import sql_allowances, sql_cluster
from mediatord.store.sqlite_file import SQLiteFile
from mediatord.store.texts import storable


@implementer(IClusterStore)
class SQLiteCluster:
    """Leases are compared by the clock of the host. Its many methods are those of the interface."""

    def __init__(self, file: SQLiteFile, clock: IReactorTime) -> None:
        self._file = file
        self._clock = clock

    def join(self, node: Node, lease: float) -> Deferred[None]:
        now = self._clock.seconds()
        joined = self._file.write("join", lambda c: sql_cluster.join(c, node, now + lease, now))
        return joined.addCallback(_joined)

    def renew(self, boot: str, lease: float) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._file.write("renew", lambda c: sql_cluster.renew(c, boot, now + lease, now))

    def drop(self, boot: str, *, until: float = 0.0) -> Deferred[int]:
        over = max(until, self._clock.seconds())
        return self._file.write("drop", lambda c: sql_cluster.drop(c, boot, over))

    def nodes(self) -> Deferred[list[Node]]:
        now = self._clock.seconds()
        return self._file.read("nodes", lambda c: sql_cluster.nodes(c, now))

    def lapsed(self) -> Deferred[list[str]]:
        now = self._clock.seconds()
        return self._file.read("lapsed", lambda c: sql_cluster.lapsed(c, now))

    def announce(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        present = tuple(dids)
        return self._file.write("announce", lambda c: sql_cluster.announce(c, boot, present))

    def withdraw(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        gone = tuple(dids)
        return self._file.write("withdraw", lambda c: sql_cluster.withdraw(c, boot, gone))

    def whereabouts(self, dids: Sequence[str]) -> Deferred[list[Presence]]:
        now, wanted = self._clock.seconds(), tuple(dids)
        return self._file.read("whereabouts", lambda c: sql_cluster.whereabouts(c, wanted, now))

    def hold(self, turn: str, boot: str, lease: float) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._file.write("hold", lambda c: sql_cluster.hold(c, turn, boot, now + lease, now))

    def take(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        now = self._clock.seconds()
        return self._file.write("take", lambda c: sql_allowances.take(c, key, amount, limit, period, now))

    def put_back(self, key: bytes, amount: int) -> Deferred[None]:
        return self._file.write("put_back", lambda c: sql_allowances.put_back(c, key, amount))

    def record_pickups(self, ids: Sequence[str], period: float) -> Deferred[None]:
        now, got = self._clock.seconds(), storable(ids)
        return self._file.write("record_pickups", lambda c: sql_cluster.record_pickups(c, got, now + period, now))

    def picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        now, wanted = self._clock.seconds(), storable(ids)
        return self._file.read("picked_up", lambda c: sql_cluster.picked_up(c, wanted, now))

    def prune(self, after: bytes | None = None) -> Deferred[None]:
        """Forget allowances that count no more, in slices, between which others write."""
        now = self._clock.seconds()

        def go_on(last: bytes | None) -> Deferred[None]:
            return succeed(None) if last is None else self.prune(last)

        return self._file.write("prune", lambda c: sql_allowances.prune(c, now, after)).addCallback(go_on)


def _joined(refusal: ClusterRefused | None) -> None:
    if refusal is not None:
        raise refusal
