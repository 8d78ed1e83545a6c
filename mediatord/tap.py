"""The twistd plugin: `twistd -n mediatord --config PATH`."""

from __future__ import annotations

import atexit
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from twisted.application.service import Application, IService, MultiService
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python import usage

from mediatord.app.daemon import build_daemon
from mediatord.app.lifecycle import OrderedService
from mediatord.config.file import ConfigError, load_config
from mediatord.config.settings import Config
from mediatord.config.value_syntax import CONFIG_PATH_VARIABLE, DEFAULT_CONFIG_PATH, get_default_config_path
from mediatord.errors import StartupError
from mediatord.runtime.epoll_reactor import use_lean_events
from mediatord.runtime.memory_reclaimer import limit_malloc_mmap_threshold, tune_garbage_collector
from mediatord.runtime.reactor_clock import install_monotonic_clock

_log = Logger()

# Seconds after which a daemon that neither serves nor has failed counts as started: it keeps trying. It waits no
# longer for another process to release the database.
STARTUP_GRACE_SECONDS = 15.0
# Seconds for which the command that starts a daemon waits for the outcome.
_PARENT_WAIT_SECONDS = 60
# Bytes that twistd reads of an error message.
_MAX_STATUS_BYTES = 100


class StartupReporter:
    """
    Reports the outcome of the start under twistd: on standard error, in the log, and by the exit status.

    A daemon's parent process waits at a pipe for the outcome. Twisted itself reports failures only for exceptions
    other than SystemExit, and success before the reactor runs, when the store is not open yet and no worker has
    started. A failure is reported when the process ends and its pid file is removed, so that the command can be
    repeated at once.

    :param options: of twistd; empty if another program loads the plugin.
    """

    def __init__(self, options: MutableMapping[str, Any]) -> None:
        self._options = options
        self._pipe: int | None = None
        self._stderr: int | None = None
        self._has_log = False
        self._outcome: bytes | None = None

    def watch(self) -> None:
        """Prepare for the log, and for daemonization, which closes standard error."""
        self._has_log = True
        atexit.register(self.process_ends)
        if self._options.get("nodaemon", True):
            return
        with suppress(OSError):  # already closed
            self._stderr = os.dup(2)
        command = os.getpid()

        def limit_wait() -> None:
            if os.getpid() == command:
                _exit_after(_PARENT_WAIT_SECONDS)

        os.register_at_fork(after_in_parent=limit_wait)

    def hold(self) -> None:
        """Keep the parent process waiting, although Twisted considers the daemon started."""
        self._pipe, self._options["statusPipe"] = self._options.get("statusPipe"), None

    def succeed(self) -> None:
        """Report success."""
        if self._outcome is None:
            self._outcome = b"0"
            self._report()

    def fail(self, *lines: str) -> None:
        """Print and log why the daemon ends. :param lines: reasons."""
        self._say(*lines)
        if self._has_log or self._begin_log():
            for line in lines:
                _log.critical("{line}", line=line)
        if self._outcome is None:
            self._outcome = b"1 " + "; ".join(lines).encode("ascii", "backslashreplace")

    def _begin_log(self) -> bool:
        """Start the log before twistd does, which is after it has made the service; False if that is not possible."""
        # A custom logger is only a name until twistd has read its whole command line.
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
            # twistd redirects sys.stderr to its log.
            print(text, end="", file=sys.__stderr__, flush=True)  # noqa: T201
        else:
            with suppress(OSError):
                os.write(self._stderr, text.encode("utf-8", "backslashreplace"))

    def process_ends(self) -> None:
        """Remove the pid file, which Twisted leaves behind after some failures, and report the outcome."""
        path = self._options.get("pidfile")
        if path:
            with suppress(OSError, ValueError):
                if int(Path(path).read_bytes()) == os.getpid():
                    os.unlink(path)
        if self._is_parent_waiting():
            if self._outcome is None:
                self.fail("the daemon ended during startup; see its log")
            self._report()

    def _is_parent_waiting(self) -> bool:
        """Whether Twisted has not reported the outcome, as it does for exceptions."""
        pipe = self._pipe or self._options.get("statusPipe")
        try:
            return pipe is not None and stat.S_ISFIFO(os.fstat(pipe).st_mode)
        except OSError:
            return False

    def _report(self) -> None:
        """Write the outcome to the pipe, once."""
        pipe, self._pipe = self._pipe or self._options.get("statusPipe"), None
        if pipe is not None and self._outcome is not None:
            self._options["statusPipe"] = None
            with suppress(OSError):  # the parent process has ended
                os.write(pipe, self._outcome[:_MAX_STATUS_BYTES])
                os.close(pipe)
        stderr, self._stderr = self._stderr, None
        if stderr is not None:
            # The daemon must not keep the terminal, or a reader of the command, open.
            os.close(stderr)


