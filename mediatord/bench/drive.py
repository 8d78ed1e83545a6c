"""The parent's side of the load generator: start its processes, let them go together, add up what they found."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from mediatord.bench.figures import Figures, percentile, ratio
from mediatord.bench.load import ENVELOPE, Job, write_bodies
from mediatord.bench.processes import child, cpu_seconds, read_line, write_line

ACCEPTED = "202"
PER_SECOND = "msg/s"
PER_CPU_SECOND = "msg/CPU-s"
# CPU of the load generator for each request.
CLIENT_US = "client us"

_MOST_PROCESSES = 4
# Connections for what is asked one after the other, unless an answer is late.
_LOOKING = 8


@dataclass(frozen=True, slots=True)
class Server:
    """
    Who is posted to.

    :param pid: whose CPU time counts; 0 of a server that runs elsewhere.
    :param success: the HTTP status that means so; more than one of them, separated by blanks.
    """

    pid: int
    port: int
    path: str
    content_type: str = ENVELOPE
    success: str = ACCEPTED
    host: str = "127.0.0.1"

    @classmethod
    def at(cls, url: str, pid: int, content_type: str = ENVELOPE, success: str = ACCEPTED) -> Server:
        """One that has a URL."""
        target = urlsplit(url)
        return cls(pid, target.port or 80, target.path or "/", content_type, success, target.hostname or "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Load:
    """
    What the clients saw, all of them together.

    :param accepted: how many requests succeeded.
    :param seconds: of the one that took longest.
    :param cpu_seconds: of the servers.
    :param late: how many requests were sent later than they should have been.
    :param client_seconds: of CPU, of all clients.
    """

    statuses: dict[str, int]
    accepted: int
    seconds: float
    cpu_seconds: float
    latencies_us: Sequence[int] = field(repr=False)
    late: int = 0
    client_seconds: float = 0.0

    def figures(self) -> Figures:
        """Rates and latencies."""
        return {
            PER_SECOND: ratio(self.accepted, self.seconds),
            PER_CPU_SECOND: ratio(self.accepted, self.cpu_seconds),
            "p50 ms": percentile(self.latencies_us, 0.50) / 1000,
            "p99 ms": percentile(self.latencies_us, 0.99) / 1000,
            "p99.9 ms": percentile(self.latencies_us, 0.999) / 1000,
            CLIENT_US: 1e6 * ratio(self.client_seconds, sum(self.statuses.values())),
        }


def post_for(server: Server, bodies: Path, connections: int, seconds: float) -> Load:
    """Keep so many connections busy for so long."""
    return post_to_all([server], bodies, connections, seconds)


def post_at(
    server: Server, bodies: Path, connections: int, seconds: float, rate: float, *, even: bool = False
) -> Load:
    """
    Post at times fixed beforehand, whether the server keeps up or not.

    :param connections: at most so many requests are on their way at the same time; others wait, and are late.
    :param rate: requests per second.
    :param even: those times are a beat; otherwise they are a Poisson process.
    """
    shares = _shares(connections)
    jobs = [replace(_job(server, bodies, share, seconds=seconds), even=even) for share in shares]
    return _drive([server], _apart([replace(job, rate=rate * job.connections / connections) for job in jobs]))


def get_at(server: Server, place: Path, seconds: float, rate: float) -> Load:
    """
    GET the same thing again and again, in a beat.

    :param place: a directory to write a file in.
    """
    nothing = place / "nothing"
    write_bodies(nothing, [b""])
    job = _job(server, nothing, _LOOKING, seconds=seconds)
    return _drive([server], [replace(job, method="GET", rate=rate, even=True)])


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
    return Job(*target, str(bodies), connections, seconds=seconds, requests=requests, host=server.host)


def _apart(jobs: list[Job]) -> list[Job]:
    """So that they do not post the same bodies at the same time."""
    return [replace(job, offset=1000 * place) for place, job in enumerate(jobs)]


def _shares(number: int) -> list[int]:
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, number)
    return [number // processes + (place < number % processes) for place in range(processes)]


def _drive(servers: Sequence[Server], jobs: list[Job]) -> Load:
    with ExitStack() as stack:
        clients = [stack.enter_context(child("mediatord.bench.generator")) for _ in jobs]
        for client, job in zip(clients, jobs, strict=True):
            write_line(client, json.dumps(asdict(job)))
        for client in clients:
            if read_line(client) != "ready":
                raise RuntimeError("a load generator did not get ready")
        before = sum(cpu_seconds(server.pid) for server in servers if server.pid)
        for client in clients:
            write_line(client, "go")
        outcomes = [json.loads(read_line(client)) for client in clients]
        spent = sum(cpu_seconds(server.pid) for server in servers if server.pid) - before
    statuses: Counter[str] = Counter()
    for outcome in outcomes:
        statuses.update(outcome["statuses"])
    latencies = [latency for outcome in outcomes for latency in outcome["latencies_us"]]
    seconds = max(outcome["seconds"] for outcome in outcomes)
    accepted = sum(statuses[status] for status in servers[0].success.split())
    late = sum(outcome["late"] for outcome in outcomes)
    client_seconds = sum(outcome["cpu_seconds"] for outcome in outcomes)
    return Load(dict(statuses), accepted, seconds, spent, latencies, late, client_seconds)
