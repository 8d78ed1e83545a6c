"""What those who behave notice of those who do not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import sleep
from typing import Any

from mediatord.bench.cycle import complaints, cycle_figures
from mediatord.bench.figures import Figures, Table, Target, percentile, ratio, take_turns
from mediatord.bench.flooding import Setup
from mediatord.bench.plan import Plan
from mediatord.bench.processes import allow_many_files, child, read_line, write_line
from mediatord.bench.subject import Residents, subject

# Of the latency of others, at the 99th percentile.
GOAL = 2.0

# Wallets that behave, each at an address of its own, and messages a second between all of them.
WALLETS = 64
RATE = 60.0
# As many times as all of them together.
FOLD = 10
FRESH_DIDS = 10_000
# More than of which repetitions are noticed, so that none counts as one.
_OF_ONE_DID = 12_000
# A turn takes so many times as long as elsewhere: of a few messages there is no 99th percentile.
_LONGER = 8
# What limits allow at first is used up.
_BEFORE_SECONDS = 2.0

# The limits as they are by default.
_SETTINGS = {
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "60",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "120",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "600",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "64",
}
_NOBODY = "nobody else"
_FLOODS = {
    "one address": "address",
    "one DID, 300 addresses": "did",
    "10 000 fresh DIDs, 16 addresses": "fresh",
    "slow-loris, 16 addresses": "loris",
    "sockets not read, 16 addresses": "deaf",
}
_LATENCIES = ("202 p50", "202 p99", "push p50", "push p99")
_TIMES = {"202 p99": "x 202 p99", "push p99": "x push p99"}
_COLUMNS = (*_LATENCIES, *_TIMES.values(), "flood/s", "accepted/s", "CPU %")


def measure_abuse(plan: Plan) -> Table:
    """The same load with and without a flood beside it, in turns."""
    allow_many_files()
    size, failures = plan.sizes[0], list[str]()
    with subject(plan, _SETTINGS) as one, one.residents(WALLETS, size, WALLETS * 8) as online:
        online.do("live", apart=True)
        with _flooding(Setup(one.url, FRESH_DIDS, _OF_ONE_DID, size)) as flood:
            turns = _Turns(online, flood, plan.seconds * _LONGER, failures, lambda: one.cpu_seconds)
            turns.run("")
            contenders = {_NOBODY: ""} | _FLOODS
            rounds = take_turns({name: lambda do=do: turns.run(do) for name, do in contenders.items()}, plan.rounds)  # type: ignore[misc]  # a lambda's default has no type
        left = online.do("waiting")["messages"]
    if left:
        failures.append(f"{left} messages were acknowledged and are still there")
    rows: dict[str, Figures] = {}
    for name in rounds.found:
        times = {called: rounds.ratio(name, _NOBODY, figure) for figure, called in _TIMES.items()}
        rows[name] = rounds.medians(name) | times
    targets = tuple(
        Target(f"{name}, {called}", GOAL, rows[name][called], True) for name in _FLOODS for called in _TIMES.values()
    )
    notes = (
        f"{WALLETS} wallets in live mode, each at its own address, get {RATE:.0f} messages a second between them.",
        f"Floods are {FOLD} times as much, for {_BEFORE_SECONDS:.0f} s before as well; limits are those by default.",
        f"Milliseconds since a forward was to be sent, and times that of turns with nobody else. {one.note}",
    )
    return Table("What a flood costs others", _COLUMNS, rows, targets, notes, tuple(failures))


@contextmanager
def _flooding(setup: Setup) -> Iterator[subprocess.Popen[str]]:
    with child("mediatord.bench.flooding") as process:
        write_line(process, json.dumps(asdict(setup)))
        read_line(process)
        yield process


class _Turns:
    """Of the same wallets, with or without a flood."""

    def __init__(
        self, online: Residents, flood: subprocess.Popen[str], seconds: float, failures: list[str], spent: Any
    ) -> None:
        self._online = online
        self._flood = flood
        self._seconds = seconds
        self._failures = failures
        self._spent = spent
        self._turns = 0

    def run(self, do: str) -> Figures:
        """One turn, and what is wrong with it."""
        self._turns += 1
        flooded: dict[str, Any] = {"sent": 0, "statuses": {}}
        seconds = self._seconds + _BEFORE_SECONDS
        if do:
            write_line(self._flood, json.dumps({"do": do, "seconds": seconds, "rate": FOLD * RATE}))
        sleep(_BEFORE_SECONDS)
        before = self._spent()
        found = self._online.do(
            "cycle", seconds=self._seconds, connections=WALLETS, rate=RATE, seed=self._turns, apart=True
        )
        spent = self._spent() - before
        if do:
            flooded = json.loads(read_line(self._flood))
        self._failures += complaints(found)
        return cycle_figures(found, spent) | {
            "202 p99": percentile(found["accepted_us"], 0.99) / 1000,
            "flood/s": ratio(flooded["sent"], seconds),
            "accepted/s": ratio(flooded["statuses"].get("202", 0), seconds),
            "CPU %": 100 * ratio(spent, found["seconds"]),
        }
