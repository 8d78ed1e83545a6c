"""Base of tests on a real MongoDB server."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from twisted.internet import reactor  # noqa: TID251  txmongo connects by the global one
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher
from twisted.trial.unittest import TestCase

from mediatord.store.interfaces.messages import EnqueueResult, Payload, QueueLimits
from mediatord.store.interfaces.store import OperationObserver, RecipientUpdateAction, ignore_observation
from mediatord.store.mongo.driver import client as server_module
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.schema import MongoMigration
from mediatord.store.mongo.store import MongoStore
from tests.mongod import fresh_database, shared_replica_set
from tests.replica_set import Credentials, ReplicaSet

CLOCK = IReactorTime(reactor)
INBOX = "did:key:z6MkInbox"
ALICE = "did:example:alice"
THINGS = Collection("things")
# What operations may take, whatever the server does, with a second for a machine that has other things to do.
AT_MOST = 3.0 + 1.0
# Until something that was away is back.
BACK = 5.0
# Until something happens that nobody has promised a time for.
SOMETIME = 30.0
# What operations are given where it is not tried what happens when that is over: the machine may be busy.
PATIENT, IMPATIENT = 10.0, 0.8


class HostClock:
    """The reactor with another time."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def seconds(self) -> float:
        """The reactor's time, plus an offset."""
        return float(cast(Any, reactor).seconds()) + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)


def start_mongod(work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
    return Deferred.fromCoroutine(work)


async def wait_until(holds: Callable[[], bool], seconds: float = SOMETIME) -> float:
    """Wait until a condition holds; return the seconds that it took."""
    begun = CLOCK.seconds()
    while not holds():
        assert CLOCK.seconds() - begun < seconds, f"not after {seconds} s"
        await deferLater(CLOCK, 0.02)
    return CLOCK.seconds() - begun


@cache
def authenticated_server() -> ReplicaSet:
    """A server with access control."""
    return open_store(ReplicaSet(auth=Credentials("root", "root")))


def open_store(servers: ReplicaSet) -> ReplicaSet:
    """Start a server until this process ends."""
    servers.open()
    atexit.register(servers.close)
    return servers


class MongoTestCase(TestCase):
    """
    A database of its own without documents, on the servers that all tests share, and what is said meanwhile.

    :cvar patience: seconds that an operation is given; None for as many as ever.
    :ivar said: all that was logged, as it would be written.
    :ivar states: what was told of whether the server answers.
    """

    patience: float | None = PATIENT

    def setUp(self) -> None:
        if self.patience is not None:
            self.patch(server_module, "REQUEST_TIME_LIMIT", self.patience)
        self.servers = self.choose_servers()
        fresh = fresh_database() if self.servers is shared_replica_set() else fresh_database(self.servers)
        self.database = fresh.__enter__()
        self.addCleanup(fresh.__exit__, None, None, None)
        self.documents = self.servers.client[self.database]
        self.said: list[str] = []
        self.states: list[bool] = []
        observer = cast(ILogObserver, self._hear)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def choose_servers(self) -> ReplicaSet:
        return shared_replica_set()

    @contextmanager
    def impatiently(self) -> Iterator[None]:
        """Operations have little time in this context."""
        patience = self.patch(server_module, "REQUEST_TIME_LIMIT", IMPATIENT)
        try:
            yield
        finally:
            patience.restore()

    def a_server(
        self, uri: str | None = None, *, observe: OperationObserver = ignore_observation, connections: int = 3
    ) -> ReplicaSetClient:
        """A client that is not open; it is closed after the test."""
        address = parse_mongo_uri(uri or self.servers.uri(self.database))
        server = ReplicaSetClient(address, CLOCK, observe=observe, on_up=self.states.append, connections=connections)
        self.addCleanup(server.close)
        return server

    async def an_open_server(self, **options: Any) -> ReplicaSetClient:
        server = self.a_server(**options)
        await server.open()
        return server

    async def a_store(
        self,
        limits: QueueLimits | None = None,
        *,
        migrations: tuple[MongoMigration, ...] = (),
        clock: IReactorTime = CLOCK,
        server: ReplicaSetClient | None = None,
        **options: Any,
    ) -> MongoStore:
        """An open store, in which ALICE has registered INBOX; it is closed after the test."""
        server = server or self.a_server(**options)
        store = MongoStore(server, clock, limits or QueueLimits(), migrations=migrations)
        self.addCleanup(store.close)
        await store.open()
        await store.grant(ALICE)
        await self.register(store, INBOX)
        return store

    async def register(self, store: MongoStore, *dids: str) -> None:
        updates: list[tuple[str, RecipientUpdateAction]] = [(did, "add") for did in dids]
        await store.update_recipients(ALICE, updates, max_recipients=1_000)

    def put(self, store: MongoStore, *ids: str, to: str = INBOX, data: bytes = b"payload") -> Deferred[EnqueueResult]:
        payloads = [Payload(id, data, "json") for id in ids]
        return store.enqueue(to, payloads, expires_at=CLOCK.seconds() + 3600)

    def counters(self) -> tuple[int, int]:
        """Messages and bytes by the counters of the recipients."""
        found = list(self.documents["recipients"].find())
        return sum(one["messages"] for one in found), sum(one["bytes"] for one in found)

    def kept(self) -> list[str]:
        """Ids of the queued messages, after checking the counters."""
        found = list(self.documents["messages"].find({}, {"size": 1}).sort("seq", 1))
        self.assertEqual(self.counters(), (len(found), sum(one["size"] for one in found)))
        return [one["_id"] for one in found]

    def elsewhere(self, work: Callable[..., Any], *args: Any, **kw: Any) -> Deferred[Any]:
        """Run something that blocks in a thread."""
        return deferToThread(work, *args, **kw)

    def _hear(self, event: LogEvent) -> None:
        self.said.append(f"{formatEvent(event)} {event!r}")
