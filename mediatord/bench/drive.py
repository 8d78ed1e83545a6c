"""The parent's side of the load generator: start its processes, let them go together, add up what they found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mediatord.bench.figures import Figures, percentile, ratio
from mediatord.bench.load import Job
from mediatord.bench.processes import child, cpu_seconds, read_line, write_line

ACCEPTED = "202"
PER_SECOND = "msg/s"
PER_CPU_SECOND = "msg/CPU-s"

_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Server:
    """
    Who is posted to.

    :param pid: whose CPU time counts.
    """

    pid: int
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class Load:
    """
    What the clients saw, all of them together.

    :param seconds: of the one that took longest.
    :param cpu_seconds: of the server.
    """

    statuses: dict[str, int]
    seconds: float
    cpu_seconds: float
    latencies_us: Sequence[int] = field(repr=False)

    @property
    def accepted(self) -> int:
        """How many requests were answered 202."""
        return self.statuses.get(ACCEPTED, 0)

    def figures(self) -> Figures:
        """Rates and latencies."""
        return {
            PER_SECOND: ratio(self.accepted, self.seconds),
            PER_CPU_SECOND: ratio(self.accepted, self.cpu_seconds),
            "p50 ms": percentile(self.latencies_us, 0.50) / 1000,
            "p99 ms": percentile(self.latencies_us, 0.99) / 1000,
        }


def post_for(server: Server, bodies: Path, connections: int, seconds: float) -> Load:
    """Keep so many connections busy for so long."""
    return _drive(server, [_job(server, bodies, share, seconds=seconds) for share in _shares(connections)])


def post_so_many(server: Server, bodies: Path, connections: int, requests: int) -> Load:
    """Post an exact number of messages."""
    parts = zip(_shares(connections), _shares(requests), strict=True)
    return _drive(server, [_job(server, bodies, share, requests=count) for share, count in parts])


def _job(server: Server, bodies: Path, connections: int, *, seconds: float = 0.0, requests: int = 0) -> Job:
    return Job(server.port, server.path, str(bodies), connections, seconds=seconds, requests=requests)


def _shares(number: int) -> list[int]:
    processes = min(_PROCESSES, number)
    return [number // processes + (place < number % processes) for place in range(processes)]


def _drive(server: Server, jobs: list[Job]) -> Load:
    with ExitStack() as stack:
        clients = [stack.enter_context(child("mediatord.bench.load")) for _ in jobs]
        for number, (client, job) in enumerate(zip(clients, jobs, strict=True)):
            offset = number * 1000
            write_line(client, json.dumps({**asdict(job), "offset": offset}))
        for client in clients:
            if read_line(client) != "ready":
                raise RuntimeError("a load generator did not get ready")
        before = cpu_seconds(server.pid)
        for client in clients:
            write_line(client, "go")
        outcomes = [json.loads(read_line(client)) for client in clients]
        spent = cpu_seconds(server.pid) - before
    statuses: Counter[str] = Counter()
    for outcome in outcomes:
        statuses.update(outcome["statuses"])
    latencies = [latency for outcome in outcomes for latency in outcome["latencies_us"]]
    return Load(dict(statuses), max(outcome["seconds"] for outcome in outcomes), spent, latencies)