def _exit_after(seconds: float) -> None:
    """End this process after a timeout: a killed daemon reports nothing to its parent."""

    def give_up(*_: object) -> NoReturn:
        text = "mediatord: timed out waiting for the daemon to start; see its log"
        print(text, file=sys.__stderr__, flush=True)  # noqa: T201
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
            f"configuration file; default: ${CONFIG_PATH_VARIABLE}, else {DEFAULT_CONFIG_PATH}",
        ],
        ["banner", None, None, "text to print on standard output when the daemon is ready"],
    ]
    settings: Config
    read: Callable[[], Config]

    def postOptions(self) -> None:
        """Read the configuration; print one line per error and exit with status 2 if there are any."""
        # twistd may change the working directory.
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
        """Options of the program that loads the plugin."""
        return {} if self.parent is None else self.parent


class DaemonService(MultiService):
    """
    Ends a failed start with one line and exit status 1, and handles signals.

    :param report_failure: called with one line when the daemon cannot start or go on.
    :ivar failed: whether the daemon could not go on.
    """

    def __init__(self, reactor: Any, report_failure: Callable[[str], None]) -> None:
        super().__init__()
        self._reactor = reactor
        self._report_failure = report_failure
        self._stopping = False
        self._rotate: Callable[[], object] = lambda: None
        self._reload: Callable[[], object] = lambda: None
        self.failed = False

    def run(
        self, config: Config, build: Callable[..., OrderedService], read: Callable[[], Config] | None = None
    ) -> None:
        """
        Build the daemon as the only child.

        :param build: as :func:`~mediatord.app.daemon.build_daemon`.
        :param read: reads the configuration again on SIGHUP; None in a worker, whose supervisor does that.
        """
        with self._exit_on_failure():
            daemon = build(self._reactor, config, give_up=self.give_up, ready=self.ready)
        self._rotate = daemon.rotate
        self._reload = partial(daemon.reload, read) if read else daemon.rotate
        daemon.setServiceParent(self)

    def privilegedStartService(self) -> None:
        """Bind the listeners."""
        with self._exit_on_failure():
            super().privilegedStartService()

    def startService(self) -> None:
        """Start everything."""
        with self._exit_on_failure():
            super().startService()
        self._reactor.callWhenRunning(self._install_signal_handlers)
        limit_malloc_mmap_threshold()
        self._reactor.callWhenRunning(tune_garbage_collector)

    def give_up(self, line: str) -> None:
        """Report that the daemon cannot go on, and stop it in order as soon as the reactor runs."""
        if not (self._stopping or self.failed):
            self.failed = True
            self._report_failure(line)
            self._reactor.callWhenRunning(self._stop)

    def ready(self) -> None:
        """Called when the daemon serves."""

    @contextmanager
    def _exit_on_failure(self) -> Iterator[None]:
        """Exit with status 1 if the body fails to start the daemon."""
        try:
            yield
        except (StartupError, OSError) as error:
            self._report_failure(_format_error(error))
            raise SystemExit(1) from error

    def _install_signal_handlers(self) -> None:
        """
        Handle SIGTERM and SIGINT (stop), SIGUSR1 (rotate the event log) and SIGHUP (reload and rotate).

        With the reactor's own handlers twistd would end as if killed by the signal; an orderly stop is a success.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._reactor.callFromThread(self._stop))
        signal.signal(signal.SIGUSR1, lambda *_: self._reactor.callFromThread(self._rotate))
        signal.signal(signal.SIGHUP, lambda *_: self._reactor.callFromThread(self._reload))

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            # Python removes its handlers before it ends, so that another signal would kill it.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            self._reactor.stop()


class TwistdDaemonService(DaemonService):
    """
    The daemon under twistd, with a report of the start.

    :param banner: printed on standard output once the daemon is up.
    """

    def __init__(self, reactor: Any, status: StartupReporter, banner: str | None = None) -> None:
        super().__init__(reactor, status.fail)
        self._status = status
        self._banner = banner
        self._timer: IDelayedCall | None = None

    def startService(self) -> None:
        """Start everything, and report success once it serves."""
        super().startService()
        self._status.hold()
        self._timer = self._reactor.callLater(STARTUP_GRACE_SECONDS, self._status.succeed)

    def ready(self) -> None:
        """Called when the daemon serves, or has listened for a while without its store."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        banner, self._banner = self._banner, None
        if banner:
            _print_banner(banner)
        self._status.succeed()


def makeService(options: Options) -> IService:
    """Build the service for `twistd`."""
    from twisted.internet import reactor  # noqa: TID251  the one place that names it

    use_lean_events(reactor)
    install_monotonic_clock(reactor)
    status = StartupReporter(options.twistd)
    root = TwistdDaemonService(reactor, status, options["banner"])
    root.run(options.settings, build_daemon, options.read)
    # twistd always exits with 0 once the reactor has run. Exit handlers run in reverse order.
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
    # twistd redirects sys.stdout to its log. The output may be a pipe that was closed.
    with suppress(OSError):
        print(banner, file=sys.__stdout__, flush=True)  # noqa: T201
