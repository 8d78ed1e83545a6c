"""When probe cycles run, and the readiness verdicts."""

from __future__ import annotations

from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.config.settings import Config
from mediatord.observability.metrics import Metrics
from mediatord.probe.cycle import ProbeCycle, ProbeError
from mediatord.probe.readiness import (
    FIRST_ANSWER_SECONDS,
    IDLE_SECONDS,
    PROBE_TIMEOUT_SECONDS,
    ReadinessMonitor,
    ReadinessVerdict,
)

INTERVAL = 3.0


class ControlledCycles:
    """Cycles that end when the test says so."""

    def __init__(self) -> None:
        self.stage = "store"
        self.started_count = 0
        self._under_way: Deferred[None] | None = None

    async def run(self) -> None:
        self.started_count += 1
        self._under_way = Deferred()
        try:
            await self._under_way
        except CancelledError:
            raise ProbeError(self.stage, "no answer") from None

    def succeed(self) -> None:
        """Let the cycle in progress succeed."""
        self._end().callback(None)

    def fail(self, stage: str) -> None:
        """Let the cycle in progress fail."""
        self.stage = stage
        self._end().errback(ProbeError(stage, "a reason"))

    def _end(self) -> Deferred[None]:
        assert self._under_way is not None, "none is under way"
        ending, self._under_way = self._under_way, None
        return ending


class ReadinessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.rounds = ControlledCycles()
        self.trouble = ""
        self.open = True
        self.late = 0.0
        self.metrics = Metrics(CollectorRegistry(), version="1.2.3")
        self.readiness = ReadinessMonitor(
            self.clock,
            cast(ProbeCycle, self.rounds),
            INTERVAL,
            self.metrics,
            is_open=lambda: self.open,
            get_trouble=lambda: self.trouble,
            steady=lambda: self.clock.seconds() + self.late,
        )
        self.readiness.startService()

    def ask(self) -> Deferred[ReadinessVerdict]:
        return Deferred.fromCoroutine(self.readiness.ask())

    def verdict(self) -> ReadinessVerdict:
        """The verdict that is returned at once."""
        return self.successResultOf(self.ask())

    def series(self, name: str) -> list[str]:
        """The lines of a metric, without its name."""
        lines = self.metrics.render().decode().splitlines()
        return [line.removeprefix(name) for line in lines if line.startswith(name)]

    def become_ready(self) -> None:
        """Ask, and let the cycle succeed."""
        response = self.ask()
        self.rounds.succeed()
        self.successResultOf(response)

    def test_no_cycle_without_request(self) -> None:
        """Without requests nothing is sent, and there is no gauge."""
        self.clock.advance(3600)
        self.assertEqual(self.rounds.started_count, 0)
        self.assertEqual(self.series("mediator_ready "), [])

    def test_first_request_waits(self) -> None:
        """The first request waits for a cycle and reports its duration."""
        response, another = self.ask(), self.ask()
        self.clock.advance(0.25)
        self.assertNoResult(response)
        self.rounds.succeed()
        for item in (response, another):
            self.assertEqual(self.successResultOf(item), ReadinessVerdict("", 0.25, 0.0))
        self.assertEqual(self.rounds.started_count, 1)
        self.assertEqual(self.series("mediator_ready "), ["1.0"])
        self.assertEqual(self.series("mediator_ready_cycle_duration_seconds_sum "), ["0.25"])

    def test_later_requests_do_not_wait(self) -> None:
        """They get the last verdict, while the next cycle begins after the interval."""
        self.become_ready()
        self.clock.advance(INTERVAL - 0.5)
        self.assertEqual((self.verdict(), self.rounds.started_count), (ReadinessVerdict("", 0.0, 2.5), 1))
        self.clock.advance(0.5)
        self.assertEqual((self.verdict(), self.rounds.started_count), (ReadinessVerdict("", 0.0, 3.0), 2))

    def test_failure(self) -> None:
        """The failed stage is reported until a cycle succeeds; gauge and counter agree."""
        self.become_ready()
        for stage in ("push", "push", "listener"):
            self.clock.advance(INTERVAL)
            self.rounds.fail(stage)
            self.assertEqual(self.verdict().trouble, stage)
            self.assertEqual(self.series("mediator_ready "), ["0.0"])
        self.assertEqual(self.verdict().age, 3 * INTERVAL)
        counted = self.series("mediator_ready_failures_total")
        self.assertEqual(counted, ['{stage="push"} 2.0', '{stage="listener"} 1.0'])
        self.clock.advance(INTERVAL)
        self.rounds.succeed()
        self.assertEqual(self.verdict(), ReadinessVerdict("", 0.0, 0.0))
        self.assertEqual(self.series("mediator_ready "), ["1.0"])

    def test_first_cycle_fails(self) -> None:
        """No success is known then."""
        response = self.ask()
        self.rounds.fail("socket")
        self.assertEqual(self.successResultOf(response), ReadinessVerdict("socket"))

    def test_hanging_cycle_times_out(self) -> None:
        """It is abandoned at its deadline, and its stage reported."""
        response = self.ask()
        self.rounds.stage = "acknowledgement"
        self.clock.advance(PROBE_TIMEOUT_SECONDS)
        self.assertEqual(self.successResultOf(response), ReadinessVerdict("acknowledgement"))
        self.clock.advance(INTERVAL)
        self.assertEqual(self.rounds.started_count, 2)

    def test_old_success_expires(self) -> None:
        """Although no cycle has failed: the timer of the next one is late."""
        self.become_ready()
        self.rounds.stage = "store"
        self.late = 2 * INTERVAL + PROBE_TIMEOUT_SECONDS
        self.assertEqual(self.verdict().trouble, "")
        self.late += 0.1
        self.assertEqual(self.verdict(), ReadinessVerdict("store", 0.0, self.late))
        self.assertEqual(self.series("mediator_ready "), ["0.0"])

    def test_everything_is_known_within_ten_seconds(self) -> None:
        """At the longest interval that can be configured."""
        longest = Config.model_validate({"readiness": {"interval": "3s"}}).readiness.interval
        self.assertLess(2 * longest + PROBE_TIMEOUT_SECONDS, 10)
        self.assertGreater(FIRST_ANSWER_SECONDS, PROBE_TIMEOUT_SECONDS)
        with pytest.raises(ValidationError):
            Config.model_validate({"readiness": {"interval": "3001ms"}})

    def test_cycles_stop_without_requests(self) -> None:
        """After a minute nothing is sent, and the next request waits for a cycle."""
        self.become_ready()
        while self.clock.getDelayedCalls():
            self.clock.advance(INTERVAL)
            self.rounds.succeed()
            self.assertLess(self.clock.seconds(), IDLE_SECONDS + 2 * INTERVAL)
        self.assertGreater(self.clock.seconds(), IDLE_SECONDS)
        self.assertEqual(self.series("mediator_ready "), [])
        response = self.ask()
        self.assertNoResult(response)
        self.rounds.fail("push")
        self.assertEqual(self.successResultOf(response), ReadinessVerdict("push"))

    def test_request_restarts_the_minute(self) -> None:
        """The minute counts from the last request."""
        self.become_ready()
        for _ in range(int(2 * IDLE_SECONDS / INTERVAL)):
            self.clock.advance(INTERVAL)
            self.rounds.succeed()
            self.assertEqual(self.verdict().age, 0.0)

    def test_stop_during_cycle(self) -> None:
        """The cycle is cancelled, waiting requests are answered, and none begins."""
        response = self.ask()
        self.readiness.stopService()
        self.assertEqual(self.successResultOf(response).trouble, "stopping")
        self.assertEqual(self.verdict().trouble, "stopping")
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.series("mediator_ready_failures_total"), [])

    def test_stop_between_cycles(self) -> None:
        """The next cycle does not begin."""
        self.become_ready()
        self.readiness.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_closed_gate(self) -> None:
        """The daemon accepts no requests, although this service was not stopped."""
        self.become_ready()
        self.open = False
        self.assertEqual(self.verdict(), ReadinessVerdict("stopping", 0.0, 0.0))
        self.assertEqual(self.series("mediator_ready "), ["0.0"])

    def test_other_trouble(self) -> None:
        """Other reasons to get no traffic are reported, whatever the cycle's result."""
        self.become_ready()
        self.trouble = "not joined"
        self.assertEqual(self.verdict(), ReadinessVerdict("not joined", 0.0, 0.0))

    def test_internal_error(self) -> None:
        """An unexpected exception is a failure, and cycles go on."""

        class FailingCycles(ControlledCycles):
            async def run(self) -> None:
                self.started_count += 1
                raise RuntimeError("a fault")

        rounds = FailingCycles()
        readiness = ReadinessMonitor(
            self.clock,
            cast(ProbeCycle, rounds),
            INTERVAL,
            self.metrics,
            is_open=lambda: True,
            get_trouble=lambda: "",
            steady=self.clock.seconds,
        )
        readiness.startService()
        response = Deferred.fromCoroutine(readiness.ask())
        self.assertEqual(self.successResultOf(response), ReadinessVerdict("store"))
        self.clock.advance(INTERVAL)
        self.assertEqual(rounds.started_count, 2)
