"""A push sender in this process, behind pipes as if it were a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReactorTime, ITransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from mediatord.push.requester import IPushRequester
from mediatord.push.sender_process import COMMAND_FD, REPORT_FD, SenderProcess, SenderServer

MakeRequester = Callable[[Callable[[], Sequence[bytes]]], IPushRequester]


class PipedChild:
    """
    A child process and its pipes.

    :ivar commands: what the daemon has written, one entry each time; likewise `reports` of the child.
    :ivar producer: of the daemon, as it was registered.
    :ivar is_hanging: it reads nothing.
    """

    def __init__(self, clock: IReactorTime, make_requester: MakeRequester, protocol: ProcessProtocol) -> None:
        self.commands: list[bytes] = []
        self.reports: list[bytes] = []
        self.pipes: dict[int, object] = {COMMAND_FD: None, REPORT_FD: None}
        self.producer: Any = None
        self.is_hanging = self.has_ended = False
        self._protocol = protocol
        self.server = SenderServer(clock, make_requester, lambda: self.end(0))
        protocol.makeConnection(cast(Any, self))
        self.server.makeConnection(cast(ITransport, self))

    def registerProducer(self, producer: object, streaming: bool) -> None:  # noqa: N802  Twisted's name
        """As of a process transport."""
        self.producer = producer

    def unregisterProducer(self) -> None:  # noqa: N802  Twisted's name
        """As of a process transport."""
        self.producer = None

    def writeToChild(self, childFD: int, data: bytes) -> None:  # noqa: N802, N803  Twisted's names
        """As of a process transport."""
        self.commands.append(data)
        if not (self.is_hanging or self.has_ended):
            self.server.dataReceived(data)

    def closeChildFD(self, descriptor: int) -> None:  # noqa: N802  Twisted's name
        """As of a process transport."""
        del self.pipes[descriptor]
        if not self.is_hanging:
            self.server.connectionLost()

    def signalProcess(self, signalID: str) -> None:  # noqa: N802, N803  Twisted's names
        """As of a process transport."""
        assert signalID == "KILL"
        self.kill()

    def write(self, data: bytes) -> None:
        """As of the transport of the child."""
        if not self.has_ended:
            self.reports.append(data)
            self._protocol.childDataReceived(REPORT_FD, data)

    def kill(self) -> None:
        """End by SIGKILL."""
        self.end(9)

    def end(self, signal: int) -> None:
        """End; 0 for no signal."""
        if not self.has_ended:
            self.has_ended = True
            self.server.connectionLost()
            reason = ProcessTerminated(signal=signal) if signal else ProcessDone(0)
            self._protocol.processEnded(Failure(reason))


class PipedSender:
    """
    Makes such processes, once it is started.

    :ivar children: in the order of their start.
    :ivar process: the daemon's view of them.
    :ivar fault: raised by further starts.
    """

    def __init__(
        self,
        clock: Any,
        make_requester: MakeRequester,
        secrets: Callable[[], Sequence[bytes]],
        *,
        tells_owner: bool = False,
    ) -> None:
        self.children: list[PipedChild] = []
        self.fault: OSError | None = None

        def spawn(protocol: ProcessProtocol) -> None:
            if self.fault is not None:
                raise self.fault
            self.children.append(PipedChild(clock, make_requester, protocol))

        self.process = SenderProcess(clock, spawn, secrets, clock.seconds, tells_owner=tells_owner)
