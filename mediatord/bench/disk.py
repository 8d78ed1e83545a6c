"""A disk on which each sync takes long must hold up those only who wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.cores import Cores, on, split
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import PER_SECOND, Server, get_at, post_at, post_for
from mediatord.bench.figures import Figures, Table, Target, percentile, size_name
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.restarting import Way, started_again, stop
from mediatord.bench.subject import Residents, residing
from mediatord.bench.wallets import Setup
from mediatord.wallet.throwaway import Daemon, throw_away_daemon

# What a health check or a ping may take on the slow disk: less than one sync.
HEALTH_P99_MS = 25.0

_OURS, _SLOW = "mediatord", "mediatord.bench.slow_disk"
_RATE, _FORWARDS_PER_SECOND = 50.0, 200.0
_MOST = "at most/s"
_SOCKETS = 4
_SHARES = {"p50": 0.5, "p99": 0.99}
_COLUMNS = (_MOST, PER_SECOND, "p50 ms", "p99 ms", "health p50", "health p99", "ping p50", "ping p99")


def measure_disk(plan: Plan) -> Table:
    """Forwards at fixed times, while /health is asked and idle sockets are pinged in a beat."""
    cores = split()
    failures: list[str] = []
    rows = {
        "this disk": _on_disk(plan, _OURS, cores, failures),
        "50 ms a sync": _on_disk(plan, _SLOW, cores, failures),
    }
    slow = rows["50 ms a sync"]
    targets = tuple(
        Target(f"{name} with 50 ms a sync, ms", HEALTH_P99_MS, slow[name], most=True)
        for name in ("health p99", "ping p99")
    )
    notes = (
        f"{size_name(plan.sizes[0])}, {plan.clients} connections. {_MOST}: as many as come through. Then "
        f"{_FORWARDS_PER_SECOND:.0f} forwards a second, {_RATE:.0f} looks at /health and {_RATE:.0f} pings, all at "
        f"fixed times; milliseconds. {cores.note}",
    )
    return Table("A slow disk", _COLUMNS, rows, targets, notes, tuple(failures))


def _on_disk(plan: Plan, program: str, cores: Cores, failures: list[str]) -> Figures:
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        with on(cores.server):
            daemon = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
        stack.enter_context(on(cores.clients))
        if program != _OURS:
            daemon, _ = stack.enter_context(started_again(_by(program, stop(daemon.pid)), daemon))
        size = plan.sizes[0]
        away = stack.enter_context(
            residing(Setup(daemon.url, None, RECIPIENTS, size, DISTINCT_MESSAGES, f"{place}/1"))
        )
        idle = stack.enter_context(residing(Setup(daemon.url, None, _SOCKETS, size, 1, f"{place}/2")))
        idle.do("live")
        return _watched(plan, daemon, away, idle, failures)


def _watched(plan: Plan, daemon: Daemon, away: Residents, idle: Residents, failures: list[str]) -> Figures:
    seconds = plan.seconds * plan.rounds
    server = Server.at(f"{daemon.url}/didcomm", daemon.pid)
    health = Server.at(f"{daemon.url}/health", daemon.pid, success="200")
    most = post_for(server, away.bodies, plan.clients, seconds / 4)
    with ThreadPoolExecutor(2) as pool:
        looks = pool.submit(get_at, health, away.bodies.parent, seconds, _RATE)
        pings = pool.submit(idle.do, "ping", seconds=seconds, rate=_RATE)
        load = post_at(server, away.bodies, 2 * plan.clients, seconds, _FORWARDS_PER_SECOND, even=plan.even)
        healthy, pinged = looks.result(), pings.result()["latencies_us"]
    accepted = most.accepted + load.accepted
    if (stored := stored_rows(daemon.directory / DATABASE)) != accepted:
        failures.append(f"{accepted} messages were accepted, {stored} are stored")
    if set(healthy.statuses) != {"200"}:
        failures.append(f"/health answered {healthy.statuses}")
    figures = load.figures()
    return {
        _MOST: most.figures()[PER_SECOND],
        **{name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")},
        **{f"health {name}": percentile(healthy.latencies_us, share) / 1000 for name, share in _SHARES.items()},
        **{f"ping {name}": percentile(pinged, share) / 1000 for name, share in _SHARES.items()},
    }


def _by(program: str, way: Way) -> Way:
    """The same command line, by another module that takes it."""
    words = list(way.words)
    words[words.index("-m") + 1] = program
    return replace(way, words=tuple(words))
