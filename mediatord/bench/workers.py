"""What several worker processes of one daemon do more than one."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.crowd import forwards, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import CLIENT_US, PER_CPU_SECOND, PER_SECOND, Server, post_for
from mediatord.bench.figures import Contender, Figures, Table, Target, size_name, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.wallet.throwaway import throw_away_daemon

# At so many workers, by the clock.
GOALS = {2: 1.6, 4: 3.0}

_OF_ONE = "x one worker"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _OF_ONE)
_WARM_UP_SHARE = 0.25


def measure_workers(plan: Plan) -> Table:
    """One daemon for each number of workers that there are cores for, in turns."""
    cores = len(os.sched_getaffinity(0))
    numbers = [number for number in (1, 2, 4) if number <= cores]
    size = plan.sizes[0]
    name = size_name(size)
    failures: list[str] = []
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-"))
        contenders = {
            _name(number): _contender(plan, number, Path(place) / f"{number}.bodies", stack, failures)
            for number in numbers
        }
        rounds = take_turns(contenders, plan.rounds)
    rows: dict[str, Figures] = {
        f"{name}  {one}": rounds.medians(one) | {_OF_ONE: rounds.ratio(one, _name(1), PER_SECOND)}
        for one in rounds.found
    }
    targets = tuple(
        Target(
            f"forwards {name} with {number} workers, x one", GOALS[number], rows[f"{name}  {_name(number)}"][_OF_ONE]
        )
        for number in numbers
        if number in GOALS
    )
    notes = (
        f"{plan.clients} connections for each worker. One worker has all {cores} cores as several have, and shares "
        "them with the clients.",
    )
    return Table("Workers", _COLUMNS, rows, targets, notes, tuple(failures))


def _name(number: int) -> str:
    return f"{number} worker{'s' if number > 1 else ''}"


def _contender(plan: Plan, number: int, bodies: Path, stack: ExitStack, failures: list[str]) -> Contender:
    daemon = stack.enter_context(throw_away_daemon({**DAEMON_SETTINGS, "MEDIATORD_WORKERS": str(number)}))
    crowd = gather(daemon.url, RECIPIENTS, short=True)
    write_bodies(bodies, forwards(crowd, plan.sizes[0], DISTINCT_MESSAGES))
    server = Server.at(crowd.mediator.http_uri, daemon.pid)
    accounting = Accounting(server, lambda: stored_rows(daemon.directory / DATABASE), failures)

    def run(seconds: float) -> Figures:
        return accounting.check(post_for(server, bodies, plan.clients * number, seconds))

    run(plan.seconds * _WARM_UP_SHARE)
    return partial(run, plan.seconds)
