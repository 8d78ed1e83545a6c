"""
Messages to wallets that are online: forwarded, stored, pushed, acknowledged, and gone from the store.

Messages that waited, fetched and acknowledged by wallets that come back.

What an idle WebSocket costs the daemon in memory.

How long a message takes to a recipient that is online.

All wallets come at the same moment.

Everything at once, as on an ordinary day: most recipients are away, some are online, some come back and fetch.
"""

from __future__ import annotations

import select
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from itertools import cycle
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from mediatord.bench.didcomm_wallets import (
    FastMessageCodec,
    WalletGroup,
    build_forwards,
    enrol_group,
    fetch_mediator,
    pack_request,
    unpack_answer,
)
from mediatord.bench.load_generator import (
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    LoadResult,
    WebSocketClient,
    encode_request,
    is_complete_response,
    post_at_rate,
    post_count,
    post_for_seconds,
)
from mediatord.bench.mediator_under_test import MediatorUnderTest, WalletProcess, prepare_mediator
from mediatord.bench.processes import raise_file_limit, rss_bytes
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    RECIPIENTS,
    BenchmarkPlan,
    Figures,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
    safe_ratio,
)
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.temporary_daemon import run_temporary_daemon

CYCLE_OF_FORWARD_GOAL = 0.35
CYCLE_PUSH_P99_MS = 25.0

CYCLE_WALLETS = 64
CYCLE_LOAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The load at which latencies are promised.
CYCLE_PROMISED_SHARE = 0.7

_CYCLE, _FORWARD = "cycle", "forward only"
_OF_FORWARD = "of forward"
_CYCLE_COLUMNS = (
    PER_SECOND, PER_CPU_SECOND, _OF_FORWARD, "202 p50", "push p50", "push p99", "push p99.9", "late %", CLIENT_US
)  # fmt: skip
_WARM_UP_SHARE = 0.25


