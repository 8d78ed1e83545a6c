"""Hands closed log segments to a child process, one at a time (see :mod:`mediatord.eventlog.seal`)."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

from twisted.internet.error import ProcessDone
from twisted.internet.interfaces import IReactorProcess
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.eventlog import seal


class Sealer:
    """
    Seals one segment after the other. A failure is logged; the segment then stays as it is until the next start.

    :ivar compress: whether segments are compressed, or only flushed to disk.
    """

    _log = Logger()

    def __init__(self, reactor: IReactorProcess, compress: bool = True) -> None:
        self._reactor = reactor
        self.compress = compress
        self._waiting: deque[Path] = deque()
        self._busy = False

    def __call__(self, path: Path) -> None:
        """Seal this closed segment as soon as those before it are done."""
        self._waiting.append(path)
        self._next()

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        path = self._waiting.popleft()
        # -I: the directory of the program, which is this package, must not shadow the standard library.
        command = [sys.executable, "-I", seal.__file__, str(path), *(["--gzip"] if self.compress else [])]
        try:
            self._reactor.spawnProcess(_Sealing(self, path), sys.executable, command, env={})
        except OSError as error:
            self.ended(path, Failure(error))

    def ended(self, path: Path, reason: Failure) -> None:
        """A child has ended; called by its protocol."""
        self._busy = False
        if not reason.check(ProcessDone):
            self._log.warn("log segment {name} could not be sealed: {reason}", name=path.name, reason=reason.value)
        self._next()


class _Sealing(ProcessProtocol):
    def __init__(self, sealer: Sealer, path: Path) -> None:
        self._sealer = sealer
        self._path = path

    def processEnded(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        self._sealer.ended(self._path, reason)
