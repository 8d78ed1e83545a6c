"""The same random steps on memory, SQLite and MongoDB: all responses are alike and as the model expects."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from twisted.python.monkey import MonkeyPatcher

from tests.model.decentrl_steps import DecentrlSteps
from tests.model.didcomm_steps import DIDCommSteps
from tests.store.mongo.mongo_test_case import TIME_LIMIT, TIME_LIMIT_SETTINGS

# Sequences of steps, and steps of each.
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "25"))
STEPS = 60


class MediatorComparison(DIDCommSteps, DecentrlSteps):
    """All steps."""

    def __init__(self) -> None:
        self.patcher = MonkeyPatcher(*((module, name, TIME_LIMIT) for module, name in TIME_LIMIT_SETTINGS))
        self.patcher.patch()
        # Messages removed before the mediators began to count.
        self.before: Counter[str] = Counter()
        super().__init__()

    def teardown(self) -> None:
        self.stores_agree()
        super().teardown()
        self.patcher.restore()

    @rule(seconds=st.sampled_from([1, 5, 10, 15, 20, 61]))
    def advance_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.pass_time(1)
            self.ledger_balances()

    @rule()
    def restart(self) -> None:
        """Nothing is lost but sockets."""
        self.sockets.clear()
        for mirrored in tuple(self.decentrl_sockets):
            self.disconnect(mirrored)
        for mediator in self.mediators.mediator_fixtures:
            mediator.restart()
        self.expected.restart()
        self.before = self.expected.counts.copy()

    @invariant()
    def nothing_else_is_pushed(self) -> None:
        """No socket is pushed anything beyond the pushes checked by the steps."""
        self.assert_pushed()
        self.assert_events_pushed([])

    @invariant()
    def ledger_balances(self) -> None:
        """All accepted messages are acknowledged, expired, evicted or queued; the counters of all mediators agree."""
        assert self.expected.read_difference == 0
        totals = self.mediators.ask_all(lambda one: one.base.recorder.metrics.collect_totals())
        counts = self.expected.counts - self.before
        assert (totals["expired"], totals["evicted"]) == (counts["expired"], counts["evicted"])

    @rule()
    def stores_agree(self) -> None:
        """The queues hold what they should, and the ledgers of the stores agree."""
        waiting = self.mediators.ask_all(lambda one: one.wait_for(one.store.get_queue_totals()).messages)
        assert waiting == len(self.expected.messages) + len(self.events)
        ledgers = self.mediators.ask_all(lambda one: asdict(one.wait_for(one.store.read_ledger())))
        counts = self.expected.counts
        didcomm = {name: counts[name] for name in ("accepted", "acknowledged", "expired", "evicted")}
        expected_ledger = {**didcomm, "removed": 0, "withdrawn": 0, "waiting": len(self.expected.messages)}
        assert ledgers["didcomm"] == expected_ledger, ledgers
        assert (ledgers["decentrl"]["accepted"], ledgers["decentrl"]["waiting"]) == (self.sent, len(self.events)), (
            ledgers
        )


TestMediators = MediatorComparison.TestCase
TestMediators.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
)
