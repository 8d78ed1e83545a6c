"""What twistd and twist load: `twistd -n mediatord --config PATH`."""

from __future__ import annotations

import atexit
import os
import signal
import stat
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from twisted.application.service import Application, IService, MultiService
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python import usage

from mediatord.app.daemon import build_daemon
from mediatord.app.lifecycle import OrderedService
from mediatord.clock import install_monotonic_clock
from mediatord.config.file import ConfigError, load_config
from mediatord.config.location import CONFIG_PATH_VARIABLE, DEFAULT_CONFIG_PATH, get_default_config_path
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.http.memory_reclaimer import limit_malloc_mmap_threshold, tune_garbage_collector

_log = Logger()

# Seconds after which a daemon that has neither failed nor begun to serve counts as started: it goes on trying. Other
# nodes that work on a database are waited for that long at most.
STARTUP_GRACE_SECONDS = 15.0
# Seconds that the command which starts a daemon waits at most to be told how it went.
_PARENT_WAIT_SECONDS = 60
# Bytes that twistd reads of a message about a start that failed.
_MAX_STATUS_BYTES = 100


class StartupReporter:
    """
    Tells whoever started twistd how the start went: on standard error, in the log, and by the exit status.

    A daemon's parent process waits at a pipe for the outcome. Twisted itself writes to the pipe only for exceptions
    that are no SystemExit, and says that all is well before the reactor runs, when the store is not open yet and no
    worker has begun. A failure is reported when the process ends and the file with its id is gone, so that the
    command may be repeated at once.

    :param options: of twistd; empty where something else loads the plugin.
    """

    def __init__(self, options: MutableMapping[str, Any]) -> None:
        self._options = options
        self._pipe: int | None = None
        self._stderr: int | None = None
        self._has_log = False
        self._outcome: bytes | None = None

    def watch(self) -> None:
        """Prepare for the log, and for the fork that makes a daemon, in which standard error is lost."""
        self._has_log = True
        atexit.register(self.process_ends)
        if self._options.get("nodaemon", True):
            return
        with suppress(OSError):  # it may be closed
            self._stderr = os.dup(2)
        command = os.getpid()

        def limit_wait() -> None:
            if os.getpid() == command:
                _exit_after(_PARENT_WAIT_SECONDS)

        os.register_at_fork(after_in_parent=limit_wait)

    def hold(self) -> None:
        """Twisted considers the daemon started; its parent process is to wait until it serves."""
        self._pipe, self._options["statusPipe"] = self._options.get("statusPipe"), None

    def succeed(self) -> None:
        """The daemon serves, or has tried for long enough."""
        if self._outcome is None:
            self._outcome = b"0"
            self._report()

    def fail(self, *lines: str) -> None:
        """It cannot start, or cannot go on, and will end. :param lines: reasons."""
        self._say(*lines)
        if self._has_log or self._begin_log():
            for line in lines:
                _log.critical("{line}", line=line)
        if self._outcome is None:
            self._outcome = b"1 " + "; ".join(lines).encode("ascii", "backslashreplace")

    def _begin_log(self) -> bool:
        """Begin the log, which twistd does after it has made the service; False where that is not possible."""
        # A logger of the operator's own is but a name until twistd has read all of its command line.
        if "logfile" not in self._options or isinstance(self._options.get("logger"), str):
            return False
        from twisted.scripts._twistd_unix import UnixAppLogger

        try:
            UnixAppLogger(self._options).start(Application("mediatord"))
        except OSError:
            return False
        return True

    def _say(self, *lines: str) -> None:
        text = "".join(f"mediatord: {line}\n" for line in lines)
        if self._stderr is None:
            # Not sys.stderr, which twistd has taken over for its log.
            print(text, end="", file=sys.__stderr__, flush=True)  # noqa: T201
        else:
            with suppress(OSError):
                os.write(self._stderr, text.encode("utf-8", "backslashreplace"))

    def process_ends(self) -> None:
        """Remove the file with the process id, which Twisted leaves at some failures, and report the outcome."""
        path = self._options.get("pidfile")
        if path:
            with suppress(OSError, ValueError):
                if int(Path(path).read_bytes()) == os.getpid():
                    os.unlink(path)
        if self._is_parent_waiting():
            if self._outcome is None:
                self.fail("ended before it was up; its log may say why")
            self._report()

    def _is_parent_waiting(self) -> bool:
        """Whether Twisted has not told the parent process, which it does for exceptions."""
        pipe = self._pipe or self._options.get("statusPipe")
        try:
            return pipe is not None and stat.S_ISFIFO(os.fstat(pipe).st_mode)
        except OSError:
            return False

    def _report(self) -> None:
        """Write the outcome to the pipe, if it has not been done."""
        pipe, self._pipe = self._pipe or self._options.get("statusPipe"), None
        if pipe is not None and self._outcome is not None:
            self._options["statusPipe"] = None
            with suppress(OSError):  # nobody waits any more
                os.write(pipe, self._outcome[:_MAX_STATUS_BYTES])
                os.close(pipe)
        stderr, self._stderr = self._stderr, None
        if stderr is not None:
            # Or a daemon would keep the terminal, or whatever reads what the command has to say.
            os.close(stderr)