def measure_cycle(plan: BenchmarkPlan) -> ResultTable:
    """As many cycles as come through, beside forwards to wallets that are offline; then at fixed times."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    failures: list[str] = []
    with prepare_mediator(plan) as one, one.wallet_process(CYCLE_WALLETS, size, CYCLE_WALLETS * 4) as online:
        online.do("live")
        with one.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as offline:
            ours = _CycleContender(plan, one, online, failures)
            ours.run(plan.seconds * _WARM_UP_SHARE)
            rounds = run_interleaved(
                {
                    _CYCLE: lambda: ours.run(plan.seconds),
                    _FORWARD: lambda: post_for_seconds(
                        one.server, offline.bodies, plan.clients, plan.seconds
                    ).figures(),
                },
                plan.rounds,
            )
        name = format_size(size)
        for contender in rounds.found:
            compared = {_OF_FORWARD: rounds.ratio(contender, _FORWARD, PER_CPU_SECOND if one.pid else PER_SECOND)}
            rows[f"{name}  {contender}"] = rounds.medians(contender) | compared
        most = rows[f"{name}  {_CYCLE}"][PER_SECOND]
        for share in CYCLE_LOAD_SHARES:
            rows[f"{name}  at {share:.0%}"] = ours.run(plan.seconds * plan.rounds / 2, share * most)
        left = online.do("waiting")["messages"]
    if left:
        failures.append(f"{left} messages were acknowledged and are still there")
    targets = (
        PerformanceTarget(
            f"cycles {name}, of forwards", CYCLE_OF_FORWARD_GOAL, rows[f"{name}  {_CYCLE}"][_OF_FORWARD]
        ),
        PerformanceTarget(
            f"push p99 {name} at {CYCLE_PROMISED_SHARE:.0%}, ms",
            CYCLE_PUSH_P99_MS,
            rows[f"{name}  at {CYCLE_PROMISED_SHARE:.0%}"]["push p99"],
            True,
        ),
    )
    notes = (
        f"Forward, push to one of {CYCLE_WALLETS} wallets in live mode, messages-received without an answer. "
        f"At most {plan.clients} are on their way at a time; at fixed times as many as there are.",
        f"Milliseconds since a forward was sent, or was to be sent. {one.note}",
        f"{ours.pushed} messages were pushed exactly once and acknowledged.",
    )
    return ResultTable("Messages to wallets that are online", _CYCLE_COLUMNS, rows, targets, notes, tuple(failures))


class _CycleContender:
    """
    Turns of the same wallets.

    :ivar pushed: how many messages came out, in all turns.
    """

    def __init__(
        self, plan: BenchmarkPlan, one: MediatorUnderTest, online: WalletProcess, failures: list[str]
    ) -> None:
        self._plan = plan
        self._subject = one
        self._online = online
        self._failures = failures
        self._turns = 0
        self.pushed = 0

    def run(self, seconds: float, rate: float = 0.0) -> Figures:
        """One turn, and what is wrong with it."""
        self._turns += 1
        before = self._subject.cpu_seconds
        turn = {"rate": rate, "even": self._plan.even, "seed": self._turns}
        connections = self._plan.clients * (2 if rate else 1)
        found = self._online.do("cycle", seconds=seconds, connections=connections, **turn)
        spent = self._subject.cpu_seconds - before
        self.pushed += found["pushed"]
        self._failures += cycle_failures(found)
        return compute_cycle_figures(found, spent)


def cycle_failures(found: dict[str, Any]) -> list[str]:
    """Sentences about a turn, none if all is well."""
    wrong = []
    if refused := {status: count for status, count in found["statuses"].items() if not status.startswith("2")}:
        wrong.append(f"other answers than 202: {refused}")
    if found["missing"] and not refused:
        wrong.append(f"{found['missing']} messages were not pushed")
    if found["repeated"]:
        wrong.append(f"{found['repeated']} messages were pushed twice")
    return wrong


def compute_cycle_figures(found: dict[str, Any], spent: float) -> Figures:
    """
    Rates, and latencies in milliseconds.

    :param spent: seconds of CPU of the mediator; 0 if that is unknown.
    """
    pushed, accepted = sorted(found["pushed_us"]), sorted(found["accepted_us"])
    return {
        PER_SECOND: safe_ratio(found["pushed"], found["seconds"]),
        PER_CPU_SECOND: safe_ratio(found["pushed"], spent),
        "202 p50": compute_percentile(accepted, 0.5) / 1000,
        "push p50": compute_percentile(pushed, 0.5) / 1000,
        "push p99": compute_percentile(pushed, 0.99) / 1000,
        "push p99.9": compute_percentile(pushed, 0.999) / 1000,
        "late %": 100 * safe_ratio(found["late"], len(accepted)),
        CLIENT_US: 1e6 * safe_ratio(found["cpu_seconds"], found["pushed"]),
    }


_LIMITS = (10, 100)
_MESSAGES_PER_SECOND = 2000
_CONNECTIONS = 8
_DRAIN_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "requests", "p50 ms", "p99 ms", CLIENT_US)


def measure_drain(plan: BenchmarkPlan) -> ResultTable:
    """Queues are filled, which is not counted, and emptied."""
    size = plan.sizes[0]
    name = format_size(size)
    failures: list[str] = []
    with prepare_mediator(plan) as one, one.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as wallet_process:
        queues = _DrainContender(plan, one, wallet_process, failures)
        rounds = run_interleaved(
            {f"{name}  {limit} a delivery": partial(queues.run, limit) for limit in _LIMITS}, plan.rounds
        )
    rows = {contender: rounds.medians(contender) for contender in rounds.found}
    notes = (
        f"delivery-request and messages-received over HTTP, {_CONNECTIONS} connections, {RECIPIENTS} wallets with "
        f"{queues.count // RECIPIENTS} messages each; latencies are those of a request. {one.note}",
    )
    return ResultTable("Messages fetched", _DRAIN_COLUMNS, rows, (), notes, tuple(failures))


class _DrainContender:
    """
    Fills queues and has them emptied.

    :ivar count: messages in all queues together.
    """

    def __init__(
        self, plan: BenchmarkPlan, one: MediatorUnderTest, wallet_process: WalletProcess, failures: list[str]
    ) -> None:
        self._plan = plan
        self._subject = one
        self._wallet_process = wallet_process
        self._failures = failures
        self.count = max(RECIPIENTS, int(_MESSAGES_PER_SECOND * plan.seconds) // RECIPIENTS * RECIPIENTS)

    def run(self, limit: int) -> Figures:
        """One filling and emptying."""
        load = post_count(self._subject.server, self._wallet_process.bodies, self._plan.clients, self.count)
        before = self._subject.cpu_seconds
        found = self._wallet_process.do("drain", connections=_CONNECTIONS, limit=limit)
        spent = self._subject.cpu_seconds - before
        if found["messages"] != load.accepted:
            self._failures.append(
                f"{load.accepted} forwards were accepted, {found['messages']} messages were fetched"
            )
        latencies = sorted(found["latencies_us"])
        return {
            PER_SECOND: safe_ratio(found["messages"], found["seconds"]),
            PER_CPU_SECOND: safe_ratio(found["messages"], spent),
            "requests": found["requests"],
            "p50 ms": compute_percentile(latencies, 0.5) / 1000,
            "p99 ms": compute_percentile(latencies, 0.99) / 1000,
            CLIENT_US: 1e6 * safe_ratio(found["cpu_seconds"], found["messages"]),
        }


# Resident memory of the daemon for an idle socket of an account in live mode.
LIVE_KIB_GOAL = 12.0

_COORDINATION = "https://didcomm.org/coordinate-mediation/3.0"
_LIVE_DELIVERY_CHANGE = "https://didcomm.org/messagepickup/3.0/live-delivery-change"
_PICKUP_STATUS = "https://didcomm.org/messagepickup/3.0/status"
_SOCKET_TIMEOUT_SECONDS = 30
_WARM_UP = 50
_SOCKET_SPARE_FILES = 100
_KIB = 1 << 10


def enable_live_delivery(socket: WebSocketClient, wallet: WalletIdentity, group: WalletGroup) -> None:
    """
    Switch live delivery on.

    :raise RuntimeError: the daemon did not confirm it.
    """
    socket.send(pack_request(wallet, group.mediator, _LIVE_DELIVERY_CHANGE, {"live_delivery": True}))
    answer = unpack_answer(socket.receive(), wallet)
    if answer.type.uri != _PICKUP_STATUS or not (answer.body or {}).get("live_delivery"):
        raise RuntimeError("live delivery was not switched on")


def open_websocket(group: WalletGroup) -> WebSocketClient:
    """A socket to the daemon, bound to nobody yet."""
    assert group.mediator.ws_uri is not None
    return WebSocketClient(group.mediator.ws_uri)


def measure_sockets(plan: BenchmarkPlan) -> ResultTable:
    """RSS per socket, first merely connected, then in live mode, each for a wallet and an account of its own."""
    count = min(plan.sockets, raise_file_limit() - _SOCKET_SPARE_FILES)
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        mediator = fetch_mediator(daemon.url)
        codecs = enrol_codecs(mediator, count)
        _warm_up_daemon(codecs)
        before = rss_bytes(daemon.pid)
        sockets: list[WebSocketClient] = []
        try:
            sockets += [WebSocketClient(mediator.ws_uri or "") for _ in codecs]
            connected = rss_bytes(daemon.pid)
            for socket, codec in zip(sockets, codecs, strict=True):
                enable_live_delivery_fast(socket, codec)
            live = rss_bytes(daemon.pid)
        finally:
            for socket in sockets:
                socket.close()
    each = (live - before) / count / _KIB
    rows: dict[str, Figures] = {
        f"{count} connected": {"KiB each": (connected - before) / count / _KIB, "RSS MiB": connected / _KIB**2},
        f"{count} in live mode": {"KiB each": each, "RSS MiB": live / _KIB**2},
    }
    notes = (
        f"The daemon alone, {count} accounts enrolled, has {before / _KIB**2:.1f} MiB. Each socket is for a wallet "
        f"of its own, with a DID of {len(codecs[0].wallet.did)} characters.",
        "Memory of the kernel for sockets is not counted. The goal is for 10000 (--sockets 10000).",
    )
    targets = (PerformanceTarget(f"KiB of a live socket, {count} held", LIVE_KIB_GOAL, each, most=True),)
    return ResultTable("Idle WebSockets", ("KiB each", "RSS MiB"), rows, targets, notes)


def enrol_codecs(mediator: DIDCommMediator, count: int) -> list[FastMessageCodec]:
    """
    Fresh wallets with accounts, made as quickly as can be.

    :raise RuntimeError: the daemon did not do as asked.
    """
    target = urlsplit(mediator.http_uri)
    codecs = [FastMessageCodec(WalletIdentity.fresh(endpoint=mediator.did), mediator) for _ in range(count)]
    with closing(HTTPConnection(target.hostname or "", target.port, timeout=_SOCKET_TIMEOUT_SECONDS)) as connection:
        for codec in codecs:
            updates = [{"recipient_did": codec.wallet.did, "action": "add"}]
            for name, body in (("mediate-request", {}), ("recipient-update", {"updates": updates})):
                packed = codec.request(f"{_COORDINATION}/{name}", body)
                connection.request("POST", target.path, packed, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    raise RuntimeError(f"the daemon answered {response.status} to {name}")
    return codecs


def enable_live_delivery_fast(socket: WebSocketClient, codec: FastMessageCodec) -> None:
    """
    Switch live delivery on.

    :raise RuntimeError: the daemon did not confirm it.
    """
    socket.send(codec.request(_LIVE_DELIVERY_CHANGE, {"live_delivery": True}))
    answer = codec.open(socket.receive())
    if answer["type"] != _PICKUP_STATUS or not answer["body"].get("live_delivery"):
        raise RuntimeError("live delivery was not switched on")


def _warm_up_daemon(codecs: list[FastMessageCodec]) -> None:
    """Code is loaded and allocators are primed by the first few."""
    for codec in codecs[:_WARM_UP]:
        socket = WebSocketClient(codec.mediator.ws_uri or "")
        enable_live_delivery_fast(socket, codec)
        socket.close()


_RECIPIENTS = 64
_AT_ONCE = (1, 8)
_PUSH_TIMEOUT_SECONDS = 30.0
_SILENCE_SECONDS = 0.2
_MESSAGES_PER_RECIPIENT = 4


def measure_push(plan: BenchmarkPlan) -> ResultTable:
    """From the forward leaving its sender, and from its being accepted, to the push being received."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    pushed = 0
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        group = enrol_group(daemon.url, _RECIPIENTS)
        target = urlsplit(group.mediator.http_uri)
        port, path = target.port or 80, target.path
        bodies = build_forwards(group, size, _RECIPIENTS * _MESSAGES_PER_RECIPIENT)
        requests = [encode_request(port, path, body) for body in bodies]
        sockets = [open_websocket(group) for _ in group.wallets]
        try:
            for one, wallet in zip(sockets, group.wallets, strict=True):
                enable_live_delivery(one, wallet, group)
            for at_once in _AT_ONCE:
                senders = make_push_senders(port, requests, sockets, at_once)
                exchange = PushExchange(senders, plan.seconds * plan.rounds / len(_AT_ONCE))
                exchange.run()
                rows[f"{format_size(size)}  {at_once} at once"] = exchange.figures()
                pushed += exchange.count
            require_no_push(sockets)
        finally:
            for one in sockets:
                one.close()
    columns = ("msg/s", "sent-202 p50", "sent-push p50", "sent-push p99", "202-push p50", "202-push p99")
    note = (
        f"Milliseconds. {pushed} forwards to {_RECIPIENTS} wallets in live mode, each pushed exactly once; "
        "below zero the push was there before the sender had its 202."
    )
    return ResultTable("Live push", columns, rows, notes=(note,))


