"""The request gate: requests in flight at shutdown."""

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import ShutdownInProgress
from mediatord.ratelimit.admission import RequestGate


class RequestGateTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.gate = RequestGate(Clock())

    def start_work(self, work: Deferred[int]) -> Deferred[int]:
        async def wait() -> int:
            return await work

        return Deferred.fromCoroutine(self.gate.run_request(wait))

    def test_open_gate_returns_result(self) -> None:
        """An open gate returns the result of the work."""
        self.gate.startService()
        work: Deferred[int] = Deferred()
        done = self.start_work(work)
        work.callback(7)
        self.assertEqual(self.successResultOf(done), 7)

    def test_closed_gate_refuses(self) -> None:
        """Before the start and after the stop work is refused and not started."""
        self.failureResultOf(self.start_work(Deferred()), ShutdownInProgress)
        self.gate.startService()
        self.gate.stopService()
        self.failureResultOf(self.start_work(Deferred()), ShutdownInProgress)

    def test_held_gate_queues(self) -> None:
        """Requests wait and are admitted in order, or refused at the end."""
        self.gate.startService()
        for release in (self.gate.release, self.gate.stopService):
            self.gate.hold()
            self.gate.hold()
            waiting, gives_up = self.start_work(succeed(1)), self.start_work(succeed(2))
            self.assertNoResult(waiting)
            gives_up.cancel()
            self.failureResultOf(gives_up, CancelledError)
            release()
            if release == self.gate.release:
                self.assertEqual(self.successResultOf(waiting), 1)
                self.assertEqual(self.successResultOf(self.start_work(succeed(3))), 3)
            else:
                self.failureResultOf(waiting, ShutdownInProgress)

    def test_stop_waits_for_requests_in_flight(self) -> None:
        """Failing ones are awaited too."""
        self.gate.startService()
        works: list[Deferred[int]] = [Deferred(), Deferred()]
        results = [self.start_work(work) for work in works]
        stopped = self.gate.stopService()
        works[0].callback(1)
        self.assertNoResult(stopped)
        works[1].errback(ValueError())
        self.assertIsNone(self.successResultOf(stopped))
        self.failureResultOf(results[1], ValueError)
