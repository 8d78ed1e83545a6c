"""When readiness cycles run, and what they say."""

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
        self.begun = 0
        self._under_way: Deferred[None] | None = None

    async def run(self) -> None:
        self.begun += 1
        self._under_way = Deferred()
        try:
            await self._under_way
        except CancelledError:
            raise ProbeError(self.stage, "no answer") from None

    def succeed(self) -> None:
        """The one under way gets through."""
        self._end().callback(None)

    def fail(self, stage: str) -> None:
        """The one under way does not."""
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
        """What somebody is told at once."""
        return self.successResultOf(self.ask())

    def series(self, name: str) -> list[str]:
        """The lines of a metric, without its name."""
        lines = self.metrics.render().decode().splitlines()
        return [line.removeprefix(name) for line in lines if line.startswith(name)]

    def ready_once(self) -> None:
        """Somebody has asked, and a cycle got through."""
        asked = self.ask()
        self.rounds.succeed()
        self.successResultOf(asked)

    def test_nobody_asks(self) -> None:
        """Then nothing is sent, and there is no gauge."""
        self.clock.advance(3600)
        self.assertEqual(self.rounds.begun, 0)
        self.assertEqual(self.series("mediator_ready "), [])

    def test_the_first_one_waits(self) -> None:
        """For the first cycle, which says how long it took."""
        asked, another = self.ask(), self.ask()
        self.clock.advance(0.25)
        self.assertNoResult(asked)
        self.rounds.succeed()
        for one in (asked, another):
            self.assertEqual(self.successResultOf(one), ReadinessVerdict("", 0.25, 0.0))
        self.assertEqual(self.rounds.begun, 1)
        self.assertEqual(self.series("mediator_ready "), ["1.0"])
        self.assertEqual(self.series("mediator_ready_cycle_duration_seconds_sum "), ["0.25"])

    def test_later_ones_do_not(self) -> None:
        """They are told of the last cycle, while the next one begins after the interval."""
        self.ready_once()
        self.clock.advance(INTERVAL - 0.5)
        self.assertEqual((self.verdict(), self.rounds.begun), (ReadinessVerdict("", 0.0, 2.5), 1))
        self.clock.advance(0.5)
        self.assertEqual((self.verdict(), self.rounds.begun), (ReadinessVerdict("", 0.0, 3.0), 2))

    def test_a_failure(self) -> None:
        """It is told by its stage until a cycle gets through; the gauge and the counter say the same."""
        self.ready_once()
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

    def test_the_first_one_fails(self) -> None:
        """Nothing is known of any success then."""
        asked = self.ask()
        self.rounds.fail("socket")
        self.assertEqual(self.successResultOf(asked), ReadinessVerdict("socket"))

    def test_a_cycle_without_end(self) -> None:
        """It is given up in time, for the stage it was at."""
        asked = self.ask()
        self.rounds.stage = "acknowledgement"
        self.clock.advance(PROBE_TIMEOUT_SECONDS)
        self.assertEqual(self.successResultOf(asked), ReadinessVerdict("acknowledgement"))
        self.clock.advance(INTERVAL)
        self.assertEqual(self.rounds.begun, 2)

    def test_an_old_success_is_none(self) -> None:
        """Though no cycle has failed: the timer that should have begun one has not come."""
        self.ready_once()
        self.rounds.stage = "store"
        self.late = 2 * INTERVAL + PROBE_TIMEOUT_SECONDS
        self.assertEqual(self.verdict().trouble, "")
        self.late += 0.1
        self.assertEqual(self.verdict(), ReadinessVerdict("store", 0.0, self.late))
        self.assertEqual(self.series("mediator_ready "), ["0.0"])

    def test_everything_is_known_within_ten_seconds(self) -> None:
        """At the longest interval that can be set."""
        longest = Config.model_validate({"readiness": {"interval": "3s"}}).readiness.interval
        self.assertLess(2 * longest + PROBE_TIMEOUT_SECONDS, 10)
        self.assertGreater(FIRST_ANSWER_SECONDS, PROBE_TIMEOUT_SECONDS)
        with pytest.raises(ValidationError):
            Config.model_validate({"readiness": {"interval": "3001ms"}})

    def test_nobody_asks_any_more(self) -> None:
        """After a minute nothing is sent, and whoever asks then waits for a cycle, whatever the last one said."""
        self.ready_once()
        while self.clock.getDelayedCalls():
            self.clock.advance(INTERVAL)
            self.rounds.succeed()
            self.assertLess(self.clock.seconds(), IDLE_SECONDS + 2 * INTERVAL)
        self.assertGreater(self.clock.seconds(), IDLE_SECONDS)
        self.assertEqual(self.series("mediator_ready "), [])
        asked = self.ask()
        self.assertNoResult(asked)
        self.rounds.fail("push")
        self.assertEqual(self.successResultOf(asked), ReadinessVerdict("push"))

    def test_who_asks_again_is_not_forgotten(self) -> None:
        """A minute counts from the last question."""
        self.ready_once()
        for _ in range(int(2 * IDLE_SECONDS / INTERVAL)):
            self.clock.advance(INTERVAL)
            self.rounds.succeed()
            self.assertEqual(self.verdict().age, 0.0)

    def test_stopping(self) -> None:
        """What is under way ends at once, who waits is told so, and nothing begins again."""
        asked = self.ask()
        self.readiness.stopService()
        self.assertEqual(self.successResultOf(asked).trouble, "stopping")
        self.assertEqual(self.verdict().trouble, "stopping")
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.series("mediator_ready_failures_total"), [])

    def test_stopping_between_cycles(self) -> None:
        """The next one does not come."""
        self.ready_once()
        self.readiness.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_closed_gate(self) -> None:
        """The daemon takes no work any more, though this has not been told to stop."""
        self.ready_once()
        self.open = False
        self.assertEqual(self.verdict(), ReadinessVerdict("stopping", 0.0, 0.0))
        self.assertEqual(self.series("mediator_ready "), ["0.0"])

    def test_other_trouble(self) -> None:
        """What keeps work away from this node is told, whatever the cycle says."""
        self.ready_once()
        self.trouble = "not joined"
        self.assertEqual(self.verdict(), ReadinessVerdict("not joined", 0.0, 0.0))

    def test_a_fault_of_ours(self) -> None:
        """What no cycle should raise is a failure all the same, and cycles go on."""

        class Broken(ControlledCycles):
            async def run(self) -> None:
                self.begun += 1
                raise RuntimeError("a fault")

        rounds = Broken()
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
        asked = Deferred.fromCoroutine(readiness.ask())
        self.assertEqual(self.successResultOf(asked), ReadinessVerdict("store"))
        self.clock.advance(INTERVAL)
        self.assertEqual(rounds.begun, 2)
