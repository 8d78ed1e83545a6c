"""Everything at once, as on an ordinary day: most recipients are away, some are online, some come back and fetch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any

from mediatord.bench.cycle import WALLETS, complaints, cycle_figures
from mediatord.bench.drive import PER_SECOND, Load, post_at, post_for
from mediatord.bench.figures import Figures, Table, percentile, ratio, size_name
from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.subject import Residents, subject

# Of the forwards that come through when there is nothing else to do.
_AWAY, _ONLINE = 0.25, 0.08
_LIMIT = 50
_BETWEEN_FETCHES_SECONDS = 1.0
_COLUMNS = (PER_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", "% of one core")


def measure_mixed(plan: Plan) -> Table:
    """Forwards at fixed times to wallets that are away and to wallets in live mode, while the former fetch."""
    size = plan.sizes[0]
    with (
        subject(plan) as one,
        one.residents(WALLETS, size, WALLETS * 4) as online,
        one.residents(RECIPIENTS, size, DISTINCT_MESSAGES) as away,
    ):
        online.do("live")
        full = post_for(one.server, away.bodies, plan.clients, plan.seconds)
        rate = full.figures()[PER_SECOND]
        waiting = full.accepted - _fetch(away)["messages"]
        seconds, before, start = plan.seconds * plan.rounds, one.cpu_seconds, perf_counter()
        connections = 4 * plan.clients
        with ThreadPoolExecutor(2) as pool:
            day = pool.submit(post_at, one.server, away.bodies, connections, seconds, _AWAY * rate, even=plan.even)
            night = pool.submit(
                online.do,
                "cycle",
                seconds=seconds,
                connections=connections,
                rate=_ONLINE * rate,
                even=plan.even,
                seed=1,
            )
            fetched = _fetch_meanwhile(away, day)
            load, cycled = day.result(), night.result()
        busy = ratio(one.cpu_seconds - before, perf_counter() - start)
        fetched.append(_fetch(away))
    taken = sum(found["messages"] for found in fetched)
    failures = complaints(cycled)
    if waiting or taken != load.accepted:
        failures.append(f"{load.accepted} forwards were accepted, {taken} messages were fetched")
    rows: dict[str, Figures] = {
        "forwards, recipient away": load.figures() | {"late %": 100 * ratio(load.late, len(load.latencies_us))},
        "pushes, recipient online": _pushes(cycled),
        "requests of those who fetch": _requests(fetched, load),
        "all": {"% of one core": 100 * busy} if one.pid else {},
    }
    notes = (
        f"{size_name(size)}. {_AWAY:.0%} and {_ONLINE:.0%} of the {rate:,.0f} forwards a second that come through "
        f"otherwise, at fixed times, to {RECIPIENTS} and {WALLETS} wallets; {taken} messages were fetched. "
        f"{one.note}",
    )
    return Table("A mixed day", _COLUMNS, rows, (), notes, tuple(failures))


def _fetch(residents: Residents) -> dict[str, Any]:
    return residents.do("drain", connections=2, limit=_LIMIT)


def _fetch_meanwhile(away: Residents, day: Future[Load]) -> list[dict[str, Any]]:
    fetched = []
    while wait([day], _BETWEEN_FETCHES_SECONDS).not_done:
        fetched.append(_fetch(away))
    return fetched


def _pushes(cycled: dict[str, Any]) -> Figures:
    found = cycle_figures(cycled, 0.0)
    latencies = {f"{share} ms": found[f"push {share}"] for share in ("p50", "p99", "p99.9")}
    return {PER_SECOND: found[PER_SECOND], "late %": found["late %"], **latencies}


def _requests(fetched: list[dict[str, Any]], load: Load) -> Figures:
    latencies = sorted(latency for found in fetched for latency in found["latencies_us"])
    shares = {"p50 ms": 0.5, "p99 ms": 0.99, "p99.9 ms": 0.999}
    return {
        PER_SECOND: ratio(len(latencies), load.seconds),
        **{name: percentile(latencies, share) / 1000 for name, share in shares.items()},
    }
