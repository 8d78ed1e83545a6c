"""The same random steps, on memory, SQLite and MongoDB: every answer is the same, and as the model has it."""

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
from tests.store.mongo.mongo_test_case import PATIENT, TIME_LIMITS

# Sequences of steps, and steps of each.
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "25"))
STEPS = 60


class Mediators(DIDCommSteps, DecentrlSteps):
    """All of it."""

    def __init__(self) -> None:
        self.patience = MonkeyPatcher(*((module, name, PATIENT) for module, name in TIME_LIMITS))
        self.patience.patch()
        # What had left before the mediators began to count.
        self.before: Counter[str] = Counter()
        super().__init__()

    def teardown(self) -> None:
        self.look()
        super().teardown()
        self.patience.restore()

    @rule(seconds=st.sampled_from([1, 5, 10, 15, 20, 61]))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.let_pass(1)
            self.reconciled()

    @rule()
    def restart(self) -> None:
        """Nothing is lost but sockets."""
        self.sockets.clear()
        for line in tuple(self.lines):
            self.hang_up(line)
        for one in self.mediators.mediator_fixtures:
            one.restart()
        self.expected.restart()
        self.before = self.expected.gone.copy()

    @invariant()
    def nothing_unasked(self) -> None:
        """Nobody is pushed anything but what came for it."""
        self.pushed()
        self.heard([])

    @invariant()
    def reconciled(self) -> None:
        """All that was accepted is acknowledged, expired, evicted or there; the counters say the same everywhere."""
        assert self.expected.difference == 0
        told = self.mediators.same(lambda one: one.base.recorder.metrics.collect_totals())
        gone = self.expected.gone - self.before
        assert (told["expired"], told["evicted"]) == (gone["expired"], gone["evicted"])

    @rule()
    def look(self) -> None:
        """The queues hold what they should, and the ledgers of the stores agree."""
        waiting = self.mediators.same(lambda one: one.get(one.store.get_queue_totals()).messages)
        assert waiting == len(self.expected.letters) + len(self.events)
        books = self.mediators.same(lambda one: asdict(one.get(one.store.read_ledger())))
        gone = self.expected.gone
        didcomm = {name: gone[name] for name in ("accepted", "acknowledged", "expired", "evicted")}
        ours = {**didcomm, "removed": 0, "withdrawn": 0, "waiting": len(self.expected.letters)}
        assert books["didcomm"] == ours, books
        assert (books["decentrl"]["accepted"], books["decentrl"]["waiting"]) == (self.sent, len(self.events)), books


TestMediators = Mediators.TestCase
TestMediators.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
)
