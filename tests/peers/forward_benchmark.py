"""Forwards that are stored and then answered 202: the daemon beside a mediator of Veramo's plugins."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.didcomm_wallets import WalletGroup, build_forwards, enrol_group
from mediatord.bench.load_generator import TargetServer, post_for_seconds, write_bodies
from mediatord.bench.mediator_under_test import DATABASE_FILE, StoredMessageCheck, count_stored_rows
from mediatord.bench.processes import CoreAssignment, assign_cores, pin_to_cores
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    PER_CPU_SECOND,
    PER_SECOND,
    RECIPIENTS,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    format_size,
    run_interleaved,
)
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity
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
    """One that runs: whom to write to, and the books that are kept of it."""

    group: WalletGroup
    stored_check: StoredMessageCheck


def measure_forwards(terms: ComparisonOptions) -> ResultTable:
    """One table for all sizes; messages per second by the clock are compared."""
    company, cores = Participants(), assign_cores()
    rows, found = dict[str, Figures](), list[PerformanceTarget]()
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-")))
        mediators = {OURS: _mediatord(stack, cores)}
        try:
            mediators[VERAMO] = _veramo(stack, cores, place, company)
        except (DriverUnavailable, RuntimeError) as error:
            company.skipped[VERAMO] = str(error)
        for size in terms.sizes:
            prefix = f"{format_size(size)}  "
            rows |= compare_rows(_one_size(mediators, size, terms, place), prefix, PER_SECOND)
            if size == min(terms.sizes):
                found += select_targets(rows, prefix, GOALS, "forwards by the clock")
    books = {name: mediator.stored_check for name, mediator in mediators.items()}
    notes = (
        f"{terms.clients} connections. {cores.note} Ours commits with synchronous=FULL, Veramo's with NORMAL.",
        *(f"{name}: {book.accepted} answers 202, {book.stored} rows." for name, book in books.items()),
        *company.notes(),
    )
    failures = tuple(f"{name}: {failure}" for name, book in books.items() for failure in book.failures)
    return ResultTable("Forwards, stored and then answered", _COLUMNS, rows, tuple(found), notes, failures)


def _one_size(
    mediators: dict[str, _RunningMediator], size: int, terms: ComparisonOptions, place: Path
) -> InterleavedResults:
    def contender(name: str, mediator: _RunningMediator) -> Callable[[], Figures]:
        bodies = place / f"{name}-{size}.bodies"
        write_bodies(bodies, build_forwards(mediator.group, size, DISTINCT_MESSAGES))

        def post(seconds: float) -> Figures:
            books = mediator.stored_check
            return books.check(post_for_seconds(books.server, bodies, terms.clients, seconds))

        post(_WARM_UP_SECONDS)
        return lambda: post(terms.seconds)

    contenders = {name: contender(name, mediator) for name, mediator in mediators.items()}
    return run_interleaved(contenders, terms.rounds)


def _mediatord(stack: ExitStack, cores: CoreAssignment) -> _RunningMediator:
    with pin_to_cores(cores.server):
        daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
    group = enrol_group(daemon.url, RECIPIENTS, short=True)
    server = TargetServer.from_url(group.mediator.http_uri, daemon.pid)
    return _RunningMediator(
        group, StoredMessageCheck(server, lambda: count_stored_rows(daemon.directory / DATABASE_FILE))
    )


def _veramo(stack: ExitStack, cores: CoreAssignment, place: Path, company: Participants) -> _RunningMediator:
    database = place / "veramo.sqlite3"
    with pin_to_cores(cores.server):
        program = stack.enter_context(run_driver(DriverProgram("veramo.mjs", NODE, (str(database),))))
    did = program.hear()["did"]
    company.versions[VERAMO] = program.versions
    group = WalletGroup(
        DIDCommMediator.from_document(resolve_local(did)), tuple(WalletIdentity.generate() for _ in range(RECIPIENTS))
    )
    port = program.ask(json.dumps([wallet.did for wallet in group.wallets]))
    return _RunningMediator(
        group, StoredMessageCheck(TargetServer(program.pid, port, "/"), lambda: queued_rows(database))
    )


def queued_rows(database: Path) -> int:
    """How many messages wait in a database of Veramo's."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM message WHERE type = ?", (_QUEUED,)).fetchone()
        return int(count)
