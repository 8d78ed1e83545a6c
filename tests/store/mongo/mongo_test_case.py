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
from mediatord.store.mongo import decentrl_event_archive, ledger, nonces, queue_statistics, schema
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
# Time limit of an operation in tests of time limits, and the longest it may take on a busy machine.
MAX_OPERATION_SECONDS = 20.0
# How long a silent server does not reply: longer than that.
SILENT_MS = 60_000
# Longest wait for a condition.
WAIT_TIMEOUT = 120.0
# Time limit of operations elsewhere: the machine may be busy.
TIME_LIMIT, SHORT_TIME_LIMIT = 10.0, 0.8
# Of an operation that has to reach its commit on a busy machine too, but not to learn of its outcome.
LOST_REPLY_TIME_LIMIT = 3.0
# Time limits, of operations and of their parts.
TIME_LIMIT_SETTINGS: tuple[tuple[Any, str], ...] = (
    (server_module, "REQUEST_TIME_LIMIT"),
    (server_module, "PROBE_TIMEOUT"),
    (schema, "_COMMAND_TIMEOUT"),
    (nonces, "_COUNT_TIMEOUT"),
    (ledger, "LEDGER_TIMEOUT"),
    (ledger, "_COUNT_TIMEOUT"),
    (queue_statistics, "LEDGER_TIMEOUT"),
    (queue_statistics, "STATISTICS_TIMEOUT"),
    (decentrl_event_archive, "REQUEST_TIME_LIMIT"),
)


class ShiftedReactor:
    """The reactor with another time."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def seconds(self) -> float:
        """The reactor's time, plus an offset."""
        return float(cast(Any, reactor).seconds()) + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)


def run_coroutine(work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
    return Deferred.fromCoroutine(work)


async def wait_until(holds: Callable[[], bool], seconds: float = WAIT_TIMEOUT) -> float:
    """Wait until a condition holds; return the seconds that it took."""
    start = CLOCK.seconds()
    while not holds():
        assert CLOCK.seconds() - start < seconds, f"not after {seconds} s"
        await deferLater(CLOCK, 0.02)
    return CLOCK.seconds() - start


async def wait_for_recovery(server: ReplicaSetClient) -> None:
    """Wait until no commit is uncertain and operations are accepted again, which is a little later."""
    await wait_until(lambda: server.is_available and not server.transactions.has_uncertain_commits)


@cache
def authenticated_server() -> ReplicaSet:
    """A server with access control."""
    return start_until_exit(ReplicaSet(auth=Credentials("root", "root")))


def start_until_exit(servers: ReplicaSet) -> ReplicaSet:
    """Start a server until this process ends."""
    servers.open()
    atexit.register(servers.close)
    return servers


class MongoTestCase(TestCase):
    """
    A database without documents on the shared servers, and the log of the test.

    :cvar patience: time limit in seconds of an operation and of each of its parts; None for the default.

    :ivar log_lines: all that was logged, formatted.

    :ivar availability_changes: values that the client reported of whether the server replies.
    """

    time_limit: float | None = TIME_LIMIT

    def setUp(self) -> None:
        if self.time_limit is not None:
            for module, name in TIME_LIMIT_SETTINGS:
                self.patch(module, name, self.time_limit)
        self.servers = self.choose_servers()
        database = fresh_database() if self.servers is shared_replica_set() else fresh_database(self.servers)
        self.database = database.__enter__()
        self.addCleanup(database.__exit__, None, None, None)
        self.documents = self.servers.client[self.database]
        self.log_lines: list[str] = []
        self.availability_changes: list[bool] = []
        observer = cast(ILogObserver, self._record)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def choose_servers(self) -> ReplicaSet:
        return shared_replica_set()

    @contextmanager
    def with_short_time_limit(self, seconds: float = SHORT_TIME_LIMIT) -> Iterator[None]:
        """Operations have little time in this context."""
        time_limit = self.patch(server_module, "REQUEST_TIME_LIMIT", seconds)
        try:
            yield
        finally:
            time_limit.restore()

    @contextmanager
    def silence_command(self, command: str) -> Iterator[None]:
        """The server does not reply to this command on this database in this context; then the command is killed."""
        with self.servers.failpoint(command, blockConnection=True, blockTimeMS=SILENT_MS):
            try:
                yield
            finally:
                query = {f"command.{command}": {"$exists": True}, "command.$db": self.database}
                for blocked in self.list_operations(query):
                    self.servers.client.admin.command("killOp", op=blocked["opid"])

    def list_operations(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        """Operations of the server, including open transactions that are idle."""
        everything = {"$currentOp": {"allUsers": True, "idleSessions": True}}
        return list(self.servers.client.admin.aggregate([everything, {"$match": wanted}]))

    def list_session_operations(self, server: ReplicaSetClient) -> list[dict[str, Any]]:
        """As :meth:`list_operations`, of one client's sessions: earlier tests may have left transactions open."""
        sessions = [session["id"] for session in server.transactions.sessions.session_ids]
        return self.list_operations({"lsid.id": {"$in": sessions}})

    def make_client(
        self, uri: str | None = None, *, observe: OperationObserver = ignore_observation, connections: int = 3
    ) -> ReplicaSetClient:
        """A closed client, which is closed again after the test."""
        address = parse_mongo_uri(uri or self.servers.uri(self.database))
        server = ReplicaSetClient(
            address, CLOCK, observe=observe, on_up=self.availability_changes.append, connections=connections
        )
        self.addCleanup(server.close)
        return server

    async def open_client(self, **options: Any) -> ReplicaSetClient:
        server = self.make_client(**options)
        await server.open()
        return server

    async def open_store(
        self,
        limits: QueueLimits | None = None,
        *,
        migrations: tuple[MongoMigration, ...] = (),
        clock: IReactorTime = CLOCK,
        server: ReplicaSetClient | None = None,
        **options: Any,
    ) -> MongoStore:
        """An open store, in which ALICE has registered INBOX; it is closed after the test."""
        server = server or self.make_client(**options)
        store = MongoStore(server, clock, limits or QueueLimits(), migrations=migrations)
        self.addCleanup(store.close)
        await store.open()
        await store.grant(ALICE)
        await self.register(store, INBOX)
        return store

    async def register(self, store: MongoStore, *dids: str) -> None:
        updates: list[tuple[str, RecipientUpdateAction]] = [(did, "add") for did in dids]
        await store.update_recipients(ALICE, updates, max_recipients=1_000)

    def enqueue_ids(
        self, store: MongoStore, *ids: str, to: str = INBOX, data: bytes = b"payload"
    ) -> Deferred[EnqueueResult]:
        payloads = [Payload(id, data, "json") for id in ids]
        return store.enqueue(to, payloads, expires_at=CLOCK.seconds() + 3600)

    def read_counters(self) -> tuple[int, int]:
        """Messages and bytes by the counters of the recipients."""
        found = list(self.documents["recipients"].find())
        return sum(item["messages"] for item in found), sum(item["bytes"] for item in found)

    def list_queued(self) -> list[str]:
        """Ids of the queued messages, after checking the counters."""
        found = list(self.documents["messages"].find({}, {"size": 1}).sort("seq", 1))
        self.assertEqual(self.read_counters(), (len(found), sum(item["size"] for item in found)))
        return [item["_id"] for item in found]

    def run_in_thread(self, work: Callable[..., Any], *args: Any, **kw: Any) -> Deferred[Any]:
        """Run a blocking function in a thread."""
        return deferToThread(work, *args, **kw)

    def _record(self, event: LogEvent) -> None:
        self.log_lines.append(f"{formatEvent(event)} {event!r}")
