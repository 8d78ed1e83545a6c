"""Forwards to recipients that are offline: decrypted, routed, durable in SQLite, and only then answered."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.crowd import forwards, gather, inner_envelope
from mediatord.bench.database import DATABASE, BareStore, bare_database, stored_rows
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Server, post_for
from mediatord.bench.figures import Contender, Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.processes import child, read_line
from mediatord.wallet.throwaway import throw_away_daemon

SITE_GOAL = 0.5

_OF_SITE, _OF_SITE_PER_CPU = "x stock Site", "x per CPU-s"
_OURS, _SITE = "mediatord, durable", "stock Site, empty 202"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", _OF_SITE, _OF_SITE_PER_CPU)
_WARM_UP_SHARE = 0.25


def measure_forwarding(plan: Plan) -> Table:
    """One table for all sizes."""
    rows: dict[str, Figures] = {}
    targets: list[Target] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
        site = stack.enter_context(child("mediatord.bench.stock"))
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        crowd = gather(daemon.url, RECIPIENTS)
        server = Server.at(crowd.mediator.http_uri, daemon.pid)
        accounting = Accounting(server, lambda: stored_rows(daemon.directory / DATABASE))
        stock = Server(site.pid, int(read_line(site)), accounting.server.path)
        for size in plan.sizes:
            bodies = place / f"{size}.bodies"
            write_bodies(bodies, forwards(crowd, size, DISTINCT_MESSAGES))
            payloads = [(wallet.did, inner_envelope(wallet, size)) for wallet in crowd.wallets]
            rounds = _one_size(plan, accounting, stock, bodies, payloads)
            name = size_name(size)
            for contender in rounds.found:
                rows[f"{name}  {contender}"] = rounds.medians(contender) | _compared(rounds, contender)
            measured = rows[f"{name}  {_OURS}"][_OF_SITE]
            targets.append(Target(f"durable forwards {name}, x stock Site", SITE_GOAL, measured))
    notes = (
        f"{plan.clients} connections, one daemon process; SQLite alone commits {plan.clients} rows at a time, "
        "and its latencies are those of a commit.",
        f"{accounting.accepted} forwards were answered 202 and {accounting.stored} rows were stored.",
    )
    return Table(
        "Forwards, durable before the answer", _COLUMNS, rows, tuple(targets), notes, tuple(accounting.failures)
    )


def _compared(rounds: Rounds, contender: str) -> Figures:
    return {
        _OF_SITE: rounds.ratio(contender, _SITE, PER_SECOND),
        _OF_SITE_PER_CPU: rounds.ratio(contender, _SITE, PER_CPU_SECOND),
    }


def _one_size(
    plan: Plan, accounting: Accounting, stock: Server, bodies: Path, payloads: list[tuple[str, bytes]]
) -> Rounds:
    def post(seconds: float) -> Figures:
        return accounting.check(post_for(accounting.server, bodies, plan.clients, seconds))

    with bare_database() as connection:
        bare = BareStore(connection, payloads, plan.clients)
        contenders: dict[str, Contender] = {
            _OURS: lambda: post(plan.seconds),
            _SITE: lambda: post_for(stock, bodies, plan.clients, plan.seconds).figures(),
            "SQLite alone, grouped": lambda: bare.run(plan.seconds / 2),
        }
        post(plan.seconds * _WARM_UP_SHARE)
        return take_turns(contenders, plan.rounds)
