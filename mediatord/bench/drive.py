"""The parent's side of the load generator: start its processes, let them go together, add up what they found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from mediatord.bench.figures import Figures, percentile, ratio
from mediatord.bench.load import ENVELOPE, Job
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
    :param success: the HTTP status that means so.
    """

    pid: int
    port: int
    path: str
    content_type: str = ENVELOPE
    success: str = ACCEPTED

    @classmethod
    def at(cls, url: str, pid: int, content_type: str = ENVELOPE, success: str = ACCEPTED) -> Server:
        """One that has a URL."""
        target = urlsplit(url)
        return cls(pid, target.port or 80, target.path or "/", content_type, success)


@dataclass(frozen=True, slots=True)
class Load:
    """
    What the clients saw, all of them together.

    :param accepted: how many requests succeeded.
    :param seconds: of the one that took longest.
    :param cpu_seconds: of the servers.
    """

    statuses: dict[str, int]
    accepted: int
    seconds: float
    cpu_seconds: float
    latencies_us: Sequence[int] = field(repr=False)

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
    return post_to_all([server], bodies, connections, seconds)


def post_to_all(servers: Sequence[Server], bodies: Path, connections: int, seconds: float) -> Load:
    """The same over several servers that do one work, each of which gets so many of the connections as the others."""
    shares = [share // len(servers) for share in _shares(connections)]
    jobs = [_job(server, bodies, share, seconds=seconds) for server in servers for share in shares]
    return _drive(servers, _apart(jobs))


def post_so_many(server: Server, bodies: Path, connections: int, requests: int) -> Load:
    """Post an exact number of messages."""
    parts = zip(_shares(connections), _shares(requests), strict=True)
    return _drive([server], _apart([_job(server, bodies, share, requests=count) for share, count in parts]))


def post_once(server: Server, bodies: Path, connections: int, seconds: float = float("inf")) -> Load:
    """Post no body twice, for so long or until all have been posted."""
    jobs = [_job(server, bodies, share, seconds=seconds) for share in _shares(connections)]
    return _drive([server], [replace(job, offset=place, every=len(jobs)) for place, job in enumerate(jobs)])


def _job(server: Server, bodies: Path, connections: int, *, seconds: float = 0.0, requests: int = 0) -> Job:
    target = (server.port, server.path, server.content_type)
    return Job(*target, str(bodies), connections, seconds=seconds, requests=requests)


def _apart(jobs: list[Job]) -> list[Job]:
    """So that they do not post the same bodies at the same time."""
    return [replace(job, offset=1000 * place) for place, job in enumerate(jobs)]


def _shares(number: int) -> list[int]:
    processes = min(_PROCESSES, number)
    return [number // processes + (place < number % processes) for place in range(processes)]


def _drive(servers: Sequence[Server], jobs: list[Job]) -> Load:
    with ExitStack() as stack:
        clients = [stack.enter_context(child("mediatord.bench.load")) for _ in jobs]
        for client, job in zip(clients, jobs, strict=True):
            write_line(client, json.dumps(asdict(job)))
        for client in clients:
            if read_line(client) != "ready":
                raise RuntimeError("a load generator did not get ready")
        before = sum(cpu_seconds(server.pid) for server in servers)
        for client in clients:
            write_line(client, "go")
        outcomes = [json.loads(read_line(client)) for client in clients]
        spent = sum(cpu_seconds(server.pid) for server in servers) - before
    statuses: Counter[str] = Counter()
    for outcome in outcomes:
        statuses.update(outcome["statuses"])
    latencies = [latency for outcome in outcomes for latency in outcome["latencies_us"]]
    seconds = max(outcome["seconds"] for outcome in outcomes)
    return Load(dict(statuses), statuses[servers[0].success], seconds, spent, latencies)
