"""
Makes the requests of wake-ups in a child process, as each takes far more computing time than the rest of a wake-up.

Daemon and child exchange lines of JSON over pipes, at most one each way in a reactor iteration. Records, devices to
remove and the times of retries remain with the daemon; the child opens devices, makes requests, and backs off from
hosts that fail. Whatever the child has not answered when it ends is to be tried again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol, Protocol, connectionDone
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, LogLevel, eventAsText
from twisted.python.failure import Failure

from mediatord.push.requester import BUSY, PROCESS_ENDED, IPushRequester, PushRequest, RequestCallback, TimedResult
from mediatord.push.service import PushResult
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.interfaces.devices import Device

_log = Logger()

# The hidden subcommand that the child runs, and its descriptors.
SENDER_SUBCOMMAND = "push-sender"
COMMAND_FD, REPORT_FD = 0, 3
# Requests that the child has not answered; further ones are to be tried again.
MAX_UNANSWERED = 2_000
# Seconds before the child is started again, doubled each time that it ends within the longest of them.
FIRST_RESTART_PAUSE, MAX_RESTART_PAUSE = 1.0, 60.0
# Seconds without any answer, with requests waiting for one, after which the child is killed.
SILENCE_LIMIT = 60.0
# Seconds that the child has to end when the daemon stops.
STOP_SECONDS = 1.0
# Seconds between reports of the hosts that it backs off from, and log lines in one report.
_STATE_INTERVAL = 1.0
_MAX_LOG_LINES = 100


class LineSplitter:
    """Splits received data into lines of JSON."""

    def __init__(self) -> None:
        self._remainder: list[bytes] = []

    def receive(self, data: bytes) -> list[Any]:
        """Values of the lines that are complete now."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._remainder.append(data)
            return []
        whole = b"".join((*self._remainder, data[:end]))
        self._remainder = [data[end:]] if end < len(data) else []
        return [orjson.loads(line) for line in whole.splitlines()]


def encode_log_line(level: str, namespace: str, text: str) -> bytes:
    """A line of the child that has only something to log."""
    return _encode_line({"log": [[level, namespace, text]]})


