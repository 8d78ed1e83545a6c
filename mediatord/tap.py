"""What twistd and twist load: `twistd -n mediatord --config PATH`."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from twisted.application.service import IService, MultiService
from twisted.python import usage

from mediatord.config import Config, ConfigError, load
from mediatord.service import OrderedService, StartupError
from mediatord.steady import keep_steady
from mediatord.wiring import build


class Options(usage.Options):
    """Options of the plugin."""

    optParameters: ClassVar[list[list[str]]] = [["config", "c", "/etc/mediatord/mediator.yaml", "the configuration"]]
    settings: Config
    read: Callable[[], Config]

    def postOptions(self) -> None:
        """Read the configuration; a mistake costs a line for each and exit status 2."""
        # twistd may leave this directory.
        path = Path(self["config"]).absolute()
        self.read = lambda: load(path)
        try:
            self.settings = load(path)
        except ConfigError as error:
            # A UsageError would make twistd print its own manual, and exit with 0.
            _say(*error.problems)
            raise SystemExit(2) from None


class Root(MultiService):
    """
    Turns what prevents the start into one line and exit status 1, and signals into what they ask for.

    :param say: tells whoever started us a line.
    :ivar failed: whether the daemon gave up.
    """

    def __init__(self, reactor: Any, say: Callable[[str], None]) -> None:
        super().__init__()
        self._reactor = reactor
        self._say = say
        self._stopping = False
        self._rotate: Callable[[], None] = lambda: None
        self._reload: Callable[[], None] = lambda: None
        self.failed = False

    def run(
        self, config: Config, build: Callable[..., OrderedService], read: Callable[[], Config] | None = None
    ) -> None:
        """
        Have the daemon of this configuration as the one child; it starts with the parent.

        :param build: is given the reactor, the configuration, and whom to tell that there is no point in going on.
        :param read: reads the configuration anew; without it, that is not this process's to do.
        """
        try:
            daemon = build(self._reactor, config, give_up=self.give_up)
        except StartupError as error:
            self._leave(str(error))
        self._rotate = daemon.rotate
        self._reload = partial(daemon.reload, read) if read else daemon.rotate
        daemon.setServiceParent(self)

    def privilegedStartService(self) -> None:
        """Bind the listeners."""
        try:
            super().privilegedStartService()
        except StartupError as error:
            self._leave(str(error))

    def startService(self) -> None:
        """Start everything."""
        try:
            super().startService()
        except StartupError as error:
            self._leave(str(error))
        except OSError as error:
            self._leave(f"{error.filename}: {error.strerror}")
        self._reactor.callWhenRunning(self._take_signals)
        self._reactor.callWhenRunning(_spare_the_collector)

    def give_up(self, line: str) -> None:
        """There is no point in going on: say so, and stop in order, as soon as the reactor runs."""
        if not (self._stopping or self.failed):
            self.failed = True
            self._say(line)
            self._reactor.callWhenRunning(self._stop)

    def _leave(self, line: str) -> NoReturn:
        self._say(line)
        raise SystemExit(1)

    def _take_signals(self) -> None:
        """
        SIGTERM and SIGINT stop in order, SIGUSR1 closes the segment of the event log, and so does SIGHUP, which has
        the configuration read as well.

        The reactor's own handlers would have twistd end as if killed by the signal; an orderly stop is a success.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._reactor.callFromThread(self._stop))
        signal.signal(signal.SIGUSR1, lambda *_: self._reactor.callFromThread(self._rotate))
        signal.signal(signal.SIGHUP, lambda *_: self._reactor.callFromThread(self._reload))

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            # Not a handler that does nothing: Python takes handlers away before it ends, and one more would kill it.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            self._reactor.stop()


def _spare_the_collector() -> None:
    """
    Keep the garbage collector from walking over all that was imported, again and again.

    A message makes many short-lived objects and hardly a cycle; the defaults cost about a tenth of the throughput.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def makeService(options: Options) -> IService:
    """The daemon, for `twistd`."""
    from twisted.internet import reactor  # noqa: TID251  the one place that names it

    keep_steady(reactor)
    root = Root(reactor, _say)
    root.run(options.settings, build, options.read)
    # twistd has no way to end with another status than 0 once the reactor has run.
    atexit.register(lambda: root.failed and _fail())
    return root


def _fail() -> NoReturn:
    sys.stdout.flush()
    os._exit(1)


def _say(*lines: str) -> None:
    # Not sys.stderr, which twistd has taken over for its log.
    for line in lines:
        print(f"mediatord: {line}", file=sys.__stderr__, flush=True)  # noqa: T201
