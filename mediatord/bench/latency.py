"""How long a forward takes at a given load, whatever the mediator does meanwhile."""

from __future__ import annotations

from mediatord.bench.drive import CLIENT_US, PER_CPU_SECOND, PER_SECOND, Load, post_at, post_for
from mediatord.bench.figures import Figures, Table, Target, ratio, size_name
from mediatord.bench.keeping import Keeping
from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.subject import subject

P99_MS = 50.0
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The load at which latencies are promised.
PROMISED = 0.7

_OFFERED = "offered/s"
_COLUMNS = (_OFFERED, PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", CLIENT_US)
# Requests that may be on their way at the same time, for each client of the closed loop.
_SPARE_CONNECTIONS = 4


def measure_latency(plan: Plan) -> Table:
    """The most that comes through first, then shares of it at times fixed beforehand."""
    size = plan.sizes[0]
    name = size_name(size)
    with subject(plan) as one, one.residents(RECIPIENTS, size, DISTINCT_MESSAGES) as residents:
        keeping = Keeping(one, residents)
        seconds = plan.seconds * plan.rounds / 2
        keeping.check(post_for(one.server, residents.bodies, plan.clients, plan.seconds / 4))
        full = keeping.check(post_for(one.server, residents.bodies, plan.clients, seconds))
        rows: dict[str, Figures] = {f"{name}  as many as come through": full}
        for share in SHARES:
            rate = share * full[PER_SECOND]
            load = post_at(
                one.server, residents.bodies, plan.clients * _SPARE_CONNECTIONS, seconds, rate, even=plan.even
            )
            rows[f"{name}  at {share:.0%}"] = keeping.check(load) | _punctuality(load, rate)
    promised = rows[f"{name}  at {PROMISED:.0%}"]["p99 ms"]
    notes = (
        f"First row: {plan.clients} connections, each waiting for its answers. Others: "
        f"{'a beat' if plan.even else 'a Poisson process'} on up to {plan.clients * _SPARE_CONNECTIONS}.",
        f"Milliseconds since a forward was to be sent; late ones are counted like all others. {one.note}",
        keeping.note,
    )
    return Table(
        "Latency of a forward by load",
        _COLUMNS,
        rows,
        (Target(f"forward p99 {name} at {PROMISED:.0%}, ms", P99_MS, promised, most=True),),
        notes,
        tuple(keeping.failures),
    )


def _punctuality(load: Load, rate: float) -> Figures:
    return {_OFFERED: rate, "late %": 100 * ratio(load.late, len(load.latencies_us))}
