"""The supervisor as a worker sees it."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.stdio import StandardIO
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, LogLevel, eventAsText
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.workers.worker_process import (
    COMMAND_FD,
    REPORT_FD,
    ControlMessageDecoder,
    WorkerResources,
    encode_control_message,
)

_log = Logger()

# Seconds that the page of all workers may take.
REPLY_TIMEOUT = 3.0
# A worker whose reactor does nothing for so long ends, whether or not somebody is there to kill it.
_ALARM_SECONDS = 60
_ALARM_RESET_INTERVAL = 10.0
# Bytes of log lines that may wait for a supervisor that does not read.
MAX_BUFFERED_LOG_BYTES = 1 << 20


def reset_hang_alarm() -> None:
    """Let this process live on for a while, even if it hangs from now on."""
    # It counts by the monotonic clock: nobody dies because a wall clock is set.
    signal.setitimer(signal.ITIMER_REAL, _ALARM_SECONDS)


@implementer(IPushProducer)
class _LogForwarder:
    """
    Log lines on their way to the supervisor: while it does not read, they wait here, and the last are dropped.

    :param transport: to the supervisor.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._paused = False
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        transport.registerProducer(self, True)

    def write(self, line: bytes) -> None:
        """Send it, now or later or not at all."""
        if not self._paused:
            self._transport.write(line)
        elif self._bytes + len(line) > MAX_BUFFERED_LOG_BYTES:
            self._dropped += 1
        else:
            self._waiting.append(line)
            self._bytes += len(line)

    def pauseProducing(self) -> None:  # noqa: N802  Twisted's name
        self._paused = True

    def resumeProducing(self) -> None:  # noqa: N802  Twisted's name
        """There is room again."""
        self._paused = False
        while self._waiting and not self._paused:
            line = self._waiting.popleft()
            self._bytes -= len(line)
            self._transport.write(line)
        if self._dropped and not self._paused:
            dropped, self._dropped = self._dropped, 0
            _log.warn("{dropped} log lines were dropped: the supervisor did not read them", dropped=dropped)

    def stopProducing(self) -> None:  # noqa: N802  Twisted's name
        """Nobody will ever read them."""
        self._waiting.clear()
        self._paused = True


class SupervisorConnection(Protocol):
    """
    A worker's connection with its supervisor.

    :param orphaned: called when the supervisor is gone before this process has left; does not return.
    :ivar place: what makes it one of several.
    :ivar rotate: closes the segment of the event log.
    :ivar reload: takes a configuration (as JSON), what became of the one that was read, and keys (as a key file).
    :ivar use_keys: takes other keys later.
    :ivar measure: brings what is measured on demand up to date, and renders it.
    :ivar tell_state: what this process knows of itself, as values of JSON; None unless somebody may ask for it.
    """

    def __init__(self, reactor: Any, place: WorkerResources, on_supervisor_gone: Callable[[], None]) -> None:
        self.place = place
        self.rotate: Callable[[], object] = lambda: None
        self.reload: Callable[[str, str, str], None] = lambda settings, outcome, keys: None
        self.use_keys: Callable[[str], None] = lambda keys: None
        self.measure: Callable[[], Awaitable[bytes]] | None = None
        self.report_state: Callable[[], Any] | None = None
        self._reactor = reactor
        self._on_supervisor_gone = on_supervisor_gone
        self._decoder = ControlMessageDecoder(self._handle_message)
        self._pending_requests: dict[int, Deferred[Any]] = {}
        self._ids = count(1)
        self._log: _LogForwarder | None = None
        self._alarm_loop = LoopingCall(reset_hang_alarm)
        self._alarm_loop.clock = reactor

    def connect(self) -> None:
        """Begin to listen to the supervisor. Called when the reactor runs."""
        self._listen()
        self._alarm_loop.start(_ALARM_RESET_INTERVAL)

    def tell(self, state: str) -> None:
        """What is for systemd, where there is but one process."""
        name, _, value = state.partition("=")
        if name == "READY":
            self._send("ready")
        elif name == "STATUS":
            self._send("status", value)

    def report_failure(self, line: str) -> None:
        """There is no point in going on, or in beginning at all."""
        if self.transport is None:
            os.write(REPORT_FD, encode_control_message("unable", line))
        else:
            self._send("unable", line)

    def observe(self, event: Any) -> None:
        """A log observer: what this process has to say is for the supervisor to write down."""
        text = eventAsText(event, includeTimestamp=False, includeSystem=False)
        level = event.get("log_level") or LogLevel.info
        if self._log is not None:
            self._log.write(encode_control_message("log", [level.name, event.get("log_namespace", ""), text]))

    async def page(self) -> bytes:
        """
        What all workers together have measured.

        :raise TimeoutError: the supervisor does not answer.
        """
        page: str = await self._request("ask")
        return page.encode("utf-8")

    async def states(self) -> tuple[int, list[Any]]:
        """
        How many workers were asked what they know of themselves, and what they said, and the supervisor.

        :raise TimeoutError: the supervisor does not answer.
        """
        asked, states = await self._request("ask states")
        return asked, states

    async def _request(self, word: str) -> Any:
        number = next(self._ids)
        answer: Deferred[Any] = Deferred()
        self._pending_requests[number] = answer
        self._send(word, number)
        try:
            return await answer.addTimeout(REPLY_TIMEOUT, self._reactor)
        except DeferredTimeout:
            raise TimeoutError from None
        finally:
            del self._pending_requests[number]

    def connectionMade(self) -> None:
        """The supervisor can be spoken to."""
        self._log = _LogForwarder(self.transport)

    def dataReceived(self, data: bytes) -> None:
        """Called with what the supervisor says."""
        self._decoder.feed(data)

    def leave(self) -> None:
        """All is done; from now on it makes no difference whether the supervisor is there."""
        self._on_supervisor_gone = lambda: None

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The supervisor is gone."""
        self._on_supervisor_gone()

    def _listen(self) -> None:
        StandardIO(self, COMMAND_FD, REPORT_FD, self._reactor)  # type: ignore[call-arg]  # as it is on Windows

    def _handle_message(self, word: str, content: Any) -> None:
        if word == "ping":
            self._send("pong")
        elif word == "rotate":
            self.rotate()
        elif word == "reload":
            self.reload(*content)
            self._send("reloaded")
        elif word == "keys":
            self.use_keys(content)
            self._send("reloaded")
        elif word == "report":
            Deferred.fromCoroutine(self._report(content)).addErrback(_log_report_failure)
        elif word == "state" and self.report_state is not None:
            self._send("state", [content, self.report_state()])
        elif word in ("page", "states"):
            self._resolve_request(*content)

    def _resolve_request(self, number: int, answered: Any) -> None:
        answer = self._pending_requests.get(number)
        if answer is not None:
            answer.callback(answered)

    async def _report(self, number: int) -> None:
        if self.measure is not None:
            self._send("report", [number, (await self.measure()).decode("utf-8")])

    def _send(self, word: str, content: Any = None) -> None:
        if self.transport is not None:
            self.transport.write(encode_control_message(word, content))


def _log_report_failure(failure: Failure) -> None:
    _log.failure("what was measured could not be reported", failure)
