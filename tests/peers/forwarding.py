"""Forwards that are stored and then answered 202: the daemon beside a mediator of Veramo's plugins."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.cores import Cores, on, split
from mediatord.bench.crowd import Crowd, forwards, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Server, post_for
from mediatord.bench.figures import Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.throwaway import throw_away_daemon
from tests.peers.comparing import OURS, TIMES, Company, Terms, compared, targets
from tests.peers.programs import NODE, AbsentError, Program, running

VERAMO = "veramo"
GOALS = {VERAMO: 20.0}

_QUEUED = "https://didcomm.org/routing/2.0/forward/queue-message"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", TIMES)
_WARM_UP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Mediator:
    """One that runs: whom to write to, and the books that are kept of it."""

    crowd: Crowd
    accounting: Accounting


def measure(terms: Terms) -> Table:
    """One table for all sizes; messages per second by the clock are compared."""
    company, cores = Company(), split()
    rows, found = dict[str, Figures](), list[Target]()
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-peers-")))
        mediators = {OURS: _ours(stack, cores)}
        try:
            mediators[VERAMO] = _veramo(stack, cores, place, company)
        except (AbsentError, RuntimeError) as error:
            company.skipped[VERAMO] = str(error)
        for size in terms.sizes:
            prefix = f"{size_name(size)}  "
            rows |= compared(_one_size(mediators, size, terms, place), prefix, PER_SECOND)
            if size == min(terms.sizes):
                found += targets(rows, prefix, GOALS, "forwards by the clock")
    books = {name: mediator.accounting for name, mediator in mediators.items()}
    notes = (
        f"{terms.clients} connections. {cores.note} Ours commits with synchronous=FULL, Veramo's with NORMAL.",
        *(f"{name}: {book.accepted} answers 202, {book.stored} rows." for name, book in books.items()),
        *company.notes(),
    )
    failures = tuple(f"{name}: {failure}" for name, book in books.items() for failure in book.failures)
    return Table("Forwards, stored and then answered", _COLUMNS, rows, tuple(found), notes, failures)


def _one_size(mediators: dict[str, _Mediator], size: int, terms: Terms, place: Path) -> Rounds:
    def contender(name: str, mediator: _Mediator) -> Callable[[], Figures]:
        bodies = place / f"{name}-{size}.bodies"
        write_bodies(bodies, forwards(mediator.crowd, size, DISTINCT_MESSAGES))

        def post(seconds: float) -> Figures:
            books = mediator.accounting
            return books.check(post_for(books.server, bodies, terms.clients, seconds))

        post(_WARM_UP_SECONDS)
        return lambda: post(terms.seconds)

    contenders = {name: contender(name, mediator) for name, mediator in mediators.items()}
    return take_turns(contenders, terms.rounds)


def _ours(stack: ExitStack, cores: Cores) -> _Mediator:
    with on(cores.server):
        daemon = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
    crowd = gather(daemon.url, RECIPIENTS, short=True)
    server = Server.at(crowd.mediator.http_uri, daemon.pid)
    return _Mediator(crowd, Accounting(server, lambda: stored_rows(daemon.directory / DATABASE)))


def _veramo(stack: ExitStack, cores: Cores, place: Path, company: Company) -> _Mediator:
    database = place / "veramo.sqlite3"
    with on(cores.server):
        program = stack.enter_context(running(Program("veramo.mjs", NODE, (str(database),))))
    did = program.hear()["did"]
    company.versions[VERAMO] = program.versions
    crowd = Crowd(Mediator.of(resolve_local(did)), tuple(Identity.fresh() for _ in range(RECIPIENTS)))
    port = program.ask(json.dumps([wallet.did for wallet in crowd.wallets]))
    return _Mediator(crowd, Accounting(Server(program.pid, port, "/"), lambda: queued_rows(database)))


def queued_rows(database: Path) -> int:
    """How many messages wait in a database of Veramo's."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM message WHERE type = ?", (_QUEUED,)).fetchone()
        return int(count)
