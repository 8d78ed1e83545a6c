"""Scenarios of Message Pickup: live delivery, sockets that all connect at once, fetching, and all of it together."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from time import perf_counter, sleep

from mediatord.bench.forward_scenarios import GOAL_SHARE, LOAD_SHARES
from mediatord.bench.measured_mediator import CycleLoad, ForwardLoad, open_mediator
from mediatord.bench.plan import RECIPIENTS, BenchmarkPlan
from mediatord.bench.processes import ForkedCall, assign_cores, raise_file_limit
from mediatord.bench.raw_clients import (
    TIMEOUT_SECONDS,
    build_handshake,
    encode_frame,
    parse_frame,
    split_handshake,
    split_url,
)
from mediatord.bench.results import (
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    Figures,
    ResultTable,
    format_size,
    latency_figures,
    safe_ratio,
)
from mediatord.bench.wallet_group import require_socket_url
from mediatord.wallet.didcomm_client import PICKUP

CYCLE_WALLETS = 64
_CYCLE_OF_FORWARD_GOAL = 0.35
_PUSH_P99_GOAL_MS = 25.0
_CYCLE, _FORWARD, _OF_FORWARD = "cycle", "forward only", "of forward"
_CYCLE_COLUMNS = (
    PER_SECOND, PER_CPU_SECOND, _OF_FORWARD, "202 p50", "push p50", "push p99", "push p99.9", "late %", CLIENT_US
)  # fmt: skip


def measure_cycle(plan: BenchmarkPlan) -> ResultTable:
    """Forward, push and acknowledgement: closed loop beside forwards to offline wallets, then at fixed rates."""
    table, name = ResultTable("Messages to wallets that are online", _CYCLE_COLUMNS), format_size(plan.sizes[0])
    with (
        open_mediator(plan, assign_cores()) as mediator,
        closing(CycleLoad(mediator, table.failures, CYCLE_WALLETS, plan.sizes[0])) as cycles,
    ):
        offline = ForwardLoad(mediator, table.failures)
        offline.prepare(plan.sizes[0])
        cycles.run(plan.clients, plan.warm_up_seconds)
        contenders = {
            _CYCLE: lambda: cycles.run(plan.clients, plan.seconds).figures(),
            _FORWARD: lambda: offline.start(plan.clients, plan.seconds).result().figures(),
        }
        ratios = {_OF_FORWARD: (_FORWARD, PER_CPU_SECOND if mediator.pid else PER_SECOND)}
        table.compare(contenders, plan.rounds, f"{name}  ", ratios)
        closed = table.rows[f"{name}  {_CYCLE}"]
        for share in LOAD_SHARES:
            rate, seconds = share * closed[PER_SECOND], plan.seconds * plan.rounds / 2
            result = cycles.run(2 * plan.clients, seconds, rate, even=plan.even)
            table.rows[f"{name}  at {share:.0%}"] = result.figures()
        cycles.check_queues()
    p99 = table.rows[f"{name}  at {GOAL_SHARE:.0%}"]["push p99"]
    table.add_target(f"cycles {name}, of forwards", _CYCLE_OF_FORWARD_GOAL, closed[_OF_FORWARD])
    table.add_target(f"push p99 {name} at {GOAL_SHARE:.0%}, ms", _PUSH_P99_GOAL_MS, p99, most=True)
    table.notes = [
        f"Forward, push to one of {CYCLE_WALLETS} wallets in live mode, messages-received without a response. "
        f"Closed loop: at most {plan.clients} messages in flight.",
        f"Milliseconds since a forward was sent, or was due. {mediator.note}",
        f"{cycles.pushed} messages were pushed exactly once and acknowledged.",
    ]
    return table


_LIMITS = (10, 100)
_MESSAGES_PER_SECOND = 2000
_DRAIN_CONNECTIONS = 8
_DRAIN_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "requests", "p50 ms", "p99 ms", CLIENT_US)


def measure_drain(plan: BenchmarkPlan) -> ResultTable:
    """Fill queues, which is not measured, and empty them."""
    table, name = ResultTable("Messages fetched", _DRAIN_COLUMNS), format_size(plan.sizes[0])
    count = max(RECIPIENTS, int(_MESSAGES_PER_SECOND * plan.seconds) // RECIPIENTS * RECIPIENTS)
    with open_mediator(plan, assign_cores()) as mediator:
        load = ForwardLoad(mediator, table.failures)
        load.prepare(plan.sizes[0])

        def run(limit: int) -> Figures:
            accepted = load.start(plan.clients, requests=count).result().accepted
            before = mediator.cpu_seconds
            result = load.group.drain(_DRAIN_CONNECTIONS, limit)
            spent = mediator.cpu_seconds - before
            if result.messages != accepted:
                table.failures.append(f"{accepted} forwards were accepted, {result.messages} messages were fetched")
            return {
                PER_SECOND: safe_ratio(result.messages, result.seconds),
                PER_CPU_SECOND: safe_ratio(result.messages, spent),
                "requests": len(result.latencies_us),
                **latency_figures(result.latencies_us),
                CLIENT_US: 1e6 * safe_ratio(result.client_seconds, result.messages),
            }

        table.compare({f"{limit} a delivery": partial(run, limit) for limit in _LIMITS}, plan.rounds, f"{name}  ")
    table.notes = [
        f"delivery-request and messages-received over HTTP, {_DRAIN_CONNECTIONS} connections, {RECIPIENTS} wallets "
        f"with {count // RECIPIENTS} messages each; latencies are those of a request. {mediator.note}",
    ]
    return table


PUSH_WALLETS = 64
PUSH_CONCURRENCIES = (1, 8)
PUSH_COLUMNS = ("msg/s", "sent-202 p50", "sent-push p50", "sent-push p99", "202-push p50", "202-push p99")


def measure_push(plan: BenchmarkPlan) -> ResultTable:
    """Time from a forward being sent, and from its 202, until the push has been received."""
    table, size = ResultTable("Live push", PUSH_COLUMNS), plan.sizes[0]
    with (
        open_mediator(plan) as mediator,
        closing(CycleLoad(mediator, table.failures, PUSH_WALLETS, size, short=False)) as load,
    ):
        seconds = plan.seconds * plan.rounds / len(PUSH_CONCURRENCIES)
        for at_once in PUSH_CONCURRENCIES:
            table.rows[f"{format_size(size)}  {at_once} at once"] = measure_pushes(load, at_once, seconds)
    table.notes = [
        f"Milliseconds; forwards to {PUSH_WALLETS} wallets in live mode. A negative value means that the push "
        "arrived before the sender's 202.",
    ]
    return table


def measure_pushes(load: CycleLoad, at_once: int, seconds: float) -> Figures:
    """Rate and latencies of forwards, each sent after the one before was accepted and pushed."""
    result = load.run(at_once, seconds, acknowledge=False)
    return {
        PER_SECOND: safe_ratio(result.pushed, result.seconds),
        **latency_figures(result.latencies_us, "sent-202 {}", ("p50",)),
        **latency_figures(result.pushed_us, "sent-push {}"),
        **latency_figures(result.after_us, "202-push {}"),
    }


SPARE_FILES = 200
_STORM_COLUMNS = ("sockets/s", "sockets/CPU-s", "open p50", "open p99", "live p50", "live p99")
_MAX_STORM_ROUNDS = 5


def measure_connection_storm(plan: BenchmarkPlan) -> ResultTable:
    """Rate of sockets until all are in live mode, and how long the last ones wait."""
    table, count = (
        ResultTable("Connection storm", _STORM_COLUMNS),
        min(plan.sockets, raise_file_limit() - SPARE_FILES),
    )
    with open_mediator(plan, assign_cores()) as mediator:
        group = mediator.enrol(min(RECIPIENTS, count))

        def run() -> Figures:
            type_, body = f"{PICKUP}/live-delivery-change", {"live_delivery": True}
            requests = [wallet.pack(type_, body)[1] for wallet in islice(cycle(group.wallets), count)]
            before = mediator.cpu_seconds
            storm = _ConnectionStorm(require_socket_url(group.mediator), requests)
            seconds = storm.run()
            if storm.refused:
                table.failures.append(f"{storm.refused} of {count} sockets were refused")
            return {
                "sockets/s": safe_ratio(len(storm.live_us), seconds),
                "sockets/CPU-s": safe_ratio(len(storm.live_us), mediator.cpu_seconds - before),
                **latency_figures(storm.opened_us, "open {}"),
                **latency_figures(storm.live_us, "live {}"),
            }

        table.compare({f"{count} at once": run}, min(plan.rounds, _MAX_STORM_ROUNDS))
    table.notes = [f"Milliseconds since the first connect. Handshake, then live-delivery-change. {mediator.note}"]
    return table


class _ConnectingSocket:
    """A socket that is connecting, then waits for its handshake, then for the status of live delivery."""

    def __init__(self, url: str, request: bytes) -> None:
        self.request = request
        self.is_open = False
        self.received = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if self.socket.connect_ex(split_url(url)[:2]) not in (0, errno.EINPROGRESS):
            raise ConnectionError("no connection")


@dataclass(slots=True)
class _ConnectionStorm:
    """
    Opens many sockets at once, as wallets do after a network outage.

    :param requests: for live delivery, one for each socket.
    :ivar refused: sockets closed by the server.
    :ivar opened_us: from the start until each socket was open.
    :ivar live_us: likewise, until live delivery was confirmed.
    """

    url: str
    requests: Sequence[bytes]
    refused: int = 0
    opened_us: list[int] = field(default_factory=list)
    live_us: list[int] = field(default_factory=list)

    def run(self) -> float:
        """
        Run until every socket is in live mode or was refused, and close them; the seconds until then.

        :raise TimeoutError: the server stopped answering.
        """
        connecting, start = dict[int, _ConnectingSocket](), perf_counter()
        try:
            with select.epoll() as epoll:
                for request in self.requests:
                    one = _ConnectingSocket(self.url, request)
                    connecting[one.socket.fileno()] = one
                    epoll.register(one.socket, select.EPOLLOUT)
                while len(self.live_us) + self.refused < len(self.requests):
                    events = epoll.poll(TIMEOUT_SECONDS)
                    if not events:
                        raise TimeoutError("the server stopped answering")
                    for number, event in events:
                        self._take_event(connecting[number], event, epoll, start)
            return perf_counter() - start
        finally:
            for one in connecting.values():
                one.socket.close()

    def _take_event(self, one: _ConnectingSocket, event: int, epoll: select.epoll, start: float) -> None:
        """Take one step; a socket in live mode is no longer polled."""
        try:
            if event & select.EPOLLOUT and not event & (select.EPOLLERR | select.EPOLLHUP):
                one.socket.send(build_handshake(self.url))
                epoll.modify(one.socket, select.EPOLLIN)
                return
            data = one.socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed a WebSocket")
            one.received += data
            if not one.is_open and (rest := split_handshake(one.received)) is not None:
                one.received, one.is_open = rest, True
                self.opened_us.append(int((perf_counter() - start) * 1e6))
                one.socket.send(encode_frame(one.request))
            if not one.is_open or parse_frame(one.received) is None:
                return
            self.live_us.append(int((perf_counter() - start) * 1e6))
        except OSError:
            self.refused += 1
        epoll.unregister(one.socket)


# Of the rate of forwards in a closed loop.
_OFFLINE_SHARE, _ONLINE_SHARE = 0.25, 0.08
_FETCH_INTERVAL_SECONDS = 1.0
_MIXED_COLUMNS = (PER_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", "% of one core")


def measure_mixed(plan: BenchmarkPlan) -> ResultTable:
    """Forwards in an open loop to offline wallets, which fetch meanwhile, and to wallets in live mode."""
    table, size = ResultTable("Mixed load", _MIXED_COLUMNS), plan.sizes[0]
    with (
        open_mediator(plan, assign_cores()) as mediator,
        closing(CycleLoad(mediator, table.failures, CYCLE_WALLETS, size)) as online,
    ):
        offline = ForwardLoad(mediator, table.failures)
        offline.prepare(size)
        full = offline.start(plan.clients, plan.seconds).result()
        rate = full.figures()[PER_SECOND]
        left = full.accepted - offline.group.drain(2, 50).messages
        connections, seconds, before, start = (
            4 * plan.clients,
            plan.seconds * plan.rounds,
            mediator.cpu_seconds,
            perf_counter(),
        )
        runner = online.prepare(connections, seconds, _ONLINE_SHARE * rate, even=plan.even)
        posting = offline.start(connections, seconds, rate=_OFFLINE_SHARE * rate, even=plan.even)
        pushing, fetched = ForkedCall(runner.run), []
        while not posting.done:
            sleep(_FETCH_INTERVAL_SECONDS)
            fetched.append(offline.group.drain(2, 50))
        load, cycles = posting.result(), pushing.result()
        runner.close()
        busy = safe_ratio(mediator.cpu_seconds - before, perf_counter() - start)
        fetched.append(offline.group.drain(2, 50))
    messages = sum(result.messages for result in fetched)
    table.failures += cycles.failures()
    if left or messages != load.accepted:
        table.failures.append(f"{load.accepted} forwards were accepted, {messages} messages were fetched")
    pushes, percentiles = cycles.figures(), ("p50", "p99", "p99.9")
    latencies = [latency for result in fetched for latency in result.latencies_us]
    table.rows = {
        "forwards, recipient away": load.figures() | {"late %": load.late_percent},
        "pushes, recipient online": {
            **{name: pushes[name] for name in (PER_SECOND, "late %")},
            **{f"{name} ms": pushes[f"push {name}"] for name in percentiles},
        },
        "requests of fetching wallets": {
            PER_SECOND: safe_ratio(len(latencies), load.seconds),
            **latency_figures(latencies, names=percentiles),
        },
        "all": {"% of one core": 100 * busy} if mediator.pid else {},
    }
    table.notes = [
        f"{format_size(size)}. {_OFFLINE_SHARE:.0%} and {_ONLINE_SHARE:.0%} of {rate:,.0f} forwards per second, "
        f"the rate of a closed loop, to {RECIPIENTS} and {CYCLE_WALLETS} wallets; {messages} messages were fetched. "
        f"{mediator.note}",
    ]
    return table
