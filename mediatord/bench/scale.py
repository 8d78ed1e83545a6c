"""That a mediator with a million accounts, or a million messages, is as fast as one with a few."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.cores import on, split
from mediatord.bench.crowd import forwards, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Load, Server, get_at, post_at, post_for, post_so_many
from mediatord.bench.figures import Figures, Table, Target, percentile, size_name, take_turns
from mediatord.bench.filling import add_accounts, add_messages, make_overdue
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.restarting import Way, started_again, stop
from mediatord.wallet.throwaway import Daemon, throw_away_daemon

KEPT_GOAL = 0.85
START_SECONDS = 2.0
HOLD_MS = 20.0

# The daemon removes what is over every quarter of a minute; long enough for one such round to come and to finish.
_WATCH_SECONDS = 48.0
_MOST_OVERDUE = 100_000
_LOOKS_PER_SECOND, _FORWARDS_PER_SECOND = 100.0, 20.0
_OF_FIRST, _START, _LONGEST = "x first", "start s", "longest ms"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, _OF_FIRST, _START, "p50 ms", "p99 ms", _LONGEST)
_WARM_UP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Grown:
    """A daemon whose database is large."""

    name: str
    daemon: Daemon
    way: Way
    server: Server
    bodies: Path
    accounting: Accounting
    start_seconds: float

    def post(self, plan: Plan, share: float = 1.0) -> Figures:
        """One turn."""
        return self.accounting.check(post_for(self.server, self.bodies, plan.clients, plan.seconds * share))


def measure_scale(plan: Plan) -> Table:
    """Forwards to a hundred wallets of each database, in turns; then what the sweep of old messages holds up."""
    kinds = [(number, 0) for number in plan.accounts] + [(plan.accounts[0], plan.queued)]
    cores = split()
    with ExitStack() as stack, on(cores.clients):
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        grown = []
        for accounts, queued in kinds:
            # The last one is started again for the sweep, so that it is left first.
            with on(cores.server):
                daemon = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
            running = stack.enter_context(ExitStack())
            grown.append(_grow(plan, daemon, accounts, queued, place / f"{accounts}-{queued}.bodies", running))
        for one in grown:
            one.post(plan, _WARM_UP_SHARE)
        rounds = take_turns({one.name: partial(one.post, plan) for one in grown}, plan.rounds)
        failures = [failure for one in grown for failure in one.accounting.failures]
        running.close()
        swept = _sweep(plan, grown[-1])
    rows: dict[str, Figures] = {}
    for one in grown:
        compared = {_OF_FIRST: rounds.ratio(one.name, grown[0].name, PER_CPU_SECOND), _START: one.start_seconds}
        rows[one.name] = rounds.medians(one.name) | compared
    notes = (
        f"{size_name(plan.sizes[0])}, {plan.clients} connections, {RECIPIENTS} recipients; a daemon for each row. "
        f"Until it says that it is well a start takes as many seconds. {cores.note}",
        f"Sweep: {swept.removed} of {swept.overdue} messages whose time was over were removed, while /health was "
        f"asked {_LOOKS_PER_SECOND:.0f} times a second and {_FORWARDS_PER_SECOND:.0f} forwards a second came, all at "
        "fixed times; `longest ms` is the longest that one of them took.",
    )
    return Table(
        "Accounts and messages", _COLUMNS, rows | swept.rows, _targets(rows, swept.rows), notes, tuple(failures)
    )


def _targets(rows: dict[str, Figures], swept: dict[str, Figures]) -> tuple[Target, ...]:
    first, *others = rows
    kept = [Target(f"forwards with {name}, x {first}", KEPT_GOAL, rows[name][_OF_FIRST]) for name in others]
    start = Target(f"start with {others[-1]}, s", START_SECONDS, rows[others[-1]][_START], most=True)
    holds = [Target(f"{name}, longest ms", HOLD_MS, row[_LONGEST], most=True) for name, row in swept.items()]
    return (*kept, start, *holds[:2])


def _grow(plan: Plan, daemon: Daemon, accounts: int, queued: int, bodies: Path, running: ExitStack) -> _Grown:
    """Give it wallets and a message, stop it, fill its database, and start it again."""
    crowd = gather(daemon.url, RECIPIENTS, short=True)
    write_bodies(bodies, forwards(crowd, plan.sizes[0], DISTINCT_MESSAGES))
    server = Server.at(crowd.mediator.http_uri, daemon.pid)
    post_so_many(server, bodies, 1, 1)
    way = stop(daemon.pid)
    database = daemon.directory / DATABASE
    add_accounts(database, max(0, accounts - RECIPIENTS))
    if queued:
        add_messages(database, queued)
    again, seconds = running.enter_context(started_again(way, daemon))
    before = stored_rows(database)
    server = Server.at(crowd.mediator.http_uri, again.pid)
    accounting = Accounting(server, lambda: stored_rows(database) - before)
    name = f"{accounts:,} accounts" + (f", {queued:,} messages" if queued else "")
    return _Grown(name, again, way, server, bodies, accounting, seconds)


@dataclass(frozen=True, slots=True)
class _Swept:
    """
    :param removed: how many of the overdue messages were, while that was watched.
    """

    overdue: int
    removed: int
    rows: dict[str, Figures]


def _sweep(plan: Plan, one: _Grown) -> _Swept:
    """Start it again with messages whose time is over, and watch how others fare."""
    database = one.daemon.directory / DATABASE
    overdue = min(_MOST_OVERDUE, plan.queued)
    make_overdue(database, overdue)
    before = stored_rows(database)
    seconds = min(_WATCH_SECONDS, 10 * plan.seconds * plan.rounds)
    rows: dict[str, Figures] = {}
    with started_again(one.way, one.daemon) as (daemon, _), ThreadPoolExecutor(2) as pool:
        health = Server.at(f"{daemon.url}/health", daemon.pid, success="200")
        server = Server.at(f"{daemon.url}{one.server.path}", daemon.pid)

        def watch(when: str, seconds: float) -> int:
            looks = pool.submit(get_at, health, one.bodies.parent, seconds, _LOOKS_PER_SECOND)
            posts = pool.submit(post_at, server, one.bodies, plan.clients, seconds, _FORWARDS_PER_SECOND, even=True)
            rows[f"{when}: /health"] = _latencies(looks.result())
            rows[f"{when}: forwards"] = _latencies(posts.result())
            return posts.result().accepted

        removed = before + watch("sweep", seconds) - stored_rows(database)
        if removed == overdue:
            watch("no sweep", seconds / 4)
    return _Swept(overdue, removed, rows)


def _latencies(load: Load) -> Figures:
    figures = load.figures()
    longest = {_LONGEST: percentile(load.latencies_us, 1.0) / 1000}
    return {name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")} | longest
