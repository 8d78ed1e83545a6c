"""A whole mediator on any store, with a manual clock, that can be stopped and restarted."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet import reactor  # noqa: TID251  txmongo connects by the global one
from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.core_services import CoreServices
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.config.settings import Config
from mediatord.didcomm.messages import MessageOrigin
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore, ignore_observation
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.store import MongoStore
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.in_memory_mediator import PEER, FakeSocket, InMemoryMediator, InMemoryReactor
from tests.integration.daemon import PLENTY
from tests.mongod import shared_replica_set
from tests.store.builders import make_sqlite_store

# Later than any real time: by its own clock a MongoDB server deletes what has expired.
START = 4_000_000_000.0
# Seconds that an iteration of the real reactor may wait.
_ITERATION_SECONDS = 0.05
# Iterations without activity after which nothing is pending.
_IDLE_ITERATIONS = 3
# Seconds after which waiting fails.
_WAIT_TIMEOUT = 120.0
_REACTOR: Any = reactor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MediatorEnvironment:
    """
    Configuration and place of a mediator.

    :param backend: memory, sqlite or mongodb.

    :param directory: for its files; its keys are beside it.

    :param database: on the MongoDB servers that the tests of a process share.
    """

    backend: str
    directory: Path
    limits: QueueLimits
    caps: DecentrlQuotas
    database: str = ""

    def make_config(self) -> Config:
        """Configuration as from a file."""
        # Of one network, without ranks, the oldest message is evicted.
        limits = self.limits
        queue = {"max_messages": limits.max_messages, "max_bytes": limits.max_bytes, "reserved_for_known": 0}
        storage: dict[str, Any] = {"backend": self.backend, "sqlite": {"path": str(self.directory / "db")}}
        if self.database:
            storage["mongodb"] = {"uri": shared_replica_set().uri(self.database)}
        plain = {
            "storage": storage,
            "identity": {"keys": str(self.directory.parent / "keys.jwks")},
            "log": {"directory": str(self.directory / "log"), "rotate": {"compress": False}},
            "queue": queue,
            **PLENTY,
        }
        return Config.model_validate(plain).resolved(self.directory)


class RestartableMediator(InMemoryMediator):
    """
    The objects of a mediator, wired as in the daemon.

    :ivar sockets: open sockets.
    """

    def __init__(self, environment: MediatorEnvironment) -> None:
        environment.directory.mkdir()
        self.test = SynchronousTestCase()
        self.clock = InMemoryReactor()
        self.clock.advance(START)
        self.config = environment.make_config()
        self.sockets: list[FakeSocket] = []
        self._ground = environment
        self._server: ReplicaSetClient | None = None
        self._memory = MemoryStore(self.clock, environment.limits, caps=environment.caps)
        # The memory store is cleared when its last user closes it.
        self._memory.open()
        self._start()

    @property
    def backend(self) -> str:
        """Its storage backend."""
        return self._ground.backend

    def restart(self) -> None:
        """Stop in order and restart with the same store; sockets are closed."""
        self.stop()
        self._start()

    def stop(self) -> None:
        """Stop in order, as the daemon does."""
        stopping: list[Any] = [self.base.connections.stopService()]
        for socket in tuple(self.sockets):
            self.disconnect(socket)
        for service in (self.didcomm.housekeeping, self.didcomm.lag, self.didcomm.due, self.base.gate):
            stopping.append(service.stopService())
        for item in stopping:
            if isinstance(item, Deferred):
                self.wait_for(item)
        self.wait_for(self.store.close())
        self.base.events.stopService()

    def socket(self, **options: Any) -> FakeSocket:
        """An open socket."""
        socket = super().socket(**options)
        self.sockets.append(socket)
        return socket

    def disconnect(self, socket: FakeSocket) -> None:
        """Close a socket."""
        self.sockets.remove(socket)
        self.base.connections.closed(socket)
        self.settle()

    def receive(self, raw: bytes, socket: FakeSocket | None = None, peer: str = PEER) -> RequestReply:
        """The mediator's reply to one message."""
        replies: list[RequestReply] = []
        declined: list[None] = []
        fast_path = self.didcomm.forward_fast_path
        if socket is None and fast_path.take(raw, peer, replies.append, lambda: declined.append(None)):
            self.settle(lambda: bool(replies or declined))
            if replies:
                (reply,) = replies
                return reply
        return self.run(
            self.didcomm.dispatcher.receive(raw, MessageOrigin(socket.client if socket else peer, socket))
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine that takes no time, after all calls that are due."""
        return self.wait_for(Deferred.fromCoroutine(work))

    def wait_for(self, deferred: Deferred[T]) -> T:
        """Result of a Deferred."""
        fired: list[Any] = []
        deferred.addBoth(fired.append)
        self.settle(lambda: bool(fired))
        (result,) = fired
        if isinstance(result, Failure):
            result.raiseException()
        answer: T = result
        return answer

    def advance(self, seconds: float) -> None:
        """Let time pass in one step."""
        self.clock.advance(seconds)
        self.settle()

    def settle(self, met: Callable[[], bool] = lambda: True) -> None:
        """Run all calls that are due. :param met: condition that has to hold then."""
        until = _REACTOR.seconds() + _WAIT_TIMEOUT
        idle_iterations = 0
        while idle_iterations < (_IDLE_ITERATIONS if self._server else 1):
            while any(call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls()):
                self.clock.advance(0)
            busy = self._server is not None and self._server._running
            idle_iterations = 0 if busy or not met() else idle_iterations + 1
            assert idle_iterations or (self._server and _REACTOR.seconds() < until), (
                f"{self.backend}: nothing comes of it"
            )
            if self._server is not None:
                due = _REACTOR.timeout()
                _REACTOR.iterate(
                    0 if idle_iterations else _ITERATION_SECONDS if due is None else min(due, _ITERATION_SECONDS)
                )

    def _start(self) -> None:
        store = self._make_store()
        self.base = CoreServices(self.clock, self.config, store=store, monotonic=self.clock.seconds)
        os.utime(self.config.identity.keys.with_name("log.key"), (START, START))
        self.didcomm = DIDCommServices(self.base, self.config)
        self.decentrl = DecentrlServices(self.base, self.config)
        self.store = store
        self.did = self.base.identity.now.did
        self.document = resolve_local(self.did)
        self.base.events.startService()
        self.wait_for(store.open())
        for service in (
            self.didcomm.due,
            self.didcomm.lag,
            self.didcomm.housekeeping,
            self.base.connections,
            self.base.gate,
        ):
            service.startService()
        self.settle()

    def _make_store(self) -> Any:
        environment = self._ground
        if environment.backend == "memory":
            return self._memory
        if environment.backend == "sqlite":
            return make_sqlite_store(
                self.clock, self.config.storage.sqlite.path, environment.limits, caps=environment.caps
            )
        return self._make_mongo()

    def _make_mongo(self) -> IStore:
        address = parse_mongo_uri(shared_replica_set().uri(self._ground.database))
        self._server = ReplicaSetClient(
            address, _REACTOR, observe=ignore_observation, on_up=lambda up: None, connections=2
        )
        store = MongoStore(self._server, self.clock, self._ground.limits, caps=self._ground.caps)
        # The server decides on leases by its own clock, which is another.
        store.cluster.acquire_lease = lambda *args: succeed(True)  # type: ignore[method-assign]  # for this instance
        return store
