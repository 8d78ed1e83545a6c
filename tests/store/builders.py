"""Builders and fixtures for tests of the stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, execute, fail
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import MediatorError
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.interfaces.cluster_and_quotas import ClusterIdentityMismatch, ClusterNode
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import (
    LedgerEntry,
    Payload,
    PayloadForm,
    QueueLimits,
    RemovalReason,
)
from mediatord.store.interfaces.store import OperationObserver, StoreFault, ignore_observation
from mediatord.store.mongo.store import MongoStore
from mediatord.store.sqlite.connection import LOCK_TIMEOUT_SECONDS
from mediatord.store.sqlite.executor import JobRunner, SQLiteExecutor
from mediatord.store.sqlite.memory_store import MemoryStore
from mediatord.store.sqlite.sqlite_store import SQLiteStore

T = TypeVar("T")

NOON = 1_800_000_000.0
HOUR = 3600.0
# Removals for other reasons have a ledger entry of the same name.
LEDGER_ENTRY_BY_REASON: dict[RemovalReason | None, LedgerEntry] = {
    None: "acknowledged",
    "ttl": "expired",
    "fifo_count": "evicted",
    "fifo_bytes": "evicted",
}
ALICE = "did:example:alice"
BOB = "did:example:bob"


def make_payload(id: str, data: bytes | None = None, form: PayloadForm = "json") -> Payload:
    """A payload that differs from every other one unless `data` is given."""
    return Payload(id, b'{"ciphertext":"%s"}' % id.encode() if data is None else data, form)


class ImmediateClock(Clock):
    """Clock whose reactor iterations end at once: calls without a delay are made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.advance(NOON)

    def callLater(  # noqa: N802
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        called = super().callLater(delay, callable, *args, **kw)
        if delay == 0:
            self.advance(0)
        return called


class InlineRunner:
    """Runner that does its work synchronously."""

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def __call__(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        return execute(work, *args)


class HoldableRunner:
    """
    Runner that does its work synchronously, or holds it until it is released.

    :ivar calls: number of works submitted.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._holding = False
        self._waiting: list[Callable[[], None]] = []

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def hold(self) -> None:
        self._holding = True

    def release(self) -> None:
        self._holding = False
        waiting, self._waiting = self._waiting, []
        for go in waiting:
            go()

    def __call__(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        self.calls += 1
        if not self._holding:
            return execute(work, *args)
        gate: Deferred[None] = Deferred()
        self._waiting.append(lambda: gate.callback(None))
        return gate.addCallback(lambda _: work(*args))


def make_database_path(test: SynchronousTestCase) -> Path:
    """Path for a database, in a directory that is removed after the test."""
    folder = mkdtemp(prefix="mediatord-store-")
    test.addCleanup(rmtree, folder)
    return Path(folder) / "mediator.sqlite3"


def make_sqlite_store(
    clock: IReactorTime,
    path: Path,
    limits: QueueLimits | None = None,
    *,
    caps: DecentrlQuotas | None = None,
    write: JobRunner | None = None,
    read: JobRunner | None = None,
    background: JobRunner | None = None,
    shared: bool = False,
    observe: OperationObserver = ignore_observation,
    patience: float = LOCK_TIMEOUT_SECONDS,
    max_nonces: int = 1_000_000,
    create: bool = True,
    space_limits: SpaceLimits | None = None,
    on_fault: Callable[[StoreFault, bool], None] = lambda fault, present: None,
) -> SQLiteStore:
    """A SQLite store without threads."""
    executor = SQLiteExecutor(
        path,
        clock,
        lambda kind: {"write": write, "read": read, "background": background}.get(kind) or InlineRunner(),
        observe,
        patience=patience,
        shared=shared,
        create=create,
        space_limits=space_limits or SpaceLimits(),
        on_fault=on_fault,
    )
    return SQLiteStore(
        executor,
        clock,
        limits or QueueLimits(),
        caps=caps or DecentrlQuotas(),
        shared=shared,
        max_nonces=max_nonces,
    )


class MultiStepMemoryStore(MemoryStore):
    """Memory store with the operations of the MongoDB store that take several transactions."""

    enqueue: Any = MongoStore.enqueue
    enqueue_each: Any = MongoStore.enqueue_each
    acknowledge_each: Any = MongoStore.acknowledge_each
    _acknowledge_one: Any = MongoStore._acknowledge_one


def enforce_identity(cluster: Any) -> None:
    """Make a memory store refuse other mediators as the MongoDB store does; only tests have both in one process."""
    join, identities = cluster.join, dict[str, bytes]()

    def join_if_same_identity(node: ClusterNode, lease: float) -> Deferred[Any]:
        live = [other.boot for other in result_of(cluster.list_nodes()) if other.boot != node.boot]
        if node.identity and any(identities[boot] not in (node.identity, b"") for boot in live):
            return fail(ClusterIdentityMismatch())
        identities[node.boot] = node.identity
        joined: Deferred[Any] = join(node, lease)
        return joined

    cluster.join = join_if_same_identity


def result_of(deferred: Deferred[Any]) -> Any:
    """The result of a Deferred that has fired; for a refusal its class."""
    results: list[Any] = []
    deferred.addErrback(lambda failure: failure.trap(MediatorError) and type(failure.value))
    deferred.addCallback(results.append)
    (result,) = results
    return result
