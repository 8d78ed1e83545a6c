"""Whether the daemon's memory stays flat while messages go through it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.crowd import forwards, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import Server, post_so_many
from mediatord.bench.figures import Figures, Table, size_name
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.processes import rss_bytes
from mediatord.wallet.throwaway import throw_away_daemon

# The smallest thing worth the name of a leak, an object with a string, has about this size.
FLAT_BYTES_PER_MESSAGE = 200.0

_MIB = 1 << 20
# Several messages in one forward, as Routing 2.0 allows: it is the messages that must not leave anything behind.
_PAYLOADS = 5
_LEGS = 5


def measure_memory(plan: Plan) -> Table:
    """Resident memory after a warm-up, and after each fifth of the messages."""
    size = plan.sizes[0]
    leg = plan.messages // _LEGS
    with throw_away_daemon(DAEMON_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        idle = rss_bytes(daemon.pid)
        crowd = gather(daemon.url, RECIPIENTS)
        server = Server.at(crowd.mediator.http_uri, daemon.pid)
        accounting = Accounting(server, lambda: stored_rows(daemon.directory / DATABASE))
        bodies = Path(place) / "bodies"
        write_bodies(bodies, forwards(crowd, size, DISTINCT_MESSAGES, payloads=_PAYLOADS))
        resident = []
        for _ in range(_LEGS + 1):
            load = post_so_many(server, bodies, plan.clients, max(1, leg // _PAYLOADS))
            accounting.check(load, payloads=_PAYLOADS)
            resident.append(rss_bytes(daemon.pid))
    growth = growth_per_message(resident, leg)
    failures = list(accounting.failures)
    if growth > FLAT_BYTES_PER_MESSAGE:
        failures.append(f"memory grew by {growth:.0f} bytes with every message")
    rows: dict[str, Figures] = {"started": {"RSS MiB": idle / _MIB}, "warmed up": {"RSS MiB": resident[0] / _MIB}}
    for number, found in enumerate(resident[1:], start=1):
        rows[f"after {number * leg} more"] = {"RSS MiB": found / _MIB}
    rows["growth"] = {"bytes per message": growth}
    notes = (
        f"{size_name(size)} each, {_PAYLOADS} in a forward; flat means under {FLAT_BYTES_PER_MESSAGE:.0f} bytes.",
    )
    return Table("Memory over many messages", ("RSS MiB", "bytes per message"), rows, (), notes, tuple(failures))


def growth_per_message(resident: list[int], leg: int) -> float:
    """
    Bytes that stay with every message: between the medians of the earlier and the later half, because a single figure
    jumps by megabytes with whatever the allocator happens to hold.

    :param resident: memory after each leg, an even number of them.
    :param leg: messages between two figures.
    """
    half = len(resident) // 2
    return (median(resident[half:]) - median(resident[:half])) / (half * leg)
