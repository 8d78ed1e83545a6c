"""The cluster side of the memory store, for several daemons in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.interfaces import (
    ClusterIdentityDiffers,
    ClusterSecretDiffers,
    IClusterStore,
    Node,
    NodeNameTaken,
    Presence,
)
from mediatord.store.memory_allowances import Allowances
from mediatord.store.memory_messages import Messages

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Lease:
    """Until when something is a node's, exclusively."""

    node: Node
    until: float


class ClusterContents:
    """
    What is there between open and close.

    :param messages: those of the whole store.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._leases: dict[str, _Lease] = {}
        self._present: dict[str, dict[str, None]] = {}
        self._announced: dict[str, dict[str, None]] = {}
        self._turns: dict[str, tuple[str, float]] = {}
        self._pickups: dict[str, float] = {}
        self.allowances = Allowances()

    def release_lost(self, now: float) -> None:
        """What was delivered by nodes that are not live is pending again."""
        for boot in self._messages.delivering() - {node.boot for node in self.nodes(now)}:
            self._messages.release(boot)

    def join(self, node: Node, until: float, now: float) -> None:
        """
        :raise ClusterSecretDiffers: another live node has another seal.
        :raise ClusterIdentityDiffers: another live node has another identity.
        :raise NodeNameTaken: another boot of the same name is live.
        """
        others = [other for other in self.nodes(now) if other.boot != node.boot]
        if any(other.seal != node.seal for other in others):
            raise ClusterSecretDiffers()
        if node.identity and any(other.identity not in (node.identity, b"") for other in others):
            raise ClusterIdentityDiffers()
        for other in others:
            if other.name == node.name:
                raise NodeNameTaken(other, self._leases[other.boot].until)
        self._leases[node.boot] = _Lease(node, until)

    def renew(self, boot: str, until: float, now: float) -> bool:
        node = self._live(boot, now)
        if node is None:
            return False
        self._leases[boot] = _Lease(node, until)
        return True

    def drop(self, boot: str, until: float) -> int:
        lease = self._leases.get(boot)
        if not boot or (lease is not None and lease.until > until):
            return 0
        self._leases.pop(boot, None)
        self.withdraw(boot, list(self._announced.get(boot, ())))
        self._turns = {turn: held for turn, held in self._turns.items() if held[0] != boot}
        return self._messages.release(boot)

    def nodes(self, now: float) -> list[Node]:
        live = [lease.node for lease in self._leases.values() if lease.until > now]
        return sorted(live, key=lambda node: node.name)

    def lapsed(self, now: float) -> list[str]:
        known = {*self._leases, *self._announced, *self._messages.delivering()} - {""}
        return sorted(known - {node.boot for node in self.nodes(now)})

    def announce(self, boot: str, dids: Iterable[str]) -> None:
        for did in dids:
            self._present.setdefault(did, {})[boot] = None
            self._announced.setdefault(boot, {})[did] = None

    def withdraw(self, boot: str, dids: Iterable[str]) -> None:
        for did in dids:
            _take_out(self._present, did, boot)
            _take_out(self._announced, boot, did)

    def whereabouts(self, dids: Iterable[str], now: float) -> list[Presence]:
        return [
            Presence(did, boot, self._live(boot, now))
            for did in dict.fromkeys(dids)
            for boot in self._present.get(did, ())
        ]

    def hold(self, turn: str, boot: str, until: float, now: float) -> bool:
        holder, over = self._turns.get(turn, (boot, now))
        if holder != boot and over > now:
            return False
        self._turns[turn] = boot, until
        return True

    def record_pickups(self, ids: Iterable[str], until: float, now: float) -> None:
        for id_ in ids:
            self._pickups.pop(id_, None)
            self._pickups[id_] = until
        while self._pickups and next(iter(self._pickups.values())) <= now:
            del self._pickups[next(iter(self._pickups))]

    def picked_up(self, ids: Iterable[str], now: float) -> frozenset[str]:
        return frozenset(id_ for id_ in ids if self._pickups.get(id_, now) > now)

    def _live(self, boot: str, now: float) -> Node | None:
        lease = self._leases.get(boot)
        return None if lease is None or lease.until <= now else lease.node


class Answer(Protocol):
    """Fires with what the work returns, or fails with what it raises, or because the store is not open."""

    def __call__(self, work: Callable[[ClusterContents, float], T]) -> Deferred[T]:
        """Do it now."""


@implementer(IClusterStore)
class MemoryCluster:
    """Its many methods are those of the interface."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def join(self, node: Node, lease: float) -> Deferred[None]:
        return self._answer(lambda kept, now: kept.join(node, now + lease, now))

    def renew(self, boot: str, lease: float) -> Deferred[bool]:
        return self._answer(lambda kept, now: kept.renew(boot, now + lease, now))

    def drop(self, boot: str, *, until: float = 0.0) -> Deferred[int]:
        return self._answer(lambda kept, now: kept.drop(boot, max(until, now)))

    def nodes(self) -> Deferred[list[Node]]:
        return self._answer(lambda kept, now: kept.nodes(now))

    def lapsed(self) -> Deferred[list[str]]:
        return self._answer(lambda kept, now: kept.lapsed(now))

    def announce(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        return self._answer(lambda kept, now: kept.announce(boot, dids))

    def withdraw(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        return self._answer(lambda kept, now: kept.withdraw(boot, dids))

    def whereabouts(self, dids: Sequence[str]) -> Deferred[list[Presence]]:
        return self._answer(lambda kept, now: kept.whereabouts(dids, now))

    def hold(self, turn: str, boot: str, lease: float) -> Deferred[bool]:
        return self._answer(lambda kept, now: kept.hold(turn, boot, now + lease, now))

    def take(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        return self._answer(lambda kept, now: kept.allowances.take(key, amount, limit, period, now))

    def put_back(self, key: bytes, amount: int) -> Deferred[None]:
        return self._answer(lambda kept, now: kept.allowances.put_back(key, amount))

    def record_pickups(self, ids: Sequence[str], period: float) -> Deferred[None]:
        return self._answer(lambda kept, now: kept.record_pickups(ids, now + period, now))

    def picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        return self._answer(lambda kept, now: kept.picked_up(ids, now))


def _take_out(groups: dict[str, dict[str, None]], group: str, member: str) -> None:
    members = groups.get(group, {})
    members.pop(member, None)
    if not members:
        groups.pop(group, None)
