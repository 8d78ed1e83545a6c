"""
What a worker is told when it begins.

What supervisor and workers say to each other: a JSON array of a word and what belongs to it, one a line.

A worker as the supervisor sees it: from spawning to its end.
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
    A socket that listens already, one of those a process was born with.

    :param family: an address family of :mod:`socket`.
    """

    descriptor: int
    family: socket.AddressFamily


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """
    What a worker has instead of `cluster` settings.

    :param path: of its node-to-node socket.
    :param secret: the same for all workers of a daemon, and at every start.
    :param seed: that of the mediator when the daemon was started, whichever keys it has come to since.
    :param sockets: one for each of the configuration's `listen`, in that order, and one for `admin.listen`.
    :param keys: the content of a key file: what all workers of a daemon have.
    """

    path: str
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    sockets: tuple[InheritedSocket, ...]
    keys: bytes = field(repr=False)

    @property
    def address(self) -> str:
        """Of its node-to-node listener: an endpoint string for server and client alike."""
        return f"unix:{quoteStringArgument(self.path)}"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """
    Everything a worker needs to know; for its eyes only.

    :param settings: its configuration as JSON.
    """

    place: WorkerResources
    settings: str = field(repr=False)

    def written(self) -> bytes:
        """For :meth:`read`."""
        place = self.place
        sockets = [(one.descriptor, int(one.family)) for one in place.sockets]
        told = [place.path, place.secret.hex(), place.seed.hex(), sockets, place.keys.decode("utf-8"), self.settings]
        return json.dumps(told).encode("ascii")

    @classmethod
    def read(cls, raw: bytes) -> WorkerSpec:
        """
        What :meth:`written` wrote.

        :raise ValueError: not all of it, as when the supervisor was killed just then.
        """
        path, secret, seed, sockets, keys, settings = json.loads(raw)
        inherited = tuple(InheritedSocket(descriptor, socket.AddressFamily(family)) for descriptor, family in sockets)
        place = WorkerResources(path, bytes.fromhex(secret), bytes.fromhex(seed), inherited, keys.encode("utf-8"))
        return cls(place, settings)


ControlMessageCallback = Callable[[str, Any], None]


def encode_control_message(word: str, content: Any = None) -> bytes:
    """One line."""
    return json.dumps([word, content], separators=(",", ":")).encode("ascii") + b"\n"


class ControlMessageDecoder:
    """
    Lines out of the pieces that pipes deliver.

    :param hear: called with the word and the content of every line.
    """

    def __init__(self, on_message: ControlMessageCallback) -> None:
        self._on_message = on_message
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._buffer += data
        if b"\n" not in data:
            return
        *whole, remainder = bytes(self._buffer).split(b"\n")
        self._buffer[:] = remainder
        for line in whole:
            self._on_message(*json.loads(line))


# Descriptors in the worker, besides those of standard output and error, which are ours.
COMMAND_FD, REPORT_FD, SPEC_FD, FIRST_SOCKET_FD = 0, 3, 4, 5

# A process group of its own: what is typed at a terminal is for the supervisor, who tells the workers.
_PROGRAM = (
    "import os, sys; os.setpgid(0, 0); sys.path.append(sys.argv.pop(1)); from mediatord.cli import main; main()"
)
# What only the supervisor is told: settings are in the brief, and systemd talks to one process.
_SUPERVISOR_VARIABLES = ("MEDIATORD_", "NOTIFY_", "WATCHDOG_", "LISTEN_")


class WorkerProcess(ProcessProtocol):
    """
    One process.

    :param name: of its node.
    :param hear: told what it says, unless that is for this class.
    :param gone: told how it ended.
    :ivar ready: whether it is up.
    :ivar status: how it is.
    :ivar unable: why it could not start, in one line; empty if it did not say so.
    :ivar pid: of the process.
    :ivar missed: heartbeats that it has not answered; below 0 while it may take time to begin.
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
        self, reactor: Any, brief: bytes, sockets: Sequence[int], environ: Mapping[str, str] = os.environ
    ) -> None:
        """
        Become a process.

        :param brief: for its eyes only.
        :param sockets: descriptors that it is to have from :data:`FIRST_SOCKET_FD` on.
        :raise OSError: there cannot be one more.
        """
        root = str(Path(mediatord.__file__).parent.parent)
        reactor.spawnProcess(
            self,
            sys.executable,
            # -P: what lies in the current directory must not shadow anybody's modules.
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
        self._process.writeToChild(SPEC_FD, brief)
        self._process.closeChildFD(SPEC_FD)

    @property
    def _process(self) -> Any:
        return self.transport

    def send(self, word: str, content: Any = None) -> None:
        """Say something to it, if it is still there."""
        if not self._has_ended and COMMAND_FD in self._process.pipes:
            self._process.writeToChild(COMMAND_FD, encode_control_message(word, content))

    def signal(self, name: str) -> None:
        """Send a signal, if it is still there. :param name: as `TERM`."""
        with contextlib.suppress(ProcessExitedAlready):
            self._process.signalProcess(name)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N802, N803  Twisted's names
        """Called with what it says."""
        self._decoder.feed(data)

    def processEnded(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Called when it has ended and all it said was heard."""
        self._has_ended = True
        self._gone(self, _describe_exit(reason))

    def _dispatch(self, word: str, content: Any) -> None:
        if word == "pong":
            self.missed_heartbeats = 0
        elif word == "log":
            self._log(*content)
        elif word == "unable":
            self.start_error = content
        else:
            self._on_message(self, word, content)

    def _log(self, level: str, namespace: str, text: str) -> None:
        Logger(namespace).emit(LogLevel.lookupByName(level), "{worker}: {text}", worker=self.name, text=text)


def _describe_exit(reason: Failure) -> str:
    """How a process ended, in words."""
    ended = reason.value
    if isinstance(ended, ProcessTerminated) and ended.signal is not None:
        return f"was killed by {signal.Signals(ended.signal).name}"
    return f"ended with status {getattr(ended, 'exitCode', None) or 0}"
