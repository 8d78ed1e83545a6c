"""Whether the daemon stays as it is, for half an hour, while some of those that it pushes to do not keep up."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from mediatord.bench.crowd import Crowd, forwards, mediator_at
from mediatord.bench.database import DATABASE
from mediatord.bench.figures import Figures, Table, Target, size_name
from mediatord.bench.load import request_for
from mediatord.bench.plan import DAEMON_SETTINGS, Plan
from mediatord.bench.processes import rss_bytes
from mediatord.bench.soaking import Drinker, Kind, Soaking
from mediatord.bench.sockets import enrolled
from mediatord.wallet.throwaway import throw_away_daemon

RESIDENT_MIB_GOAL = 256.0
GROWTH_GOAL = 0.01

WALLETS = 200
# One in ten reads slowly, one in a hundred never.
_SLOW_EVERY, _NEVER_EVERY = 10, 100
_RATE = 150.0
_SAMPLE_SECONDS = 1.0
# What the kernel takes for a socket that is not read, about, before the daemon has to keep anything.
_KERNEL_BYTES = 6_000_000
# Until every path was taken, and whoever never reads was shed.
_WARM_UP = 1 / 3
# A socket that does not answer pings is given up within two of their intervals.
_SHED_SECONDS = 60.0
_MIB = 1 << 20


def measure_soak(plan: Plan) -> Table:
    """Resident memory over the whole time; what became of every message, and of the sockets that are not read."""
    size, seconds = plan.sizes[0], plan.minutes * 60
    resident: list[int] = []
    with throw_away_daemon(DAEMON_SETTINGS) as daemon:
        mediator = mediator_at(daemon.url)
        couriers = enrolled(mediator, WALLETS)
        crowd = Crowd(mediator, tuple(courier.wallet for courier in couriers))
        target = urlsplit(mediator.http_uri)
        address = (target.hostname or "", target.port or 80)
        requests = [request_for(address[1], target.path, body) for body in forwards(crowd, size, 2 * WALLETS)]
        drinkers = [Drinker(courier, kind_of(number)) for number, courier in enumerate(couriers)]
        soaking = Soaking(
            address,
            requests,
            drinkers,
            _RATE,
            lambda: resident.append(rss_bytes(daemon.pid)),
            _SAMPLE_SECONDS,
        )
        try:
            jam = [one for number, one in enumerate(requests[:WALLETS]) if kind_of(number) != "prompt"]
            soaking.run(seconds, jam * (_KERNEL_BYTES // len(jam[0])))
        finally:
            for drinker in drinkers:
                drinker.close()
        stored = stored_ids(daemon.directory / DATABASE)
    accepted = soaking.statuses["202"]
    acknowledged = set().union(*(drinker.acknowledged for drinker in drinkers))
    lost = accepted - len(stored | acknowledged)
    shed = {kind: sum(one.shed for one in drinkers if one.kind == kind) for kind in ("prompt", "slow", "never")}
    grown = growth(resident)
    rows: dict[str, Figures] = {
        "memory, MiB": {
            "warmed up": resident[int(len(resident) * _WARM_UP)] / _MIB,
            "most": max(resident) / _MIB,
            "end": resident[-1] / _MIB,
        },
        "messages": {
            "accepted": float(accepted),
            "acknowledged": float(len(acknowledged)),
            "waiting": float(len(stored - acknowledged)),
            "lost": float(lost),
        },
        "sockets shed": {kind: float(count) for kind, count in shed.items()},
    }
    columns = ("warmed up", "most", "end", "accepted", "acknowledged", "waiting", "lost", "prompt", "slow", "never")
    targets = (
        Target("resident MiB", RESIDENT_MIB_GOAL, max(resident) / _MIB, most=True),
        Target("growth after the first third", GROWTH_GOAL, grown, most=True),
    )
    notes = (
        f"{plan.minutes:g} minutes, {WALLETS} wallets in live mode, one in {_SLOW_EVERY} reads slowly, one in "
        f"{_NEVER_EVERY} never, and their lines are full from the beginning; {_RATE:g} forwards of {size_name(size)} "
        "a second.",
    )
    failures = troubles(dict(soaking.statuses), lost, shed, seconds)
    return Table("Soak", columns, rows, targets, notes, failures)


def kind_of(number: int) -> Kind:
    """How the wallet of this number reads."""
    if number % _NEVER_EVERY == 0:
        return "never"
    return "slow" if number % _SLOW_EVERY == 1 else "prompt"


def stored_ids(database: Path) -> set[str]:
    """Of all messages that wait."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return {str(id_) for (id_,) in connection.execute("SELECT id FROM message")}


def growth(resident: list[int]) -> float:
    """
    By how much more of itself memory was larger at the end than after the warm-up; medians, because the allocator
    takes and gives back by megabytes.

    :param resident: samples in even distances, from the beginning to the end.
    """
    soaked = resident[int(len(resident) * _WARM_UP) :]
    part = max(1, len(soaked) // 5)
    before = median(soaked[:part])
    return (median(soaked[-part:]) - before) / before


def troubles(statuses: dict[str, int], lost: int, shed: dict[str, int], seconds: float) -> tuple[str, ...]:
    """What must not happen, in words."""
    found = []
    refused = {status: count for status, count in statuses.items() if status != "202"}
    if refused:
        found.append(f"forwards were refused: {refused}")
    if lost:
        found.append(f"{lost} messages were lost")
    if shed["prompt"]:
        found.append(f"{shed['prompt']} sockets were shed that are read")
    if seconds > 2 * _SHED_SECONDS and not shed["never"]:
        found.append("sockets that are never read were not shed")
    return tuple(found)
