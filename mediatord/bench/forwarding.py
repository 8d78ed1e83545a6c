"""Forwards to recipients that are offline: decrypted, routed, durable in SQLite, and only then answered."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from mediatord.bench.crowd import Crowd, forwards, gather, inner_envelope
from mediatord.bench.database import BareStore, bare_database, stored_messages
from mediatord.bench.drive import ACCEPTED, PER_CPU_SECOND, PER_SECOND, Load, Server, post_for
from mediatord.bench.figures import Contender, Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.processes import child, read_line
from mediatord.wallet.throwaway import Daemon, throw_away_daemon

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
        accounting = Accounting(daemon, crowd)
        stock = Server(site.pid, int(read_line(site)), accounting.server.path)
        for size in plan.sizes:
            rounds = _one_size(plan, size, accounting, stock, place / f"{size}.bodies")
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


class Accounting:
    """
    Posts to the daemon and compares every run's accepted answers with the rows in the database.

    :ivar stored: rows in the daemon's database after the last run.
    :ivar failures: sentences, one for each run in which something was missing or refused.
    """

    def __init__(self, daemon: Daemon, crowd: Crowd) -> None:
        target = urlsplit(crowd.mediator.http_uri)
        self.server = Server(daemon.pid, target.port or 80, target.path)
        self.crowd = crowd
        self.accepted = 0
        self.stored = 0
        self.failures: list[str] = []
        self._daemon = daemon

    def check(self, load: Load, *, payloads: int = 1) -> None:
        """
        Take note of one run.

        :param payloads: messages in each forward.
        """
        self.accepted += load.accepted * payloads
        self.stored = stored_messages(self._daemon.directory)
        if set(load.statuses) != {ACCEPTED}:
            self.failures.append(f"other answers than 202: {load.statuses}")
        if self.stored != self.accepted:
            self.failures.append(f"{self.accepted} messages were accepted, {self.stored} are stored")

    def run(self, bodies: Path, connections: int, seconds: float) -> Figures:
        """Post for a while."""
        load = post_for(self.server, bodies, connections, seconds)
        self.check(load)
        return load.figures()


def _one_size(plan: Plan, size: int, accounting: Accounting, stock: Server, bodies: Path) -> Rounds:
    write_bodies(bodies, forwards(accounting.crowd, size, DISTINCT_MESSAGES))
    rows = [(wallet.did, inner_envelope(wallet, size)) for wallet in accounting.crowd.wallets]
    with bare_database() as connection:
        bare = BareStore(connection, rows, plan.clients)
        contenders: dict[str, Contender] = {
            _OURS: lambda: accounting.run(bodies, plan.clients, plan.seconds),
            _SITE: lambda: post_for(stock, bodies, plan.clients, plan.seconds).figures(),
            "SQLite alone, grouped": lambda: bare.run(plan.seconds / 2),
        }
        accounting.run(bodies, plan.clients, plan.seconds * _WARM_UP_SHARE)
        return take_turns(contenders, plan.rounds)
