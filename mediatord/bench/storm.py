"""All wallets come at the same moment."""

from __future__ import annotations

from mediatord.bench.figures import Figures, Table, percentile, ratio, take_turns
from mediatord.bench.plan import RECIPIENTS, Plan
from mediatord.bench.processes import allow_many_files
from mediatord.bench.subject import subject

_RATE, _CPU_RATE = "sockets/s", "sockets/CPU-s"
_COLUMNS = (_RATE, _CPU_RATE, "open p50", "open p99", "live p50", "live p99")
_SPARE_FILES = 200
_MOST_ROUNDS = 5


def measure_storm(plan: Plan) -> Table:
    """Sockets per second until everybody is in live mode, and how long the last ones wait."""
    count = min(plan.sockets, allow_many_files() - _SPARE_FILES)
    failures: list[str] = []
    with subject(plan) as one, one.residents(min(RECIPIENTS, count), plan.sizes[0], 1) as residents:

        def run() -> Figures:
            before = one.cpu_seconds
            found = residents.do("storm", sockets=count)
            spent = one.cpu_seconds - before
            if found["refused"]:
                failures.append(f"{found['refused']} of {count} sockets were refused")
            opened, live = sorted(found["opened_us"]), sorted(found["live_us"])
            return {
                _RATE: ratio(found["sockets"], found["seconds"]),
                _CPU_RATE: ratio(found["sockets"], spent),
                "open p50": percentile(opened, 0.5) / 1000,
                "open p99": percentile(opened, 0.99) / 1000,
                "live p50": percentile(live, 0.5) / 1000,
                "live p99": percentile(live, 0.99) / 1000,
            }

        name = f"{count} at once"
        rows = {name: take_turns({name: run}, min(plan.rounds, _MOST_ROUNDS)).medians(name)}
    notes = (f"Milliseconds since the first began to connect. Handshake, then live-delivery-change. {one.note}",)
    return Table("Everybody connects", _COLUMNS, rows, (), notes, tuple(failures))
