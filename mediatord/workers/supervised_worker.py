"""A worker process as its supervisor sees it, and what it gets at the start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import quoteStringArgument
from twisted.internet.error import ProcessExitedAlready, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

import mediatord
from mediatord.observability.systemd import STATUS_WAITING_FOR_STORE
from mediatord.workers.control_channel import ControlChannel


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """
    Start parameters of a worker, passed through a pipe: what it has from its supervisor.

    :param node_socket: path of its node-to-node socket.
    :param secret: the same for all workers of a daemon, and at every start.
    :param seed: the secret of the mediator's identity when the daemon was started; key rotations do not change it.
    :param sockets: descriptors of listening sockets, one for each endpoint of `listen`, in that order, one for
        `admin.listen`, and that of the control socket.
    :param keys: content of a key file.
    :param settings: its configuration as JSON.
    """

    node_socket: str
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    sockets: Sequence[int]
    keys: bytes = field(repr=False)
    settings: str = field(repr=False)

    @property
    def address(self) -> str:
        """Endpoint string of its node-to-node listener, for servers and clients."""
        return f"unix:{quoteStringArgument(self.node_socket)}"

    def to_bytes(self) -> bytes:
        """Serialize for :meth:`from_bytes`."""
        values = [one.decode("latin-1") if isinstance(one, bytes) else one for one in astuple(self)]
        return json.dumps(values).encode("ascii")

    @classmethod
    def from_bytes(cls, raw: bytes) -> WorkerSpec:
        """
        Parse what :meth:`to_bytes` made.

        :raise ValueError: it is incomplete, as when the supervisor was killed meanwhile.
        """
        node_socket, secret, seed, sockets, keys, settings = json.loads(raw)
        secret, seed, keys = [text.encode("latin-1") for text in (secret, seed, keys)]
        return cls(node_socket, secret, seed, sockets, keys, settings)


# Descriptors in the worker; standard output and error are inherited.
COMMAND_FD, REPORT_FD, SPEC_FD, FIRST_SOCKET_FD = 0, 3, 4, 5

# In a process group of its own, so that signals from a terminal reach only the supervisor, which passes them on.
_PROGRAM = (
    "import os, sys; os.setpgid(0, 0); sys.path.append(sys.argv.pop(1)); from mediatord.cli import main; main()"
)
# Not for child processes: their settings are in the spec, and systemd talks to the daemon's first process.
_SUPERVISOR_VARIABLES = ("MEDIATORD_", "NOTIFY_", "WATCHDOG_", "LISTEN_")
# Heartbeats that a new worker need not answer.
STARTING_HEARTBEATS = 6


def spawn_subcommand(
    reactor: Any, protocol: ProcessProtocol, arguments: Sequence[str], descriptors: Mapping[int, int | str]
) -> None:
    """
    Start a child process that runs a hidden subcommand; standard output and error are inherited.

    :param arguments: the subcommand, and its own.
    :param descriptors: further descriptors of the child, as of `spawnProcess`.
    :raise OSError: it could not be started.
    """
    root = str(Path(mediatord.__file__).parent.parent)
    reactor.spawnProcess(
        protocol,
        sys.executable,
        # -P: files in the current directory must not shadow modules.
        [sys.executable, "-P", "-c", _PROGRAM, root, *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith(_SUPERVISOR_VARIABLES)},
        childFDs={1: 1, 2: 2, **descriptors},
    )


class SupervisedWorker(ProcessProtocol, ControlChannel):
    """
    A worker process as the supervisor sees it.

    :param name: name of its node.
    :param gone: called with a description of how it ended.
    :ivar ready: whether it has started.
    :ivar status: as for systemd.
    :ivar start_error: why it could not start, in one line; empty if unknown.
    :ivar missed_heartbeats: heartbeats without an answer; below 0 while it may still be starting.
    """

    def __init__(self, reactor: Any, name: str, gone: Callable[[SupervisedWorker, str], None]) -> None:
        super().__init__(reactor)
        self.name = name
        self.ready = False
        self.status = STATUS_WAITING_FOR_STORE
        self.start_error = ""
        self.missed_heartbeats = -STARTING_HEARTBEATS
        self.pid = 0
        self._reactor = reactor
        self._gone = gone
        self._has_ended = False
        self.handlers |= {
            "pong": lambda _: setattr(self, "missed_heartbeats", 0),
            "start error": lambda line: setattr(self, "start_error", line),
            "log": lambda entry: self._log(*entry),
        }

    def spawn(self, spec: WorkerSpec, sockets: Sequence[int]) -> None:
        """
        Start the process.

        :param sockets: descriptors that it inherits, from :data:`FIRST_SOCKET_FD` on.
        :raise OSError: it could not be started.
        """
        spawn_subcommand(
            self._reactor,
            self,
            ["worker", self.name],
            {COMMAND_FD: "w", REPORT_FD: "r", SPEC_FD: "w", **dict(enumerate(sockets, FIRST_SOCKET_FD))},
        )
        self.pid = self._process.pid
        self._process.writeToChild(SPEC_FD, spec.to_bytes())
        self._process.closeChildFD(SPEC_FD)

    @property
    def _process(self) -> Any:
        return self.transport

    def write_line(self, line: bytes) -> None:
        if not self._has_ended and COMMAND_FD in self._process.pipes:
            self._process.writeToChild(COMMAND_FD, line)

    def signal(self, name: str) -> None:
        """Send a signal, if it is still running. :param name: such as `TERM`."""
        with contextlib.suppress(ProcessExitedAlready):
            self._process.signalProcess(name)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N802, N803  Twisted's names
        self.receive(data)

    def processEnded(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Called when it has ended and all its messages were received."""
        self._has_ended = True
        self.fail_asked()
        self._gone(self, _describe_exit(reason))

    def _log(self, level: str, namespace: str, text: str) -> None:
        Logger(namespace).emit(LogLevel.lookupByName(level), "{worker}: {text}", worker=self.name, text=text)


def _describe_exit(reason: Failure) -> str:
    """How a process ended, for a log line."""
    ended = reason.value
    if isinstance(ended, ProcessTerminated) and ended.signal is not None:
        return f"was killed by {signal.Signals(ended.signal).name}"
    return f"ended with status {getattr(ended, 'exitCode', None) or 0}"
