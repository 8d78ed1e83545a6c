"""Forwards, live deliveries and memory at a few and at many connections: the daemon beside Affinidi's mediator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.measured_mediator import CycleLoad, ForwardLoad, MeasuredMediator
from mediatord.bench.plan import DAEMON_SETTINGS, BenchmarkPlan
from mediatord.bench.processes import CoreAssignment, assign_cores, pin_to_cores, pss_bytes
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Figures,
    PerformanceTarget,
    ResultTable,
    format_size,
    run_interleaved,
)
from mediatord.wallet.temporary_daemon import run_temporary_daemon
from tests.peers.affinidi_server import find_program, read_version, run_affinidi_mediator
from tests.peers.comparison import OURS, TIMES, ComparisonOptions, Participants, compare_rows, select_targets
from tests.peers.driver_processes import DriverUnavailable

AFFINIDI = "affinidi"
# By number of connections.
GOALS = {1: 1.0, 8: 1.5, 32: 2.5, 128: 3.0}

_LIVE_WALLETS = 64
_WARM_UP_SECONDS = 0.5
_MIB = 1 << 20
_PSS = "PSS MiB"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "push p50", "push p99", TIMES, _PSS)


class _Contender:
    """
    A mediator, its load of forwards, and its load of live deliveries.

    :ivar started: its memory without wallets.
    :ivar failures: a sentence for everything that goes wrong.
    """

    def __init__(self, mediator: MeasuredMediator, size: int) -> None:
        self._pid = mediator.pid
        self.started = self._memory()
        self.failures = list[str]()
        self._forwards = ForwardLoad(mediator, self.failures, size)
        self._cycles = CycleLoad(mediator, self.failures, _LIVE_WALLETS, size)

    def post(self, connections: int, seconds: float) -> Figures:
        """Closed loop of forwards to wallets that are offline; the memory afterwards."""
        return self._forwards.post(connections, seconds) | self._memory()

    def deliver(self, connections: int, seconds: float) -> Figures:
        """Closed loop of forwards to live wallets, which acknowledge them; the memory afterwards."""
        return self._cycles.run(connections, seconds).figures() | self._memory()

    def describe(self) -> str:
        """A sentence on all that was sent."""
        check, pushed, left = self._forwards.stored_check, self._cycles.pushed, self._cycles.count_queued()
        sent = f"{check.accepted} forwards answered, {check.stored} stored"
        return f"{sent}; {pushed} pushed and acknowledged, {left} of them still queued"

    def _memory(self) -> Figures:
        return {_PSS: pss_bytes(self._pid) / _MIB}


def measure_mediators(options: ComparisonOptions) -> ResultTable:
    """One table for the smallest size; messages per second of the servers' CPU time are compared."""
    participants, cores, size = Participants(), assign_cores(), min(options.sizes)
    rows, targets = dict[str, Figures](), list[PerformanceTarget]()
    with ExitStack() as stack:
        contenders = {OURS: _Contender(_mediatord(stack, cores), size)}
        try:
            contenders[AFFINIDI] = _Contender(_affinidi(stack, cores, participants), size)
        except (DriverUnavailable, RuntimeError) as error:
            participants.skipped[AFFINIDI] = str(error)
        for connections, goal in GOALS.items():
            prefix = f"{connections} connection{'s' if connections > 1 else ''}  "
            rows |= _compare(prefix, {name: one.post for name, one in contenders.items()}, connections, options)
            targets += select_targets(rows, prefix, {AFFINIDI: goal}, "forwards by CPU time")
        for connections in GOALS:
            prefix = f"{connections} live  "
            rows |= _compare(prefix, {name: one.deliver for name, one in contenders.items()}, connections, options)
        sent = [f"{name}: {one.describe()}." for name, one in contenders.items()]
    rows |= {f"started  {name}": one.started for name, one in contenders.items()}
    failures = [f"{name}: {failure}" for name, one in contenders.items() for failure in one.failures]
    notes = (
        f"{format_size(size)}, {_LIVE_WALLETS} live wallets. {cores.note} Ours commits with synchronous=FULL.",
        "Affinidi's store is not synced: what it answered outlives its process, and not the machine. It logs "
        "warnings only, ours logs every message.",
        *sent,
        *participants.notes(),
    )
    return ResultTable("Mediators at their number of connections", _COLUMNS, rows, targets, list(notes), failures)


def _compare(
    prefix: str, runs: dict[str, Callable[[int, float], Figures]], connections: int, options: ComparisonOptions
) -> dict[str, Figures]:
    for run in runs.values():
        run(connections, _WARM_UP_SECONDS)
    contenders = {name: partial(run, connections, options.seconds) for name, run in runs.items()}
    return compare_rows(run_interleaved(contenders, options.rounds), prefix, PER_CPU_SECOND)


def _mediatord(stack: ExitStack, cores: CoreAssignment) -> MeasuredMediator:
    with pin_to_cores(cores.server):
        daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
    return stack.enter_context(closing(MeasuredMediator(BenchmarkPlan(), daemon)))


def _affinidi(stack: ExitStack, cores: CoreAssignment, participants: Participants) -> MeasuredMediator:
    program = find_program()
    directory = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-")))
    with pin_to_cores(cores.server):
        server = stack.enter_context(run_affinidi_mediator(program, directory))
    participants.versions[AFFINIDI] = {"affinidi-messaging-mediator": read_version(program)}
    plan = BenchmarkPlan(target=server.url, target_pid=server.pid)
    return stack.enter_context(closing(MeasuredMediator(plan, None)))
