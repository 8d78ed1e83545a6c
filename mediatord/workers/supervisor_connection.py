"""The connection of a worker with its supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.stdio import StandardIO
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, LogLevel, eventAsText
from twisted.python.failure import Failure

from mediatord.delivery.connections import SendQueue
from mediatord.workers.control_channel import ControlChannel, encode_control_message
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
        self._log_queue: SendQueue | None = None
        self._dropped_lines = 0
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
        """A log observer: the supervisor writes the log of its workers. Lines that it does not read are dropped."""
        text = eventAsText(event, includeTimestamp=False, includeSystem=False)
        level = event.get("log_level") or LogLevel.info
        line = encode_control_message("log", [level.name, event.get("log_namespace", ""), text])
        if self._log_queue is not None and not self._log_queue.offer(line):
            self._dropped_lines += 1

    def _report_dropped_lines(self) -> None:
        if self._dropped_lines:
            dropped, self._dropped_lines = self._dropped_lines, 0
            _log.warn("dropped {dropped} log lines: the supervisor did not read them", dropped=dropped)

    async def fetch_metrics(self) -> bytes:
        """
        The metrics of all workers together, in text format.

        :raise TimeoutError: the supervisor does not answer.
        """
        text: str = await self.ask("all metrics", timeout=REPLY_TIMEOUT)
        return text.encode("utf-8")

    async def fetch_states(self) -> tuple[int, list[Any]]:
        """
        The number of workers, and the states of those that answered and of the supervisor.

        :raise TimeoutError: the supervisor does not answer.
        """
        asked, states = await self.ask("all states", timeout=REPLY_TIMEOUT)
        return asked, states

    def connectionMade(self) -> None:
        self._log_queue = SendQueue(
            self.write_line, MAX_BUFFERED_LOG_BYTES, MAX_BUFFERED_LOG_BYTES, self._report_dropped_lines
        )
        self.transport.registerProducer(self._log_queue, True)  # type: ignore[union-attr]  # it is connected

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
