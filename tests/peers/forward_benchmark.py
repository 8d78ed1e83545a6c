"""Forwards that are stored and then answered 202: the daemon beside a mediator made of Veramo's plugins."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.load_generator import TargetServer, post
from mediatord.bench.measured_mediator import DATABASE_FILE, StoredMessageCheck, count_stored_rows
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS
from mediatord.bench.processes import CoreAssignment, assign_cores, pin_to_cores
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    format_size,
    run_interleaved,
)
from mediatord.bench.wallet_group import WalletGroup, enrol_group
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.temporary_daemon import run_temporary_daemon
from tests.peers.comparison import OURS, TIMES, ComparisonOptions, Participants, compare_rows, select_targets
from tests.peers.driver_processes import NODE, DriverProgram, DriverUnavailable, run_driver

VERAMO = "veramo"
GOALS = {VERAMO: 20.0}

_QUEUED = "https://didcomm.org/routing/2.0/forward/queue-message"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", TIMES)
_WARM_UP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _RunningMediator:
    """A running mediator: its server, its wallets, and the check of stored messages."""

    server: TargetServer
    group: WalletGroup
    stored_check: StoredMessageCheck


def measure_forwards(options: ComparisonOptions) -> ResultTable:
    """One table for all sizes; messages per second of wall-clock time are compared."""
    participants, cores = Participants(), assign_cores()
    rows, targets, failures = dict[str, Figures](), list[PerformanceTarget](), list[str]()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-")))
        mediators = {OURS: _mediatord(stack, cores, failures)}
        try:
            mediators[VERAMO] = _veramo(stack, cores, directory, participants, failures)
        except (DriverUnavailable, RuntimeError) as error:
            participants.skipped[VERAMO] = str(error)
        for size in options.sizes:
            prefix = f"{format_size(size)}  "
            rows |= compare_rows(_one_size(mediators, size, options), prefix, PER_SECOND)
            if size == min(options.sizes):
                targets += select_targets(rows, prefix, GOALS, "forwards by the clock")
    stored_checks = {name: mediator.stored_check for name, mediator in mediators.items()}
    notes = (
        f"{options.clients} connections. {cores.note} Ours commits with synchronous=FULL, Veramo's with NORMAL.",
        *(f"{name}: {check.accepted} answers 202, {check.stored} rows." for name, check in stored_checks.items()),
        *participants.notes(),
    )
    return ResultTable("Forwards, stored and then answered", _COLUMNS, rows, targets, list(notes), failures)


def _one_size(mediators: dict[str, _RunningMediator], size: int, options: ComparisonOptions) -> InterleavedResults:
    def contender(mediator: _RunningMediator) -> Callable[[], Figures]:
        bodies = [body for body, _ in mediator.group.forwards(size, DISTINCT_MESSAGES)]

        def run(seconds: float) -> Figures:
            return mediator.stored_check.check(post(mediator.server, bodies, options.clients, seconds))

        run(_WARM_UP_SECONDS)
        return lambda: run(options.seconds)

    contenders = {name: contender(mediator) for name, mediator in mediators.items()}
    return run_interleaved(contenders, options.rounds)


def _mediatord(stack: ExitStack, cores: CoreAssignment, failures: list[str]) -> _RunningMediator:
    with pin_to_cores(cores.server):
        daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
    group = enrol_group(daemon.url, RECIPIENTS, short=True)
    check = StoredMessageCheck(lambda: count_stored_rows(daemon.directory / DATABASE_FILE), failures)
    return _RunningMediator(TargetServer(group.mediator.http_uri, daemon.pid), group, check)


def _veramo(
    stack: ExitStack, cores: CoreAssignment, directory: Path, participants: Participants, failures: list[str]
) -> _RunningMediator:
    database = directory / "veramo.sqlite3"
    with pin_to_cores(cores.server):
        program = stack.enter_context(run_driver(DriverProgram("veramo.mjs", NODE, (str(database),))))
    did = program.receive()["did"]
    participants.versions[VERAMO] = program.versions
    group = WalletGroup.generate(DIDCommMediator.from_document(resolve_local(did)), RECIPIENTS)
    port = program.request(json.dumps([wallet.did for wallet in group.wallets]))
    check = StoredMessageCheck(lambda: queued_rows(database), failures)
    return _RunningMediator(TargetServer(f"http://127.0.0.1:{port}/", program.pid), group, check)


def queued_rows(database: Path) -> int:
    """Number of queued messages in a Veramo database."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM message WHERE type = ?", (_QUEUED,)).fetchone()
        return int(count)
