"""MongoDB replica sets for tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode

from pymongo import MongoClient, timeout
from pymongo.errors import AutoReconnect, OperationFailure

from tests.mongod_process import Mongod, TemporaryDataDirectory, mongod_binary

NAME = "rs0"
ELECTED_SECONDS = 60.0
_COMMAND_SECONDS = 60.0
_CLOSE_SECONDS = 0.5
_AWAIT_MILLISECONDS = 200
# A silent member is detected within seconds. A busy one must not be taken for dead: all connections would be closed
# in the middle of their commands.
_CLIENT_OPTIONS: dict[str, Any] = {
    "serverSelectionTimeoutMS": int(ELECTED_SECONDS * 1000),
    "heartbeatFrequencyMS": 500,
    "connectTimeoutMS": 5000,
    "serverMonitoringMode": "poll",
}
# ExceededTimeLimit and LockTimeout: the primary took longer to step down than it was to stay secondary, and did not.
_STEP_DOWN_TIMEOUT_CODES = (262, 24)


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """
    Files for servers that require TLS.

    :param ca: certificate of the authority, PEM.
    :param key: certificate and private key of all servers, PEM; the test's own client uses it too.
    :param host: host name of the certificate, by which members address each other.
    """

    ca: Path
    key: Path
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Credentials:
    """First user, in database `admin`, with all privileges and both SCRAM-SHA-1 and SCRAM-SHA-256."""

    user: str
    password: str


class ReplicaSet:
    """
    Replica set of `size` members; runs within the `with`, or from :meth:`open` to :meth:`close`.

    :param tls: require TLS.
    :param auth: require credentials.
    :param election: seconds without a primary's heartbeat after which an election begins.
    :param via: proxy port for a server port; used by all, including the servers.
    """

    def __init__(
        self,
        size: int = 1,
        *,
        tls: TLSFiles | None = None,
        auth: Credentials | None = None,
        election: float = 2.0,
        via: Callable[[int], int] = lambda port: port,
    ) -> None:
        self._size = size
        self._tls = tls
        self._auth = auth
        self._election = election
        self._via = via
        self._ports: list[int] = []
        self._directory: TemporaryDataDirectory | None = None
        self._client: MongoClient[dict[str, Any]] | None = None
        self.members: list[Mongod] = []

    @property
    def host(self) -> str:
        """Host part of the members' addresses."""
        return self._tls.host if self._tls else "127.0.0.1"

    @property
    def hosts(self) -> list[str]:
        """`host:port` of each member."""
        return [f"{self.host}:{port}" for port in self._ports]

    @property
    def client(self) -> MongoClient[dict[str, Any]]:
        """Blocking client of the set, as the first user if there is one."""
        assert self._client is not None, "the replica set is not open"
        return self._client

    def uri(self, database: str, *, credentials: str | None = None, **options: str) -> str:
        """
        URI for the daemon.

        :param credentials: `user:password`, quoted; those of the first user unless given, "" for none.
        :param options: added to `replicaSet` and the options of TLS and `authSource`, which they can replace; ""
            removes one.
        """
        if credentials is None:
            credentials = f"{quote(self._auth.user, '')}:{quote(self._auth.password, '')}" if self._auth else ""
        known = {"replicaSet": NAME, **self._options(bool(credentials)), **options}
        query = urlencode({name: value for name, value in known.items() if value}, safe="/:")
        return f"mongodb://{credentials}{'@' if credentials else ''}{','.join(self.hosts)}/{database}?{query}"

    def open(self) -> None:
        """
        Start all members and wait for a writable primary.

        :raise SkipTest: there is no MongoDB server.
        """
        mongod_binary()
        self._directory = TemporaryDataDirectory(self._size)
        try:
            options = self._server_options(self._directory.path)
            self.members = [Mongod(self._directory.path / str(i), options) for i in range(self._size)]
            with ThreadPoolExecutor(self._size) as at_once:
                list(at_once.map(Mongod.start, self.members))
            self._ports = [self._via(member.port) for member in self.members]
            self._initiate()
            self._client = MongoClient(self.uri("admin"), **_CLIENT_OPTIONS)
            self.primary()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all members, whatever their state, and delete their data."""
        client, self._client = self._client, None
        if client is not None:
            # It would wait for a server to end its sessions; at the end of the process there is none.
            with timeout(_CLOSE_SECONDS):
                client.close()
        for member in self.members:
            if member.running:
                member.kill()
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def __enter__(self) -> ReplicaSet:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, member: int) -> None:
        """Start a member again, with its data."""
        self.members[member].start()

    def stop(self, member: int) -> None:
        """Shut a member down in order."""
        self.members[member].stop()

    def kill(self, member: int) -> None:
        """End a member with SIGKILL."""
        self.members[member].kill()

    def freeze(self, member: int) -> None:
        """Suspend a member: connections stay open, nothing is answered."""
        self.members[member].freeze()

    def thaw(self, member: int) -> None:
        """Resume a member."""
        self.members[member].thaw()

    def primary(self) -> int:
        """Number of the primary; waits until there is one."""
        return self.hosts.index(_await_writable(self.client)["me"])

    def step_down(self, seconds: int = 1) -> None:
        """Make the primary step down for some seconds; a set of one member has no primary meanwhile."""
        command: dict[str, Any] = {"replSetStepDown": seconds, "secondaryCatchUpPeriodSecs": 0, "force": True}
        deadline = time.monotonic() + ELECTED_SECONDS
        while True:
            try:
                with contextlib.suppress(AutoReconnect):
                    self.client.admin.command(command)
                return
            except OperationFailure as error:
                if error.code not in _STEP_DOWN_TIMEOUT_CODES or time.monotonic() > deadline:
                    raise

    def direct(self, member: int) -> MongoClient[dict[str, Any]]:
        """Blocking client of one member, primary or not; the caller closes it."""
        options: dict[str, Any] = {"directConnection": True, "timeoutMS": int(_COMMAND_SECONDS * 1000)}
        return MongoClient(self._address(member), **options, **self._driver_options())

    @contextlib.contextmanager
    def failpoint(
        self,
        *commands: str,
        times: int | None = None,
        skip: int | None = None,
        member: int | None = None,
        **data: Any,
    ) -> Iterator[None]:
        """
        Make commands fail within this context.

        :param commands: their names, such as `insert` or `commitTransaction`.
        :param times: number of commands that fail; all unless given.
        :param skip: number of commands to let pass first.
        :param member: number of the member; the primary unless given.
        :param data: `errorCode=`, `closeConnection=True`, `blockConnection=True, blockTimeMS=`,
            `writeConcernError={"code": ..., "errmsg": ...}`, `errorLabels=`, `appName=`, `namespace=`.
        """
        mode: Any = {"times": times} if times is not None else {"skip": skip} if skip is not None else "alwaysOn"
        with contextlib.closing(self.direct(self.primary() if member is None else member)) as server:
            point = {"configureFailPoint": "failCommand"}
            server.admin.command({**point, "mode": mode, "data": {"failCommands": list(commands), **data}})
            try:
                yield
            finally:
                # A server that was killed meanwhile has lost it.
                with contextlib.suppress(AutoReconnect):
                    server.admin.command({**point, "mode": "off"})

    def _server_options(self, directory: Path) -> list[str]:
        options = ["--replSet", NAME]
        if self._auth:
            key = directory / "members.key"
            key.touch(0o600)
            key.write_text(os.urandom(96).hex(), encoding="ascii")
            options += ["--auth", "--keyFile", str(key)]
        if self._tls:
            options += ["--tlsMode", "requireTLS", "--tlsCAFile", str(self._tls.ca)]
            options += ["--tlsCertificateKeyFile", str(self._tls.key), "--tlsAllowConnectionsWithoutCertificates"]
        return options

    def _initiate(self) -> None:
        members = [{"_id": number, "host": host} for number, host in enumerate(self.hosts)]
        settings = {
            "electionTimeoutMillis": int(self._election * 1000),
            "heartbeatIntervalMillis": int(self._election * 250),
            "heartbeatTimeoutSecs": max(1, int(self._election)),
        }
        bare: dict[str, Any] = self._driver_options(credentials=False)
        with contextlib.closing(MongoClient(self._address(0), directConnection=True, **bare)) as server:
            _initiate_set(server, {"_id": NAME, "members": members, "settings": settings})
            _await_writable(server)
            if self._auth:
                server.admin.command("createUser", self._auth.user, pwd=self._auth.password, roles=["root"])

    def _address(self, member: int) -> str:
        return f"mongodb://{self.host}:{self.members[member].port}/"

    def _options(self, credentials: bool) -> dict[str, str]:
        tls = {"tls": "true", "tlsCAFile": str(self._tls.ca)} if self._tls else {}
        return {**tls, **({"authSource": "admin"} if credentials else {})}

    def _driver_options(self, *, credentials: bool = True) -> dict[str, Any]:
        tls = {"tls": True, "tlsCAFile": str(self._tls.ca)} if self._tls else {}
        if not self._auth or not credentials:
            return tls
        return {**tls, "username": self._auth.user, "password": self._auth.password, "authSource": "admin"}


# Error when a member has not answered the others in time.
_NODE_NOT_FOUND = 74


def _initiate_set(server: MongoClient[dict[str, Any]], configuration: Mapping[str, Any]) -> None:
    """Initiate the set. On a busy machine a member may answer late; then initiation is repeated."""
    deadline = time.monotonic() + ELECTED_SECONDS
    while True:
        try:
            server.admin.command("replSetInitiate", configuration)
            return
        except OperationFailure as error:
            if error.code != _NODE_NOT_FOUND or time.monotonic() > deadline:
                raise


def _await_writable(client: MongoClient[dict[str, Any]]) -> Mapping[str, Any]:
    """`hello` response of the primary, once there is one. A secondary answers when the topology changes."""
    deadline = time.monotonic() + ELECTED_SECONDS
    known: dict[str, Any] = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(AutoReconnect):
            hello: dict[str, Any] = client.admin.command("hello", **known)
            if hello.get("isWritablePrimary"):
                return hello
            known = {"topologyVersion": hello["topologyVersion"], "maxAwaitTimeMS": _AWAIT_MILLISECONDS}
    raise AssertionError(f"no primary after {ELECTED_SECONDS:.0f} s")