def _exit_after(seconds: float) -> None:
    """End this process after a while, whatever it waits for: a daemon that was killed tells its parent nothing."""

    def give_up(*_: object) -> NoReturn:
        print("mediatord: the daemon does not say how its start went", file=sys.__stderr__, flush=True)  # noqa: T201
        os._exit(1)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Options(usage.Options):
    """Options of the plugin."""

    optParameters: ClassVar[list[list[str | None]]] = [
        [
            "config",
            "c",
            None,
            f"the configuration; by default that of {CONFIG_PATH_VARIABLE}, else {DEFAULT_CONFIG_PATH}",
        ],
        ["banner", None, None, "text to print on standard output once the daemon is up"],
    ]
    settings: Config
    read: Callable[[], Config]

    def postOptions(self) -> None:
        """Read the configuration; a mistake costs a line for each and exit status 2."""
        # twistd may leave this directory.
        path = Path(self["config"] or get_default_config_path()).absolute()
        self.read = lambda: load_config(path)
        try:
            self.settings = load_config(path)
        except ConfigError as error:
            # A UsageError would make twistd print its own manual, and exit with 0.
            StartupReporter(self.twistd).fail(*error.problems)
            raise SystemExit(2) from None

    @property
    def twistd(self) -> MutableMapping[str, Any]:
        """The options of the program that loads the plugin."""
        return {} if self.parent is None else self.parent


class DaemonService(MultiService):
    """
    Turns what prevents the start into one line and exit status 1, and signals into what they ask for.

    :param say: tells whoever started us why there is no point in going on, in a line.
    :ivar failed: whether the daemon gave up.
    """

    def __init__(self, reactor: Any, say: Callable[[str], None]) -> None:
        super().__init__()
        self._reactor = reactor
        self._say = say
        self._stopping = False
        self._rotate: Callable[[], object] = lambda: None
        self._reload: Callable[[], object] = lambda: None
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
            daemon = build(self._reactor, config, give_up=self.give_up, ready=self.ready)
        except (StartupError, OSError) as error:
            self._exit_startup(error)
        self._rotate = daemon.rotate
        self._reload = partial(daemon.reload, read) if read else daemon.rotate
        daemon.setServiceParent(self)

    def privilegedStartService(self) -> None:
        """Bind the listeners."""
        try:
            super().privilegedStartService()
        except (StartupError, OSError) as error:
            self._exit_startup(error)

    def startService(self) -> None:
        """Start everything."""
        try:
            super().startService()
        except (StartupError, OSError) as error:
            self._exit_startup(error)
        self._reactor.callWhenRunning(self._install_signal_handlers)
        limit_malloc_mmap_threshold()
        self._reactor.callWhenRunning(tune_garbage_collector)

    def give_up(self, line: str) -> None:
        """There is no point in going on: say so, and stop in order, as soon as the reactor runs."""
        if not (self._stopping or self.failed):
            self.failed = True
            self._say(line)
            self._reactor.callWhenRunning(self._stop)

    def ready(self) -> None:
        """The daemon serves."""

    def _exit_startup(self, error: Exception) -> NoReturn:
        """End the process, which could not start."""
        self._say(_format_error(error))
        raise SystemExit(1)

    def _install_signal_handlers(self) -> None:
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


class TwistdDaemonService(DaemonService):
    """
    The same under twistd, which is told how the start went.

    :param banner: printed on standard output once the daemon is up.
    """

    def __init__(self, reactor: Any, status: StartupReporter, banner: str | None = None) -> None:
        super().__init__(reactor, status.fail)
        self._status = status
        self._banner = banner
        self._timer: IDelayedCall | None = None

    def startService(self) -> None:
        """Start everything, and wait until it serves."""
        super().startService()
        self._status.hold()
        self._timer = self._reactor.callLater(STARTUP_GRACE_SECONDS, self._status.succeed)

    def ready(self) -> None:
        """The daemon serves, or has listened for a while without its store."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        banner, self._banner = self._banner, None
        if banner:
            _print_banner(banner)
        self._status.succeed()


def makeService(options: Options) -> IService:
    """The daemon, for `twistd`."""
    from twisted.internet import reactor  # noqa: TID251  the one place that names it

    install_monotonic_clock(reactor)
    status = StartupReporter(options.twistd)
    root = TwistdDaemonService(reactor, status, options["banner"])
    root.run(options.settings, build_daemon, options.read)
    # twistd has no way to end with another status than 0 once the reactor has run. What is registered first is called
    # last.
    atexit.register(lambda: root.failed and _exit_with_failure())
    status.watch()
    return root


def _format_error(error: Exception) -> str:
    """In one line."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _exit_with_failure() -> NoReturn:
    sys.stdout.flush()
    os._exit(1)


def _print_banner(banner: str) -> None:
    # Not sys.stdout, which twistd has taken over for its log. It may be a pipe whose reader is gone.
    with suppress(OSError):
        print(banner, file=sys.__stdout__, flush=True)  # noqa: T201
