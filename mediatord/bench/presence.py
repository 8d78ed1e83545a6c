"""What it costs a node that others know of its live sessions, while nothing happens."""

from __future__ import annotations

import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from mediatord.bench.cluster import cluster_of, on_mongodb
from mediatord.bench.crowd import gather
from mediatord.bench.figures import Figures, Table, Target
from mediatord.bench.plan import Plan
from mediatord.bench.processes import allow_many_files, cpu_seconds
from mediatord.bench.rawsocket import RawSocket
from mediatord.bench.sockets import go_live
from mediatord.wallet.throwaway import Daemon

GOAL = 0.02

_SPARE_FILES = 200
_SETTLE_SECONDS = 5.0
# Long enough for rounds that come every quarter of a minute to be in it several times.
_WATCH_SECONDS = 60.0
_SHARE = "% of one core"


def measure_presence(plan: Plan) -> Table:
    """CPU of a node of a cluster, and of a single one, each with as many wallets in live mode, one at a time."""
    count = min(plan.sockets, allow_many_files() - _SPARE_FILES)
    shares: dict[str, float] = {}
    with ExitStack() as stack:
        (daemon,), _ = stack.enter_context(cluster_of(1, plan.mongodb))
        shares["in a cluster"] = _share(daemon, count)
    with ExitStack() as stack:
        daemon, _ = stack.enter_context(on_mongodb(plan.mongodb))
        shares["alone"] = _share(daemon, count)
    cost = max(shares["in a cluster"] - shares["alone"], 1e-4)
    rows: dict[str, Figures] = {
        f"{count} live sessions, {name}": {_SHARE: 100 * share} for name, share in shares.items()
    }
    rows["presence"] = {_SHARE: 100 * cost}
    note = f"Over {_WATCH_SECONDS:.0f} s in which no message comes; each session of a wallet of its own."
    target = Target(f"{100 * GOAL:.0f} % of one core, x presence", 1.0, GOAL / cost)
    return Table("Presence", (_SHARE,), rows, (target,), (note,))


def _share(daemon: Daemon, count: int) -> float:
    """Seconds of CPU for each second by the clock."""
    crowd = gather(daemon.url, count)
    path = urlsplit(crowd.mediator.http_uri).path
    sockets = []
    try:
        for wallet in crowd.wallets:
            sockets.append(RawSocket(f"ws://{urlsplit(daemon.url).netloc}{path}"))
            go_live(sockets[-1], wallet, crowd)
        time.sleep(_SETTLE_SECONDS)
        before = cpu_seconds(daemon.pid)
        time.sleep(_WATCH_SECONDS)
        return (cpu_seconds(daemon.pid) - before) / _WATCH_SECONDS
    finally:
        for one in sockets:
            one.close()
