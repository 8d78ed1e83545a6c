"""What the event log costs: the same daemon with it and without it, in turns."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from mediatord.bench.accounting import Accounting
from mediatord.bench.crowd import forwards, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Server, post_for
from mediatord.bench.figures import Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.wallet.throwaway import Daemon, throw_away_daemon

# Of the CPU time of a forward without the log, what the log may add.
MOST = 0.08

_ON, _OFF = "event log on", "event log off"
_LEVELS: dict[str, Literal["info", "error"]] = {_ON: "info", _OFF: "error"}
_LINES = "lines"
_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LOG__ROTATE__COMPRESS": "false"}
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.02, 15.0
_WARM_UP_SHARE = 0.25


def measure_log(plan: Plan) -> Table:
    """One table for all sizes. While the log is off only errors are written, of which there are none."""
    rows: dict[str, Figures] = {}
    targets: list[Target] = []
    with throw_away_daemon(_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        crowd = gather(daemon.url, RECIPIENTS)
        log = _Log(daemon)
        server = Server.at(crowd.mediator.http_uri, daemon.pid)
        accounting = Accounting(server, lambda: stored_rows(daemon.directory / DATABASE))
        for size in plan.sizes:
            bodies = Path(place) / f"{size}.bodies"
            write_bodies(bodies, forwards(crowd, size, DISTINCT_MESSAGES))

            def post(contender: str, seconds: float, bodies: Path = bodies) -> Figures:
                log.write(_LEVELS[contender])
                before, accepted = log.lines(), accounting.accepted
                figures = accounting.check(post_for(server, bodies, plan.clients, seconds))
                return figures | {_LINES: (log.lines() - before) / (accounting.accepted - accepted)}

            post(_ON, plan.seconds * _WARM_UP_SHARE)
            rounds = take_turns(
                {name: lambda name=name: post(name, plan.seconds) for name in (_ON, _OFF)},  # type: ignore[misc]
                plan.rounds,
            )
            name = size_name(size)
            rows |= {f"{name}  {contender}": rounds.medians(contender) for contender in rounds.found}
            rows[f"{name}  cost"] = _cost(rounds)
            kept = rounds.ratio(_ON, _OFF, PER_CPU_SECOND)
            targets.append(Target(f"forwards {name} per CPU-s, x without the log", 1 / (1 + MOST), kept))
    columns = (PER_SECOND, PER_CPU_SECOND, "us CPU/msg", _LINES, "us/line", "% of the CPU")
    notes = (f"{plan.clients} connections, one daemon process; lines are those of a forward.",)
    return Table("The event log", columns, rows, tuple(targets), notes, tuple(accounting.failures))


def _cost(rounds: Rounds) -> Figures:
    """The differences within rounds."""
    pairs = list(zip(rounds.found[_ON], rounds.found[_OFF], strict=True))
    spent = median(1e6 / on[PER_CPU_SECOND] - 1e6 / off[PER_CPU_SECOND] for on, off in pairs)
    lines = median(on[_LINES] for on, _ in pairs)
    more = 100 * (1 / rounds.ratio(_ON, _OFF, PER_CPU_SECOND) - 1)
    return {"us CPU/msg": spent, _LINES: lines, "us/line": spent / lines, "% of the CPU": more}


class _Log:
    """The event log of a daemon, as the operator sees it."""

    def __init__(self, daemon: Daemon) -> None:
        self._pid = daemon.pid
        self._file = daemon.directory / "mediator.yaml"
        self._directory = daemon.directory / "log"

    def write(self, level: str) -> None:
        """
        Have the daemon write what has this level or a higher one from now on.

        :raise RuntimeError: it does not take the configuration.
        """
        text = self._file.read_text("utf-8")
        self._file.write_text(re.sub(r"(?m)^( +level:) \w+", rf"\1 {level}", text), encoding="utf-8")
        before = self._segments()
        os.kill(self._pid, signal.SIGHUP)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._segments() == before:
            if time.monotonic() > deadline:
                raise RuntimeError("the daemon did not read its configuration again")
            time.sleep(_LOOK_SECONDS)

    def lines(self) -> int:
        """How many were written so far."""
        return sum(path.read_bytes().count(b"\n") for path in self._directory.glob("*.jsonl"))

    def _segments(self) -> int:
        return len(list(self._directory.glob("events-*")))
