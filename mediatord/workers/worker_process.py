"""
A worker process: what it gets at the start, the messages between it and the supervisor, and its life cycle.

Messages are JSON arrays of a word and its content, one per line, in both directions.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import quoteStringArgument
from twisted.internet.error import ProcessExitedAlready, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

import mediatord
from mediatord.observability.systemd import STATUS_WAITING_FOR_STORE


@dataclass(frozen=True, slots=True)
class InheritedSocket:
    """
    A listening socket that a process has inherited.

    :param family: address family as in :mod:`socket`.
    """

    descriptor: int
    family: socket.AddressFamily


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """
    What a worker has from its supervisor instead of `cluster` settings.

    :param node_socket: path of its node-to-node socket.
    :param secret: the same for all workers of a daemon, and at every start.
    :param seed: the secret of the mediator's identity when the daemon was started; key rotations do not change it.
    :param sockets: one for each endpoint of `listen`, in that order, and one for `admin.listen`.
    :param keys: content of a key file.
    """

    node_socket: str
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    sockets: tuple[InheritedSocket, ...]
    keys: bytes = field(repr=False)

    @property
    def address(self) -> str:
        """Endpoint string of its node-to-node listener, for servers and clients."""
        return f"unix:{quoteStringArgument(self.node_socket)}"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """
    Start parameters of a worker, passed through a pipe.

    :param settings: its configuration as JSON.
    """

    resources: WorkerResources
    settings: str = field(repr=False)

    def to_bytes(self) -> bytes:
        """Serialize for :meth:`from_bytes`."""
        resources = self.resources
        fields = [
            resources.node_socket,
            resources.secret.hex(),
            resources.seed.hex(),
            [(one.descriptor, int(one.family)) for one in resources.sockets],
            resources.keys.decode("utf-8"),
            self.settings,
        ]
        return json.dumps(fields).encode("ascii")

    @classmethod
    def from_bytes(cls, raw: bytes) -> WorkerSpec:
        """
        Parse what :meth:`to_bytes` made.

        :raise ValueError: it is incomplete, as when the supervisor was killed meanwhile.
        """
        node_socket, secret, seed, sockets, keys, settings = json.loads(raw)
        inherited = tuple(InheritedSocket(descriptor, socket.AddressFamily(family)) for descriptor, family in sockets)
        resources = WorkerResources(
            node_socket, bytes.fromhex(secret), bytes.fromhex(seed), inherited, keys.encode("utf-8")
        )
        return cls(resources, settings)


ControlMessageCallback = Callable[[str, Any], None]


def encode_control_message(word: str, content: Any = None) -> bytes:
    """Encode a message as one line."""
    return json.dumps([word, content], separators=(",", ":")).encode("ascii") + b"\n"


class ControlMessageDecoder:
    """
    Splits the data of a pipe into messages.

    :param on_message: called with word and content of each message.
    """

    def __init__(self, on_message: ControlMessageCallback) -> None:
        self._on_message = on_message
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Process received data."""
        self._buffer += data
        if b"\n" not in data:
            return
        *whole, remainder = bytes(self._buffer).split(b"\n")
        self._buffer[:] = remainder
        for line in whole:
            self._on_message(*json.loads(line))


# Descriptors in the worker; standard output and error are inherited.
COMMAND_FD, REPORT_FD, SPEC_FD, FIRST_SOCKET_FD = 0, 3, 4, 5

# In a process group of its own, so that signals from a terminal reach only the supervisor, which passes them on.
_PROGRAM = (
    "import os, sys; os.setpgid(0, 0); sys.path.append(sys.argv.pop(1)); from mediatord.cli import main; main()"
)
# Not for workers: their settings are in the spec, and systemd talks to the supervisor.
_SUPERVISOR_VARIABLES = ("MEDIATORD_", "NOTIFY_", "WATCHDOG_", "LISTEN_")


class WorkerProcess(ProcessProtocol):
    """
    A worker process as the supervisor sees it.

    :param name: name of its node.
    :param on_message: called with each message that this class does not handle.
    :param gone: called with a description of how it ended.
    :ivar ready: whether it has started.
    :ivar status: as for systemd.
    :ivar start_error: why it could not start, in one line; empty if unknown.
    :ivar missed_heartbeats: heartbeats without an answer; below 0 while it may still be starting.
    """

    def __init__(
        self,
        name: str,
        on_message: Callable[[WorkerProcess, str, Any], None],
        gone: Callable[[WorkerProcess, str], None],
        *,
        missed_heartbeats: int = 0,
    ) -> None:
        self.name = name
        self.ready = False
        self.status = STATUS_WAITING_FOR_STORE
        self.start_error = ""
        self.missed_heartbeats = missed_heartbeats
        self._on_message = on_message
        self._gone = gone
        self._decoder = ControlMessageDecoder(self._dispatch)
        self._has_ended = False
        self.pid = 0

    def spawn(
        self, reactor: Any, spec: bytes, sockets: Sequence[int], environ: Mapping[str, str] = os.environ
    ) -> None:
        """
        Start the process.

        :param spec: a serialized :class:`WorkerSpec`.
        :param sockets: descriptors that it inherits, from :data:`FIRST_SOCKET_FD` on.
        :raise OSError: it could not be started.
        """
        root = str(Path(mediatord.__file__).parent.parent)
        reactor.spawnProcess(
            self,
            sys.executable,
            # -P: files in the current directory must not shadow modules.
            [sys.executable, "-P", "-c", _PROGRAM, root, "worker", self.name],
            env={name: value for name, value in environ.items() if not name.startswith(_SUPERVISOR_VARIABLES)},
            childFDs={
                COMMAND_FD: "w",
                1: 1,
                2: 2,
                REPORT_FD: "r",
                SPEC_FD: "w",
                **dict(enumerate(sockets, FIRST_SOCKET_FD)),
            },
        )
        self.pid = self._process.pid
        self._process.writeToChild(SPEC_FD, spec)
        self._process.closeChildFD(SPEC_FD)

    @property
    def _process(self) -> Any:
        return self.transport

    def send(self, word: str, content: Any = None) -> None:
        """Send a message, if it is still running."""
        if not self._has_ended and COMMAND_FD in self._process.pipes:
            self._process.writeToChild(COMMAND_FD, encode_control_message(word, content))

    def signal(self, name: str) -> None:
        """Send a signal, if it is still running. :param name: such as `TERM`."""
        with contextlib.suppress(ProcessExitedAlready):
            self._process.signalProcess(name)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N802, N803  Twisted's names
        self._decoder.feed(data)

    def processEnded(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Called when it has ended and all its messages were received."""
        self._has_ended = True
        self._gone(self, _describe_exit(reason))

    def _dispatch(self, word: str, content: Any) -> None:
        if word == "pong":
            self.missed_heartbeats = 0
        elif word == "log":
            self._log(*content)
        elif word == "start error":
            self.start_error = content
        else:
            self._on_message(self, word, content)

    def _log(self, level: str, namespace: str, text: str) -> None:
        Logger(namespace).emit(LogLevel.lookupByName(level), "{worker}: {text}", worker=self.name, text=text)


def _describe_exit(reason: Failure) -> str:
    """How a process ended, for a log line."""
    ended = reason.value
    if isinstance(ended, ProcessTerminated) and ended.signal is not None:
        return f"was killed by {signal.Signals(ended.signal).name}"
    return f"ended with status {getattr(ended, 'exitCode', None) or 0}"
