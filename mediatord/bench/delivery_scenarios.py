"""Scenarios of delivery: live push, fetching, connection storms, mixed load, and the memory of idle sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from mediatord.bench.didcomm_wallets import LiveSocket, enrol_group
from mediatord.bench.load_generator import WebSocketClient, post_at_rate, post_count
from mediatord.bench.mediator_under_test import (
    MediatorUnderTest,
    WalletProcess,
    prepare_mediator,
    start_wallet_process,
)
from mediatord.bench.processes import raise_file_limit, rss_bytes
from mediatord.bench.scenario import (
    CLIENT_US,
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    PER_CPU_SECOND,
    PER_SECOND,
    RECIPIENTS,
    WARM_UP_SHARE,
    BenchmarkPlan,
    Figures,
    PerformanceTarget,
    ResultTable,
    format_size,
    latency_figures,
    run_interleaved,
    safe_ratio,
)
from mediatord.bench.wallet_process import WalletSetup
from mediatord.wallet.temporary_daemon import run_temporary_daemon

CYCLE_WALLETS = 64
_CYCLE_OF_FORWARD_GOAL = 0.35
_PUSH_P99_GOAL_MS = 25.0
_LOAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_GOAL_SHARE = 0.7
_CYCLE, _FORWARD, _OF_FORWARD = "cycle", "forward only", "of forward"
_CYCLE_COLUMNS = (
    PER_SECOND, PER_CPU_SECOND, _OF_FORWARD, "202 p50", "push p50", "push p99", "push p99.9", "late %", CLIENT_US
)  # fmt: skip


def measure_cycle(plan: BenchmarkPlan) -> ResultTable:
    """Forward, push and acknowledgement: closed loop beside forwards to offline wallets, then at fixed rates."""
    size, name = plan.sizes[0], format_size(plan.sizes[0])
    rows: dict[str, Figures] = {}
    with (
        prepare_mediator(plan) as mediator,
        mediator.wallet_process(CYCLE_WALLETS, size, CYCLE_WALLETS * 4) as online,
    ):
        online.do("live")
        cycles = _CycleContender(plan, mediator, online)
        with mediator.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as offline:
            cycles.run(plan.seconds * WARM_UP_SHARE)
            rounds = run_interleaved(
                {
                    _CYCLE: lambda: cycles.run(plan.seconds),
                    _FORWARD: lambda: mediator.post(offline.bodies, plan.clients, plan.seconds).figures(),
                },
                plan.rounds,
            )
        for contender in rounds.found:
            ratio = rounds.ratio(contender, _FORWARD, PER_CPU_SECOND if mediator.pid else PER_SECOND)
            rows[f"{name}  {contender}"] = rounds.medians(contender) | {_OF_FORWARD: ratio}
        most = rows[f"{name}  {_CYCLE}"][PER_SECOND]
        for share in _LOAD_SHARES:
            rows[f"{name}  at {share:.0%}"] = cycles.run(plan.seconds * plan.rounds / 2, share * most)
        left = online.do("waiting")["messages"]
    if left:
        cycles.failures.append(f"{left} messages were acknowledged and are still queued")
    ratio, p99 = rows[f"{name}  {_CYCLE}"][_OF_FORWARD], rows[f"{name}  at {_GOAL_SHARE:.0%}"]["push p99"]
    targets = (
        PerformanceTarget(f"cycles {name}, of forwards", _CYCLE_OF_FORWARD_GOAL, ratio),
        PerformanceTarget(f"push p99 {name} at {_GOAL_SHARE:.0%}, ms", _PUSH_P99_GOAL_MS, p99, True),
    )
    notes = (
        f"Forward, push to one of {CYCLE_WALLETS} wallets in live mode, messages-received without a response. "
        f"Closed loop: at most {plan.clients} messages in flight.",
        f"Milliseconds since a forward was sent, or was due. {mediator.note}",
        f"{cycles.pushed} messages were pushed exactly once and acknowledged.",
    )
    failures = tuple(cycles.failures)
    return ResultTable("Messages to wallets that are online", _CYCLE_COLUMNS, rows, targets, notes, failures)


class _CycleContender:
    """Runs cycles of the same wallets. :ivar pushed: messages of all runs."""

    def __init__(self, plan: BenchmarkPlan, mediator: MediatorUnderTest, online: WalletProcess) -> None:
        self._plan = plan
        self._mediator = mediator
        self._online = online
        self._runs = 0
        self.pushed = 0
        self.failures: list[str] = []

    def run(self, seconds: float, rate: float = 0.0) -> Figures:
        """One run in a closed loop, or at a rate."""
        self._runs += 1
        before = self._mediator.cpu_seconds
        connections = self._plan.clients * (2 if rate else 1)
        parameters = {"rate": rate, "even": self._plan.even, "seed": self._runs}
        result = self._online.do("cycle", seconds=seconds, connections=connections, **parameters)
        self.pushed += result["pushed"]
        self.failures += find_cycle_failures(result)
        return compute_cycle_figures(result, self._mediator.cpu_seconds - before)


def find_cycle_failures(result: dict[str, Any]) -> list[str]:
    """A sentence for everything wrong with a :class:`~mediatord.bench.wallet_process.CycleResult`."""
    failures = []
    if refused := {status: count for status, count in result["statuses"].items() if not status.startswith("2")}:
        failures.append(f"responses other than 202: {refused}")
    if result["missing"] and not refused:
        failures.append(f"{result['missing']} messages were not pushed")
    if result["repeated"]:
        failures.append(f"{result['repeated']} messages were pushed twice")
    return failures


def compute_cycle_figures(result: dict[str, Any], spent: float) -> Figures:
    """
    Rates, and latencies in milliseconds.

    :param spent: seconds of CPU of the mediator; 0 if unknown.
    """
    return {
        PER_SECOND: safe_ratio(result["pushed"], result["seconds"]),
        PER_CPU_SECOND: safe_ratio(result["pushed"], spent),
        **latency_figures(result["accepted_us"], "202 {}"),
        **latency_figures(result["pushed_us"], "push {}", ("p50", "p99", "p99.9")),
        "late %": 100 * safe_ratio(result["late"], len(result["accepted_us"])),
        CLIENT_US: 1e6 * safe_ratio(result["cpu_seconds"], result["pushed"]),
    }


_LIMITS = (10, 100)
_MESSAGES_PER_SECOND = 2000
_DRAIN_CONNECTIONS = 8
_DRAIN_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "requests", "p50 ms", "p99 ms", CLIENT_US)


def measure_drain(plan: BenchmarkPlan) -> ResultTable:
    """Fill queues, which is not measured, and empty them."""
    size, name = plan.sizes[0], format_size(plan.sizes[0])
    count = max(RECIPIENTS, int(_MESSAGES_PER_SECOND * plan.seconds) // RECIPIENTS * RECIPIENTS)
    failures: list[str] = []
    with prepare_mediator(plan) as mediator, mediator.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as wallets:

        def run(limit: int) -> Figures:
            load = post_count(mediator.server, wallets.bodies, plan.clients, count)
            before = mediator.cpu_seconds
            result = wallets.do("drain", connections=_DRAIN_CONNECTIONS, limit=limit)
            spent, messages = mediator.cpu_seconds - before, result["messages"]
            if messages != load.accepted:
                failures.append(f"{load.accepted} forwards were accepted, {messages} messages were fetched")
            return {
                PER_SECOND: safe_ratio(messages, result["seconds"]),
                PER_CPU_SECOND: safe_ratio(messages, spent),
                "requests": result["requests"],
                **latency_figures(result["latencies_us"]),
                CLIENT_US: 1e6 * safe_ratio(result["cpu_seconds"], messages),
            }

        contenders = {f"{name}  {limit} a delivery": partial(run, limit) for limit in _LIMITS}
        rounds = run_interleaved(contenders, plan.rounds)
    rows = {contender: rounds.medians(contender) for contender in rounds.found}
    notes = (
        f"delivery-request and messages-received over HTTP, {_DRAIN_CONNECTIONS} connections, {RECIPIENTS} wallets "
        f"with {count // RECIPIENTS} messages each; latencies are those of a request. {mediator.note}",
    )
    return ResultTable("Messages fetched", _DRAIN_COLUMNS, rows, (), notes, tuple(failures))


_SOCKET_GOAL_KIB = 12.0
_WARM_UP_SOCKETS = 50
_SPARE_FILES = 200
_KIB = 1 << 10


def measure_sockets(plan: BenchmarkPlan) -> ResultTable:
    """Resident memory of an idle socket, first connected, then in live mode, each of its own wallet and account."""
    count = min(plan.sockets, raise_file_limit() - _SPARE_FILES)
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        group = enrol_group(daemon.url, count)
        codecs, url = group.make_codecs(), group.mediator.ws_uri or ""
        for codec in codecs[:_WARM_UP_SOCKETS]:  # loads code and primes allocators
            live_socket = LiveSocket(codec, WebSocketClient(url))
            live_socket.enable_live_delivery()
            live_socket.socket.close()
        before = rss_bytes(daemon.pid)
        sockets: list[LiveSocket] = []
        try:
            sockets += [LiveSocket(codec, WebSocketClient(url)) for codec in codecs]
            connected = rss_bytes(daemon.pid)
            for live_socket in sockets:
                live_socket.enable_live_delivery()
            live = rss_bytes(daemon.pid)
        finally:
            for live_socket in sockets:
                live_socket.socket.close()
    each = (live - before) / count / _KIB
    rows: dict[str, Figures] = {
        f"{count} connected": {"KiB each": (connected - before) / count / _KIB, "RSS MiB": connected / _KIB**2},
        f"{count} in live mode": {"KiB each": each, "RSS MiB": live / _KIB**2},
    }
    notes = (
        f"Without sockets the daemon has {before / _KIB**2:.1f} MiB with {count} accounts enrolled. Each socket "
        f"belongs to its own wallet, with a DID of {len(group.wallets[0].did)} characters.",
        "The kernel's memory for sockets is not counted. The goal is for 10000 (--sockets 10000).",
    )
    targets = (PerformanceTarget(f"KiB of a live socket, {count} held", _SOCKET_GOAL_KIB, each, most=True),)
    return ResultTable("Idle WebSockets", ("KiB each", "RSS MiB"), rows, targets, notes)


PUSH_WALLETS = 64
PUSH_CONCURRENCIES = (1, 8)
PUSH_COLUMNS = ("msg/s", "sent-202 p50", "sent-push p50", "sent-push p99", "202-push p50", "202-push p99")


def measure_push(plan: BenchmarkPlan) -> ResultTable:
    """Time from a forward being sent, and from its 202, until the push has been received."""
    rows: dict[str, Figures] = {}
    failures: list[str] = []
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        setup = WalletSetup(
            daemon.url, None, PUSH_WALLETS, plan.sizes[0], PUSH_WALLETS * 4, f"{place}/bodies", short=False
        )
        with start_wallet_process(setup) as wallets:
            wallets.do("live")
            seconds = plan.seconds * plan.rounds / len(PUSH_CONCURRENCIES)
            for at_once in PUSH_CONCURRENCIES:
                name = f"{format_size(plan.sizes[0])}  {at_once} at once"
                rows[name] = push_messages(wallets, at_once, seconds, failures)
    note = (
        f"Milliseconds; forwards to {PUSH_WALLETS} wallets in live mode. A negative value means that the push "
        "arrived before the sender's 202."
    )
    return ResultTable("Live push", PUSH_COLUMNS, rows, notes=(note,), failures=tuple(failures))


def push_messages(wallets: WalletProcess, at_once: int, seconds: float, failures: list[str]) -> Figures:
    """Post forwards, each after the one before was accepted and pushed, with some of them at once; latencies."""
    result = wallets.do("cycle", seconds=seconds, connections=at_once, acknowledge=False)
    failures += find_cycle_failures(result)
    return {
        "msg/s": safe_ratio(result["pushed"], result["seconds"]),
        **latency_figures(result["accepted_us"], "sent-202 {}", ("p50",)),
        **latency_figures(result["pushed_us"], "sent-push {}"),
        **latency_figures(result["after_us"], "202-push {}"),
    }


_STORM_COLUMNS = ("sockets/s", "sockets/CPU-s", "open p50", "open p99", "live p50", "live p99")
_MAX_STORM_ROUNDS = 5


def measure_connection_storm(plan: BenchmarkPlan) -> ResultTable:
    """Rate of sockets until all are in live mode, and how long the last ones wait."""
    count = min(plan.sockets, raise_file_limit() - _SPARE_FILES)
    failures: list[str] = []
    with (
        prepare_mediator(plan) as mediator,
        mediator.wallet_process(min(RECIPIENTS, count), plan.sizes[0], 1) as wallets,
    ):

        def run() -> Figures:
            before = mediator.cpu_seconds
            result = wallets.do("storm", sockets=count)
            spent = mediator.cpu_seconds - before
            if result["refused"]:
                failures.append(f"{result['refused']} of {count} sockets were refused")
            return {
                "sockets/s": safe_ratio(result["sockets"], result["seconds"]),
                "sockets/CPU-s": safe_ratio(result["sockets"], spent),
                **latency_figures(result["opened_us"], "open {}"),
                **latency_figures(result["live_us"], "live {}"),
            }

        name = f"{count} at once"
        rows = {name: run_interleaved({name: run}, min(plan.rounds, _MAX_STORM_ROUNDS)).medians(name)}
    notes = (f"Milliseconds since the first connect. Handshake, then live-delivery-change. {mediator.note}",)
    return ResultTable("Connection storm", _STORM_COLUMNS, rows, (), notes, tuple(failures))


# Of the rate of forwards in a closed loop.
_OFFLINE_SHARE, _ONLINE_SHARE = 0.25, 0.08
_FETCH_INTERVAL_SECONDS = 1.0
_MIXED_COLUMNS = (PER_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", "% of one core")


def measure_mixed(plan: BenchmarkPlan) -> ResultTable:
    """Forwards in an open loop to offline wallets, which fetch meanwhile, and to wallets in live mode."""
    size = plan.sizes[0]
    with (
        prepare_mediator(plan) as mediator,
        mediator.wallet_process(CYCLE_WALLETS, size, CYCLE_WALLETS * 4) as online,
        mediator.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as offline,
    ):
        online.do("live")
        drain = partial(offline.do, "drain", connections=2, limit=50)
        full = mediator.post(offline.bodies, plan.clients, plan.seconds)
        rate = full.figures()[PER_SECOND]
        left = full.accepted - drain()["messages"]
        seconds, before, start = plan.seconds * plan.rounds, mediator.cpu_seconds, perf_counter()
        parameters: dict[str, Any] = {"seconds": seconds, "connections": 4 * plan.clients, "even": plan.even}
        with ThreadPoolExecutor(2) as pool:
            posting = pool.submit(
                post_at_rate, mediator.server, offline.bodies, rate=_OFFLINE_SHARE * rate, **parameters
            )
            pushing = pool.submit(online.do, "cycle", rate=_ONLINE_SHARE * rate, seed=1, **parameters)
            fetched = []
            while wait([posting], _FETCH_INTERVAL_SECONDS).not_done:
                fetched.append(drain())
            load, cycles = posting.result(), pushing.result()
        busy = safe_ratio(mediator.cpu_seconds - before, perf_counter() - start)
        fetched.append(drain())
    messages = sum(result["messages"] for result in fetched)
    failures = find_cycle_failures(cycles)
    if left or messages != load.accepted:
        failures.append(f"{load.accepted} forwards were accepted, {messages} messages were fetched")
    pushes = compute_cycle_figures(cycles, 0.0)
    latencies = [latency for result in fetched for latency in result["latencies_us"]]
    percentiles = ("p50", "p99", "p99.9")
    rows: dict[str, Figures] = {
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
    notes = (
        f"{format_size(size)}. {_OFFLINE_SHARE:.0%} and {_ONLINE_SHARE:.0%} of {rate:,.0f} forwards per second, "
        f"the rate of a closed loop, to {RECIPIENTS} and {CYCLE_WALLETS} wallets; {messages} messages were fetched. "
        f"{mediator.note}",
    )
    return ResultTable("Mixed load", _MIXED_COLUMNS, rows, (), notes, tuple(failures))
