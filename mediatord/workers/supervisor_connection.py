"""The connection of a worker with its supervisor."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.stdio import StandardIO
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, LogLevel, eventAsText
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.workers.control_channel import ControlChannel, NoAnswer, encode_control_message
from mediatord.workers.supervised_worker import COMMAND_FD, REPORT_FD, WorkerSpec

_log = Logger()

# Seconds for a query of all workers.
REPLY_TIMEOUT = 3.0
# Seconds after which a worker with a blocked reactor is killed by its own alarm, even without a supervisor.
_ALARM_SECONDS = 60
_ALARM_RESET_INTERVAL = 10.0
# Bytes of log lines buffered while the supervisor does not read.
MAX_BUFFERED_LOG_BYTES = 1 << 20


def reset_hang_alarm() -> None:
    """Restart the alarm that kills this process if its reactor is blocked."""
    # The timer is not affected when the wall clock is set.
    signal.setitimer(signal.ITIMER_REAL, _ALARM_SECONDS)


@implementer(IPushProducer)
class _LogForwarder:
    """
    Sends log lines to the supervisor; buffers them while it does not read, and drops what exceeds the buffer.

    :param transport: connection to the supervisor.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._paused = False
        self._buffer: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        transport.registerProducer(self, True)

    def write(self, line: bytes) -> None:
        """Send, buffer or drop a line."""
        if not self._paused:
            self._transport.write(line)
        elif self._bytes + len(line) > MAX_BUFFERED_LOG_BYTES:
            self._dropped += 1
        else:
            self._buffer.append(line)
            self._bytes += len(line)

    def pauseProducing(self) -> None:  # noqa: N802  Twisted's name
        self._paused = True

    def resumeProducing(self) -> None:  # noqa: N802  Twisted's name
        """Send the buffered lines."""
        self._paused = False
        while self._buffer and not self._paused:
            line = self._buffer.popleft()
            self._bytes -= len(line)
            self._transport.write(line)
        if self._dropped and not self._paused:
            dropped, self._dropped = self._dropped, 0
            _log.warn("{dropped} log lines were dropped: the supervisor did not read them", dropped=dropped)

    def stopProducing(self) -> None:  # noqa: N802  Twisted's name
        """Drop the buffered lines; the connection is lost."""
        self._buffer.clear()
        self._paused = True


class SupervisorConnection(Protocol, ControlChannel):
    """
    A worker's end of the control channel.

    :param on_supervisor_gone: called when the supervisor disappears before :meth:`leave`; does not return.
    :ivar spec: what this worker has from its supervisor.
    """

    def __init__(self, reactor: Any, spec: WorkerSpec, on_supervisor_gone: Callable[[], None]) -> None:
        super().__init__(reactor)
        self.spec = spec
        self.handlers["ping"] = lambda _: self.send("pong")
        self._reactor = reactor
        self._on_supervisor_gone = on_supervisor_gone
        self._log: _LogForwarder | None = None
        self._alarm_loop = LoopingCall(reset_hang_alarm)
        self._alarm_loop.clock = reactor

    def connect(self) -> None:
        """Connect to the supervisor; called when the reactor runs."""
        StandardIO(self, COMMAND_FD, REPORT_FD, self._reactor)  # type: ignore[call-arg]  # as it is on Windows
        self._alarm_loop.start(_ALARM_RESET_INTERVAL)

    def notify(self, state: str) -> None:
        """Pass a state for systemd to the supervisor."""
        name, _, value = state.partition("=")
        if name in ("READY", "STATUS"):
            self.send(name.lower(), value)

    def report_failure(self, line: str) -> None:
        """Report in one line why this process cannot start or go on."""
        if self.transport is None:
            os.write(REPORT_FD, encode_control_message("start error", line))
        else:
            self.send("start error", line)

    def observe(self, event: Any) -> None:
        """A log observer: the supervisor writes the log of its workers."""
        text = eventAsText(event, includeTimestamp=False, includeSystem=False)
        level = event.get("log_level") or LogLevel.info
        if self._log is not None:
            self._log.write(encode_control_message("log", [level.name, event.get("log_namespace", ""), text]))

    async def fetch_metrics(self) -> bytes:
        """
        The metrics of all workers together, in text format.

        :raise TimeoutError: the supervisor does not answer.
        """
        text: str = await self._fetch("all metrics")
        return text.encode("utf-8")

    async def fetch_states(self) -> tuple[int, list[Any]]:
        """
        The number of workers, and the states of those that answered and of the supervisor.

        :raise TimeoutError: the supervisor does not answer.
        """
        asked, states = await self._fetch("all states")
        return asked, states

    async def _fetch(self, word: str) -> Any:
        try:
            return await self.ask(word, timeout=REPLY_TIMEOUT)
        except NoAnswer:
            raise TimeoutError from None

    def connectionMade(self) -> None:
        self._log = _LogForwarder(self.transport)

    def dataReceived(self, data: bytes) -> None:
        self.receive(data)

    def write_line(self, line: bytes) -> None:
        if self.transport is not None:
            self.transport.write(line)

    def leave(self) -> None:
        """Ignore the end of the supervisor from now on: this process has stopped."""
        self._on_supervisor_gone = lambda: None

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._on_supervisor_gone()
