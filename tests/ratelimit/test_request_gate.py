"""Draining: no new work, and an end when the old is done."""

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import ShutdownInProgress
from mediatord.ratelimit.admission import RequestGate


class RequestGateTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.gate = RequestGate(Clock())

    def begin(self, work: Deferred[int]) -> Deferred[int]:
        async def wait() -> int:
            return await work

        return Deferred.fromCoroutine(self.gate.run_request(wait))

    def test_work_passes_while_open(self) -> None:
        """The result of the work comes through."""
        self.gate.startService()
        work: Deferred[int] = Deferred()
        done = self.begin(work)
        work.callback(7)
        self.assertEqual(self.successResultOf(done), 7)

    def test_closed_before_the_start_and_after_the_stop(self) -> None:
        """Work is refused, and not begun."""
        self.failureResultOf(self.begin(Deferred()), ShutdownInProgress)
        self.gate.startService()
        self.gate.stopService()
        self.failureResultOf(self.begin(Deferred()), ShutdownInProgress)

    def test_held(self) -> None:
        """What comes waits, and is let in in order, or sent away at the end."""
        self.gate.startService()
        for release in (self.gate.release, self.gate.stopService):
            self.gate.hold()
            self.gate.hold()
            waiting, gives_up = self.begin(succeed(1)), self.begin(succeed(2))
            self.assertNoResult(waiting)
            gives_up.cancel()
            self.failureResultOf(gives_up, CancelledError)
            release()
            if release == self.gate.release:
                self.assertEqual(self.successResultOf(waiting), 1)
                self.assertEqual(self.successResultOf(self.begin(succeed(3))), 3)
            else:
                self.failureResultOf(waiting, ShutdownInProgress)

    def test_stopping_waits_for_what_is_inside(self) -> None:
        """Also for what fails."""
        self.gate.startService()
        works: list[Deferred[int]] = [Deferred(), Deferred()]
        results = [self.begin(work) for work in works]
        stopped = self.gate.stopService()
        works[0].callback(1)
        self.assertNoResult(stopped)
        works[1].errback(ValueError())
        self.assertIsNone(self.successResultOf(stopped))
        self.failureResultOf(results[1], ValueError)