def _encode_line(content: Mapping[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)


class SenderProcess(ProcessProtocol):
    """
    The child process as the daemon sees it: an :class:`~mediatord.push.requester.IPushRequester`.

    :param spawn: starts the process with this protocol.
    :param secrets: returns secrets of the mediator, which open devices.
    :param tells_owner: whether a webhook is configured, which needs the DIDs of accounts.
    """

    def __init__(
        self,
        clock: IReactorTime,
        spawn: Callable[[ProcessProtocol], object],
        secrets: Callable[[], Sequence[bytes]],
        monotonic: Callable[[], float],
        *,
        tells_owner: bool,
    ) -> None:
        self._clock = clock
        self._spawn = spawn
        self._secrets = secrets
        self._monotonic = monotonic
        self._tells_owner = tells_owner
        self._is_running = self._is_closing = self._is_paused = False
        self._sent_secrets: Sequence[bytes] = ()
        self._number = 0
        self._outgoing: list[list[Any]] = []
        self._unanswered: dict[int, tuple[int, RequestCallback]] = {}
        self._backing_off: Mapping[str, int] = {}
        self._lines = LineSplitter()
        self._restart_pause = FIRST_RESTART_PAUSE
        self._started_at = self._heard_at = 0.0
        self._flush_call: IDelayedCall | None = None
        self._restart_call: IDelayedCall | None = None
        self._kill_call: IDelayedCall | None = None
        self._check = LoopingCall(self._check_progress)
        self._check.clock = clock
        self._closed: list[Deferred[None]] = []

    def start(self) -> None:
        """Start the child. If it cannot be started, or ends, it is started again later."""
        self._restart_call = None
        self._lines, self._sent_secrets, self._is_paused = LineSplitter(), (), False
        self._started_at = self._monotonic()
        try:
            self._spawn(self)
        except OSError as error:
            self._restart_later(f"could not be started: {error.strerror}")

    def request(self, request: PushRequest, done: RequestCallback) -> None:
        """As of :class:`IPushRequester`."""
        targets = request.count_targets()
        if not self._is_running or len(self._unanswered) >= MAX_UNANSWERED:
            done(_make_retry(targets, BUSY if self._is_running else PROCESS_ENDED))
            return
        if not self._unanswered:
            self._heard_at = self._monotonic()
        self._number += 1
        self._unanswered[self._number] = targets, done
        devices = [(one.id.hex(), one.service, one.sealed.hex(), one.expires_at) for one in request.devices]
        owner = request.owner if self._tells_owner else ""
        self._outgoing.append([self._number, owner, devices, request.message_ids, request.webhook])
        if self._flush_call is None and not self._is_paused:
            self._flush_call = self._clock.callLater(0, self._flush)

    def count_backing_off(self) -> Mapping[str, int]:
        """As of :class:`IPushRequester`; as of a second ago."""
        return self._backing_off

    async def close(self) -> None:
        """As of :class:`IPushRequester`; the child has ended then."""
        is_first, self._is_closing = not self._is_closing, True
        if self._restart_call is not None:
            self._restart_call.cancel()
            self._restart_call = None
        if not self._is_running:
            return
        ended: Deferred[None] = Deferred()
        self._closed.append(ended)
        if is_first:
            self._kill_call = self._clock.callLater(STOP_SECONDS, self._kill)
            self._child.unregisterProducer()
            self._child.closeChildFD(COMMAND_FD)
            self._fail_unanswered()
        await ended

    @property
    def _child(self) -> Any:
        return self.transport

    def connectionMade(self) -> None:
        """The child was started."""
        self._is_running = True
        self._child.registerProducer(self, True)
        self._check.start(SILENCE_LIMIT / 10, now=False)

    def pauseProducing(self) -> None:  # noqa: N802  Twisted's name
        """The child does not read; requests are collected."""
        self._is_paused = True

    def resumeProducing(self) -> None:  # noqa: N802  Twisted's name
        """The child has read everything."""
        self._is_paused = False
        self._flush()

    def stopProducing(self) -> None:  # noqa: N802  Twisted's name
        """The child reads nothing more; it has ended, or will be killed."""

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N802, N803  Twisted's names
        """Answers, log lines and numbers of hosts."""
        self._heard_at = self._monotonic()
        for line in self._lines.receive(data):
            self._backing_off = line.get("backing_off", self._backing_off)
            for level, namespace, text in line.get("log", ()):
                Logger(namespace).emit(LogLevel.lookupByName(level), "push sender: {text}", text=text)
            for number, results in line.get("results", ()):
                answered = self._unanswered.pop(number, None)
                if answered is not None:
                    _, done = answered
                    _call(done, [TimedResult(PushResult(*result), *others) for result, *others in results])

    def processEnded(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Called when the child has ended, and all that it sent was received."""
        self._is_running = False
        self._check.stop()
        for call in (self._flush_call, self._kill_call):
            if call is not None and call.active():
                call.cancel()
        self._flush_call = self._kill_call = None
        self._outgoing.clear()
        self._backing_off = {}
        self._restart_later(_describe_exit(reason))
        self._fail_unanswered()
        closed, self._closed = self._closed, []
        for one in closed:
            one.callback(None)

    def _flush(self) -> None:
        self._flush_call = None
        if not self._outgoing or COMMAND_FD not in self._child.pipes:
            return
        line: dict[str, Any] = {"requests": self._outgoing}
        secrets = tuple(self._secrets())
        if secrets != self._sent_secrets:
            self._sent_secrets = secrets
            line["secrets"] = [secret.hex() for secret in secrets]
        self._outgoing = []
        self._child.writeToChild(COMMAND_FD, _encode_line(line))

    def _restart_later(self, what: str) -> None:
        if self._is_closing:
            return
        if self._monotonic() - self._started_at >= MAX_RESTART_PAUSE:
            self._restart_pause = FIRST_RESTART_PAUSE
        pause, self._restart_pause = self._restart_pause, min(2 * self._restart_pause, MAX_RESTART_PAUSE)
        _log.error("the push sender {what}; starting it again in {pause:.0f} s", what=what, pause=pause)
        self._restart_call = self._clock.callLater(pause, self.start)

    def _fail_unanswered(self) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for targets, done in unanswered.values():
            _call(done, _make_retry(targets, PROCESS_ENDED))

    def _check_progress(self) -> None:
        if self._unanswered and self._monotonic() - self._heard_at > SILENCE_LIMIT:
            _log.error("the push sender does not answer; killing it")
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessExitedAlready):
            self._child.signalProcess("KILL")


class SenderServer(Protocol):
    """
    The child's end: makes the requests of the lines that it receives.

    :param make_requester: given a function that returns the secrets of the mediator.
    :param on_end: called when the daemon has closed its end, or has ended.
    """

    def __init__(
        self,
        clock: IReactorTime,
        make_requester: Callable[[Callable[[], Sequence[bytes]]], IPushRequester],
        on_end: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._on_end = on_end
        self._secrets: Sequence[bytes] = ()
        self._requester = make_requester(lambda: self._secrets)
        self._lines = LineSplitter()
        self._results: list[tuple[int, list[tuple[Any, ...]]]] = []
        self._log_lines: list[tuple[str, str, str]] = []
        self._reported_state: Mapping[str, int] = {}
        self._flush_call: IDelayedCall | None = None
        self._state = LoopingCall(self.report_state)
        self._state.clock = clock

    def connectionMade(self) -> None:
        """Called when the pipes are open."""
        self._state.start(_STATE_INTERVAL)

    def dataReceived(self, data: bytes) -> None:
        """Requests, and secrets."""
        for line in self._lines.receive(data):
            if "secrets" in line:
                self._secrets = tuple(map(bytes.fromhex, line["secrets"]))
            for number, owner, devices, message_ids, webhook in line["requests"]:
                parsed = [
                    Device(bytes.fromhex(id_), service, bytes.fromhex(sealed), expires_at)
                    for id_, service, sealed, expires_at in devices
                ]
                self._make_request(number, PushRequest(owner, parsed, message_ids, webhook))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The daemon wants no more."""
        if self._state.running:
            self._state.stop()
        self._on_end()

    def report_state(self) -> None:
        """Report from how many hosts it backs off, if that has changed."""
        state = self._requester.count_backing_off()
        if state != self._reported_state and self.transport is not None:
            self._reported_state = state
            self.transport.write(_encode_line({"backing_off": state}))

    def observe(self, event: Any) -> None:
        """A log observer: the daemon writes the log."""
        if len(self._log_lines) < _MAX_LOG_LINES:
            text = eventAsText(event, includeTimestamp=False, includeSystem=False)
            level = event.get("log_level") or LogLevel.info
            self._log_lines.append((level.name, event.get("log_namespace", ""), text))
            self._arm()

    def _make_request(self, number: int, request: PushRequest) -> None:
        def answer(results: Sequence[TimedResult]) -> None:
            self._results.append((number, [(tuple(result), *others) for result, *others in results]))
            self._arm()

        self._requester.request(request, answer)

    def _arm(self) -> None:
        if self._flush_call is None:
            self._flush_call = self._clock.callLater(0, self._flush)

    def _flush(self) -> None:
        self._flush_call = None
        line: dict[str, Any] = {}
        if self._results:
            line["results"], self._results = self._results, []
        if self._log_lines:
            line["log"], self._log_lines = self._log_lines, []
        if self.transport is not None:
            self.transport.write(_encode_line(line))


def write_start_error(text: str) -> None:
    """Tell the daemon, before the reactor runs, why the child cannot start."""
    with contextlib.suppress(OSError):
        os.write(REPORT_FD, encode_log_line("error", __name__, text))


def _make_retry(targets: int, reason: str) -> list[TimedResult]:
    return [TimedResult(PushResult("retry", reason), 0.0)] * targets


def _describe_exit(reason: Failure) -> str:
    number = getattr(reason.value, "signal", None)
    return f"was killed by signal {number}" if number else f"ended with status {getattr(reason.value, 'exitCode', 0)}"


def _call(done: RequestCallback, results: Sequence[TimedResult]) -> None:
    try:
        done(results)
    except Exception:
        _log.failure("ending a wake-up failed", redact_failure())