def require_no_push(sockets: list[WebSocketClient]) -> None:
    """Every push has been taken; another one would be a second copy."""
    readable, _, _ = select.select(sockets, [], [], _SILENCE_SECONDS)
    if any(one.take() for one in readable):
        raise RuntimeError("a message was pushed twice")


@dataclass(slots=True)
class PushSender:
    """
    One sender with recipients of its own, so that the next push on a recipient's socket is the answer to its forward.

    :param turns: pairs of request and the socket that its message comes out of, for ever.
    """

    connection: socket.socket
    turns: cycle[tuple[bytes, WebSocketClient]]
    waiting_for: WebSocketClient | None = None
    sent: float = 0.0
    accepted: float = 0.0
    pushed: float = 0.0
    partial: bytes = field(default=b"", repr=False)


def make_push_senders(
    port: int, requests: list[bytes], sockets: list[WebSocketClient], at_once: int
) -> list[PushSender]:
    """
    So many senders, who share the recipients out among themselves.

    :param requests: forwards to the wallets behind `sockets` in turn.
    """
    turns = [(request, sockets[number % len(sockets)]) for number, request in enumerate(requests)]
    senders = []
    for number in range(at_once):
        connection = socket.create_connection(("127.0.0.1", port), timeout=_PUSH_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = [turn for place, turn in enumerate(turns) if place % len(sockets) % at_once == number]
        senders.append(PushSender(connection, cycle(mine)))
    return senders


class PushExchange:
    """Sends on every lane as soon as the forward before was both accepted and pushed."""

    def __init__(self, senders: list[PushSender], seconds: float) -> None:
        self._senders = senders
        self._seconds = seconds
        self._by_number: dict[int, PushSender] = {}
        self._took = 0.0
        self._times: list[tuple[float, float]] = []

    @property
    def count(self) -> int:
        """How many messages came out."""
        return len(self._times)

    def run(self) -> None:
        """Until the time is up and every message has come."""
        start = perf_counter()
        with select.epoll() as epoll:
            for sender in self._senders:
                epoll.register(sender.connection.fileno(), select.EPOLLIN)
                self._by_number[sender.connection.fileno()] = sender
                self._send(sender, epoll)
            while any(sender.waiting_for for sender in self._senders):
                events = epoll.poll(_PUSH_TIMEOUT_SECONDS)
                if not events:
                    raise TimeoutError("a message was not pushed")
                now = perf_counter()
                for number, _ in events:
                    self._take(self._by_number[number], number, now)
                for sender in self._senders:
                    if sender.waiting_for and sender.accepted and sender.pushed:
                        self._finish(sender, epoll, more=now - start < self._seconds)
        self._took = perf_counter() - start
        for sender in self._senders:
            sender.connection.close()

    def figures(self) -> Figures:
        """Latencies in milliseconds."""
        accepted = [accepted * 1000 for accepted, _ in self._times]
        pushed = [pushed * 1000 for _, pushed in self._times]
        after = [pushed - accepted for accepted, pushed in zip(accepted, pushed, strict=True)]
        return {
            "msg/s": len(self._times) / self._took,
            "sent-202 p50": compute_percentile(accepted, 0.5),
            "sent-push p50": compute_percentile(pushed, 0.5),
            "sent-push p99": compute_percentile(pushed, 0.99),
            "202-push p50": compute_percentile(after, 0.5),
            "202-push p99": compute_percentile(after, 0.99),
        }

    def _send(self, sender: PushSender, epoll: select.epoll) -> None:
        request, recipient = next(sender.turns)
        sender.waiting_for, sender.accepted, sender.pushed, sender.partial = recipient, 0.0, 0.0, b""
        self._by_number[recipient.fileno()] = sender
        epoll.register(recipient.fileno(), select.EPOLLIN)
        sender.sent = perf_counter()
        sender.connection.sendall(request)

    def _take(self, sender: PushSender, number: int, now: float) -> None:
        if number == sender.connection.fileno():
            sender.partial += sender.connection.recv(65536)
            if is_complete_response(sender.partial):
                if not sender.partial.startswith(b"HTTP/1.1 202"):
                    raise RuntimeError("a forward was refused")
                sender.accepted = now
        elif sender.waiting_for is not None and (messages := sender.waiting_for.take()):
            if sender.pushed or len(messages) > 1:
                raise RuntimeError("a message was pushed twice")
            sender.pushed = now

    def _finish(self, sender: PushSender, epoll: select.epoll, *, more: bool) -> None:
        self._times.append((sender.accepted - sender.sent, sender.pushed - sender.sent))
        assert sender.waiting_for is not None
        epoll.unregister(sender.waiting_for.fileno())
        sender.waiting_for = None
        if more:
            self._send(sender, epoll)


_RATE, _CPU_RATE = "sockets/s", "sockets/CPU-s"
_STORM_COLUMNS = (_RATE, _CPU_RATE, "open p50", "open p99", "live p50", "live p99")
_STORM_SPARE_FILES = 200
_MOST_ROUNDS = 5


def measure_connection_storm(plan: BenchmarkPlan) -> ResultTable:
    """Sockets per second until everybody is in live mode, and how long the last ones wait."""
    count = min(plan.sockets, raise_file_limit() - _STORM_SPARE_FILES)
    failures: list[str] = []
    with (
        prepare_mediator(plan) as one,
        one.wallet_process(min(RECIPIENTS, count), plan.sizes[0], 1) as wallet_process,
    ):

        def run() -> Figures:
            before = one.cpu_seconds
            found = wallet_process.do("storm", sockets=count)
            spent = one.cpu_seconds - before
            if found["refused"]:
                failures.append(f"{found['refused']} of {count} sockets were refused")
            opened, live = sorted(found["opened_us"]), sorted(found["live_us"])
            return {
                _RATE: safe_ratio(found["sockets"], found["seconds"]),
                _CPU_RATE: safe_ratio(found["sockets"], spent),
                "open p50": compute_percentile(opened, 0.5) / 1000,
                "open p99": compute_percentile(opened, 0.99) / 1000,
                "live p50": compute_percentile(live, 0.5) / 1000,
                "live p99": compute_percentile(live, 0.99) / 1000,
            }

        name = f"{count} at once"
        rows = {name: run_interleaved({name: run}, min(plan.rounds, _MOST_ROUNDS)).medians(name)}
    notes = (f"Milliseconds since the first began to connect. Handshake, then live-delivery-change. {one.note}",)
    return ResultTable("Everybody connects", _STORM_COLUMNS, rows, (), notes, tuple(failures))


# Of the forwards that come through when there is nothing else to do.
_OFFLINE_SHARE, _ONLINE_SHARE = 0.25, 0.08
_LIMIT = 50
_BETWEEN_FETCHES_SECONDS = 1.0
_MIXED_COLUMNS = (PER_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", "% of one core")


def measure_mixed(plan: BenchmarkPlan) -> ResultTable:
    """Forwards at fixed times to wallets that are away and to wallets in live mode, while the former fetch."""
    size = plan.sizes[0]
    with (
        prepare_mediator(plan) as one,
        one.wallet_process(CYCLE_WALLETS, size, CYCLE_WALLETS * 4) as online,
        one.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as away,
    ):
        online.do("live")
        full = post_for_seconds(one.server, away.bodies, plan.clients, plan.seconds)
        rate = full.figures()[PER_SECOND]
        waiting = full.accepted - _drain_queues(away)["messages"]
        seconds, before, start = plan.seconds * plan.rounds, one.cpu_seconds, perf_counter()
        connections = 4 * plan.clients
        with ThreadPoolExecutor(2) as pool:
            day = pool.submit(
                post_at_rate, one.server, away.bodies, connections, seconds, _OFFLINE_SHARE * rate, even=plan.even
            )
            night = pool.submit(
                online.do,
                "cycle",
                seconds=seconds,
                connections=connections,
                rate=_ONLINE_SHARE * rate,
                even=plan.even,
                seed=1,
            )
            fetched = _drain_while_posting(away, day)
            load, cycled = day.result(), night.result()
        busy = safe_ratio(one.cpu_seconds - before, perf_counter() - start)
        fetched.append(_drain_queues(away))
    taken = sum(found["messages"] for found in fetched)
    failures = cycle_failures(cycled)
    if waiting or taken != load.accepted:
        failures.append(f"{load.accepted} forwards were accepted, {taken} messages were fetched")
    rows: dict[str, Figures] = {
        "forwards, recipient away": load.figures() | {"late %": 100 * safe_ratio(load.late, len(load.latencies_us))},
        "pushes, recipient online": _push_figures(cycled),
        "requests of those who fetch": _request_figures(fetched, load),
        "all": {"% of one core": 100 * busy} if one.pid else {},
    }
    notes = (
        f"{format_size(size)}. {_OFFLINE_SHARE:.0%} and {_ONLINE_SHARE:.0%} of the {rate:,.0f} forwards a second that come through "
        f"otherwise, at fixed times, to {RECIPIENTS} and {CYCLE_WALLETS} wallets; {taken} messages were fetched. "
        f"{one.note}",
    )
    return ResultTable("A mixed day", _MIXED_COLUMNS, rows, (), notes, tuple(failures))


def _drain_queues(wallet_process: WalletProcess) -> dict[str, Any]:
    return wallet_process.do("drain", connections=2, limit=_LIMIT)


def _drain_while_posting(away: WalletProcess, day: Future[LoadResult]) -> list[dict[str, Any]]:
    fetched = []
    while wait([day], _BETWEEN_FETCHES_SECONDS).not_done:
        fetched.append(_drain_queues(away))
    return fetched


def _push_figures(cycled: dict[str, Any]) -> Figures:
    found = compute_cycle_figures(cycled, 0.0)
    latencies = {f"{share} ms": found[f"push {share}"] for share in ("p50", "p99", "p99.9")}
    return {PER_SECOND: found[PER_SECOND], "late %": found["late %"], **latencies}


def _request_figures(fetched: list[dict[str, Any]], load: LoadResult) -> Figures:
    latencies = sorted(latency for found in fetched for latency in found["latencies_us"])
    shares = {"p50 ms": 0.5, "p99 ms": 0.99, "p99.9 ms": 0.999}
    return {
        PER_SECOND: safe_ratio(len(latencies), load.seconds),
        **{name: compute_percentile(latencies, share) / 1000 for name, share in shares.items()},
    }
