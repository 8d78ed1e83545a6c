"""A worker as the supervisor sees it: from spawning to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.error import ProcessExitedAlready, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

import mediatord
from mediatord.notify import WAITING
from mediatord.workers.lines import Lines, written

# Descriptors in the worker, besides those of standard output and error, which are ours.
ORDERS, REPORTS, BRIEF, FIRST_SOCKET = 0, 3, 4, 5

# A process group of its own: what is typed at a terminal is for the supervisor, who tells the workers.
_PROGRAM = (
    "import os, sys; os.setpgid(0, 0); sys.path.append(sys.argv.pop(1)); from mediatord.cli import main; main()"
)
# What only the supervisor is told: settings are in the brief, and systemd talks to one process.
_OURS = ("MEDIATORD_", "NOTIFY_", "WATCHDOG_", "LISTEN_")


class Child(ProcessProtocol):
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
        hear: Callable[[Child, str, Any], None],
        gone: Callable[[Child, str], None],
        *,
        missed: int = 0,
    ) -> None:
        self.name = name
        self.ready = False
        self.status = WAITING
        self.unable = ""
        self.missed = missed
        self._hear = hear
        self._gone = gone
        self._lines = Lines(self._take)
        self._ended = False
        self.pid = 0

    def spawn(
        self, reactor: Any, brief: bytes, sockets: Sequence[int], environ: Mapping[str, str] = os.environ
    ) -> None:
        """
        Become a process.

        :param brief: for its eyes only.
        :param sockets: descriptors that it is to have from :data:`FIRST_SOCKET` on.
        :raise OSError: there cannot be one more.
        """
        root = str(Path(mediatord.__file__).parent.parent)
        reactor.spawnProcess(
            self,
            sys.executable,
            # -P: what lies in the current directory must not shadow anybody's modules.
            [sys.executable, "-P", "-c", _PROGRAM, root, "worker", self.name],
            env={name: value for name, value in environ.items() if not name.startswith(_OURS)},
            childFDs={
                ORDERS: "w",
                1: 1,
                2: 2,
                REPORTS: "r",
                BRIEF: "w",
                **dict(enumerate(sockets, FIRST_SOCKET)),
            },
        )
        self.pid = self._process.pid
        self._process.writeToChild(BRIEF, brief)
        self._process.closeChildFD(BRIEF)

    @property
    def _process(self) -> Any:
        return self.transport

    def send(self, word: str, content: Any = None) -> None:
        """Say something to it, if it is still there."""
        if not self._ended and ORDERS in self._process.pipes:
            self._process.writeToChild(ORDERS, written(word, content))

    def signal(self, name: str) -> None:
        """Send a signal, if it is still there. :param name: as `TERM`."""
        with contextlib.suppress(ProcessExitedAlready):
            self._process.signalProcess(name)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N802, N803  Twisted's names
        """Called with what it says."""
        self._lines.feed(data)

    def processEnded(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Called when it has ended and all it said was heard."""
        self._ended = True
        self._gone(self, _told(reason))

    def _take(self, word: str, content: Any) -> None:
        if word == "pong":
            self.missed = 0
        elif word == "log":
            self._log(*content)
        elif word == "unable":
            self.unable = content
        else:
            self._hear(self, word, content)

    def _log(self, level: str, namespace: str, text: str) -> None:
        Logger(namespace).emit(LogLevel.lookupByName(level), "{worker}: {text}", worker=self.name, text=text)


def _told(reason: Failure) -> str:
    """How a process ended, in words."""
    ended = reason.value
    if isinstance(ended, ProcessTerminated) and ended.signal is not None:
        return f"was killed by {signal.Signals(ended.signal).name}"
    return f"ended with status {getattr(ended, 'exitCode', None) or 0}"
