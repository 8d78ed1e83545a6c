"""MongoDB servers that elect a primary among them."""

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
_GOODBYE_SECONDS = 0.5
_AWAIT_MILLISECONDS = 200
# A member that says nothing any more is found out about within some seconds. One that is busy must not be taken for
# dead: all connections would be closed, in the middle of their commands.
_WATCHFUL: dict[str, Any] = {
    "serverSelectionTimeoutMS": int(ELECTED_SECONDS * 1000),
    "heartbeatFrequencyMS": 500,
    "connectTimeoutMS": 5000,
    "serverMonitoringMode": "poll",
}
# ExceededTimeLimit and LockTimeout: a primary that was to be none for a second took longer to step down, and did not.
_STEP_DOWN_TIMEOUT_CODES = (262, 24)


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """
    What servers need for TLS, which they then insist on.

    :param ca: certificate of the authority, PEM.
    :param key: certificate and private key of all servers, PEM; also what the rig itself comes with.
    :param host: what the certificate is for, and the servers call each other.
    """

    ca: Path
    key: Path
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The first user, in database `admin`, who may do everything; with SCRAM-SHA-1 and SCRAM-SHA-256."""

    user: str
    password: str


class ReplicaSet:
    """
    `size` servers that elect a primary among them; not running before the `with`, or :meth:`open`.

    :param tls: servers that take TLS connections only.
    :param auth: servers that take nobody without credentials.
    :param election: seconds without a sign of a primary after which another is elected.
    :param via: the port that leads to one of a server; everybody takes that way, the servers themselves too.
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
        """What stands before the colon in the members' addresses."""
        return self._tls.host if self._tls else "127.0.0.1"

    @property
    def hosts(self) -> list[str]:
        """`host:port` of each member, as everybody knows it."""
        return [f"{self.host}:{port}" for port in self._ports]

    @property
    def client(self) -> MongoClient[dict[str, Any]]:
        """A blocking client of the whole set, as the first user if there is one."""
        assert self._client is not None, "the replica set is not open"
        return self._client

    def uri(self, database: str, *, credentials: str | None = None, **options: str) -> str:
        """
        A URI for the daemon.

        :param credentials: `user:password`, quoted; those of the first user unless given, "" for none.
        :param options: beside `replicaSet`, those of TLS and `authSource`, which they can replace; "" removes one.
        """
        if credentials is None:
            credentials = f"{quote(self._auth.user, '')}:{quote(self._auth.password, '')}" if self._auth else ""
        known = {"replicaSet": NAME, **self._options(bool(credentials)), **options}
        query = urlencode({name: value for name, value in known.items() if value}, safe="/:")
        return f"mongodb://{credentials}{'@' if credentials else ''}{','.join(self.hosts)}/{database}?{query}"

    def open(self) -> None:
        """
        Start all members and wait until there is a primary that takes writes.

        :raise SkipTest: there is no server to run.
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
            self._client = MongoClient(self.uri("admin"), **_WATCHFUL)
            self.primary()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all members, whatever state they are in, and delete their data."""
        client, self._client = self._client, None
        if client is not None:
            # It would wait for a server to say goodbye to; at the end of the process there is none any more.
            with timeout(_GOODBYE_SECONDS):
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
        """Run one again, with the data that it has."""
        self.members[member].start()

    def stop(self, member: int) -> None:
        """End one in order."""
        self.members[member].stop()

    def kill(self, member: int) -> None:
        """End one as a power cut would."""
        self.members[member].kill()

    def freeze(self, member: int) -> None:
        """One keeps its connections and says nothing any more."""
        self.members[member].freeze()

    def thaw(self, member: int) -> None:
        """One goes on as if no time had passed."""
        self.members[member].thaw()

    def primary(self) -> int:
        """The number of the member that takes writes; waits until there is one."""
        return self.hosts.index(_await_writable(self.client)["me"])

    def step_down(self, seconds: int = 1) -> None:
        """The primary is none for so long; with one member there is none at all meanwhile."""
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
        """A blocking client of one member, primary or not; to be closed by the caller."""
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
        Let commands fail while inside.

        :param commands: their names, such as `insert` or `commitTransaction`.
        :param times: only so many of them; all of them unless given.
        :param skip: not the first so many.
        :param member: by its number; the primary unless given.
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
                # A server that was killed meanwhile has forgotten it.
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


# What is said when a member has not answered the others in time.
_NODE_NOT_FOUND = 74


def _initiate_set(server: MongoClient[dict[str, Any]], configuration: Mapping[str, Any]) -> None:
    """Initiate the replica set; try again while a member does not answer in time."""
    deadline = time.monotonic() + ELECTED_SECONDS
    while True:
        try:
            server.admin.command("replSetInitiate", configuration)
            return
        except OperationFailure as error:
            if error.code != _NODE_NOT_FOUND or time.monotonic() > deadline:
                raise


def _await_writable(client: MongoClient[dict[str, Any]]) -> Mapping[str, Any]:
    """What the primary says of itself, once there is one. A member that is not one answers when that changes."""
    deadline = time.monotonic() + ELECTED_SECONDS
    known: dict[str, Any] = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(AutoReconnect):
            hello: dict[str, Any] = client.admin.command("hello", **known)
            if hello.get("isWritablePrimary"):
                return hello
            known = {"topologyVersion": hello["topologyVersion"], "maxAwaitTimeMS": _AWAIT_MILLISECONDS}
    raise AssertionError(f"no primary after {ELECTED_SECONDS:.0f} s")
