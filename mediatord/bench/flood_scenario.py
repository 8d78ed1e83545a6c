"""Scenario of floods of several kinds on a mediator, and the latency of honest wallets beside them."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import cycle
from time import sleep

from mediatord.bench.load_generator import LoadRunner, pace
from mediatord.bench.measured_mediator import CycleLoad, open_mediator
from mediatord.bench.plan import BenchmarkPlan
from mediatord.bench.processes import ForkedCall, assign_cores, raise_file_limit
from mediatord.bench.raw_clients import (
    KERNEL_BYTES,
    WebSocketClient,
    encode_frame,
    encode_request,
    loopback_address,
    open_socket,
)
from mediatord.bench.results import Figures, ResultTable, safe_ratio, scenario
from mediatord.bench.wallet_group import WalletGroup, build_inner_envelope, enrol_group
from mediatord.protocol import encoding
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import authcrypt, build_forward

# Far from the addresses of the honest wallets.
_FIRST_ADDRESS = 200_000
_MANY_ADDRESSES, _FEW_ADDRESSES = 300, 16
_SLOW_CONNECTIONS, _UNREAD_SOCKETS = 4096, 512
_MAILBOXES = 4
_PARTIAL_REQUEST = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n{"


class FloodGenerator:
    """
    Floods a mediator in several ways.

    `address` posts forwards from one address, `did` forwards of one DID from many addresses, `fresh` forwards of a
    different DID each from a few; `loris` sends requests byte by byte, `deaf` sends requests on sockets and does not
    read.

    :param fresh: DIDs that send one forward each.
    :param of_one: forwards of one DID.
    :param size: of the innermost plaintext, in bytes.
    """

    def __init__(self, url: str, fresh: int, of_one: int, size: int) -> None:
        group = enrol_group(url, _MAILBOXES, short=True)
        self._url = group.mediator.http_uri
        self._socket_url = group.mediator.ws_uri or ""
        self._of_one = self._encode_requests(group, [WalletIdentity.generate()] * of_one, size)
        self._of_many = self._encode_requests(group, (WalletIdentity.generate() for _ in range(fresh)), size)

    def run(self, do: str, seconds: float, rate: float) -> dict[str, int]:
        """Run one flood; what was sent and what came back."""
        if do == "loris":
            return self._send_slowly(seconds, rate)
        if do == "deaf":
            return self._send_without_reading(seconds, rate)
        addresses = {"address": 1, "did": _MANY_ADDRESSES, "fresh": _FEW_ADDRESSES}[do]
        sources = [_flood_address(number % addresses) for number in range(max(addresses, 4 * _FEW_ADDRESSES))]
        requests = self._of_many if do == "fresh" else self._of_one
        with closing(
            LoadRunner(self._url, requests, seconds=seconds, rate=rate, even=True, sources=sources)
        ) as runner:
            statuses = runner.run().statuses
        return {"sent": statuses.total(), **statuses}

    def _encode_requests(self, group: WalletGroup, senders: Iterable[WalletIdentity], size: int) -> Iterator[bytes]:
        """Forwards over and over, each of the next sender to the next mailbox."""
        hop, requests = group.hop, []
        inner = cycle([(wallet.did, build_inner_envelope(wallet.identity, size)) for wallet in group.wallets])
        for sender in senders:
            recipient, envelope = next(inner)
            message = build_forward(recipient, [envelope], to=[hop.did]) | {"from": sender.did}
            requests.append(encode_request(self._url, authcrypt(message, sender, hop.document)))
        return cycle(requests)

    def _send_slowly(self, seconds: float, rate: float) -> dict[str, int]:
        """Begin thousands of requests, then continue each by one byte at a time."""
        connections: deque[socket.socket] = deque()
        cut_off = 0
        for _ in pace(rate, seconds):
            if len(connections) < _SLOW_CONNECTIONS:
                connection = open_socket(self._url, _flood_address(len(connections) % _FEW_ADDRESSES))
                connection.setblocking(False)
                with suppress(OSError):
                    connection.send(_PARTIAL_REQUEST)
                connections.append(connection)
                continue
            connection = connections.popleft()
            try:
                connection.send(b" ")
                connections.append(connection)
            except OSError:
                cut_off += 1
                connection.close()
        for connection in connections:
            connection.close()
        return {"sent": int(seconds * rate), "kept": len(connections), "cut_off": cut_off}

    def _send_without_reading(self, seconds: float, rate: float) -> dict[str, int]:
        """Send requests on sockets that were opened before, and read no response."""
        request = encode_frame(encoding.dumps({"id": "1", "type": "nothing"}))
        sent = stuck = 0
        with ExitStack() as stack:
            sockets = deque[socket.socket]()
            for number in range(_UNREAD_SOCKETS):
                client = WebSocketClient(self._socket_url, KERNEL_BYTES, _flood_address(number % _FEW_ADDRESSES))
                sockets.append(stack.enter_context(client.socket))
                client.socket.setblocking(False)
            for _ in pace(rate, seconds):
                sockets.rotate()
                try:
                    sent += bool(sockets[0].send(request))
                except OSError:  # full, or closed
                    stuck += 1
        return {"sent": sent, "stuck": stuck}


def _flood_address(number: int) -> str:
    return loopback_address(_FIRST_ADDRESS + number)


# Of the latency of honest wallets at the 99th percentile.
_FLOOD_GOAL = 2.0
_HONEST_WALLETS, _HONEST_RATE = 64, 60.0
_FLOOD_FACTOR = 10
_FRESH_DIDS = 10_000
# More than are remembered to detect replays, so that none counts as one.
_OF_ONE_DID = 12_000
# A run takes longer than elsewhere: a few messages have no 99th percentile.
_DURATION_FACTOR = 8
# Until the initial burst of the rate limits is used up.
_FLOOD_LEAD_SECONDS = 2.0
# The defaults.
_FLOOD_SETTINGS = {
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "60",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "120",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "600",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "64",
}
_NO_FLOOD = "no flood"
_FLOODS = {
    _NO_FLOOD: "",
    "one address": "address",
    "one DID, 300 addresses": "did",
    "10 000 fresh DIDs, 16 addresses": "fresh",
    "slow-loris, 16 addresses": "loris",
    "sockets not read, 16 addresses": "deaf",
}
_RATIOS = {"202 p99": "x 202 p99", "push p99": "x push p99"}


@scenario(
    "Latency during a flood",
    ("202 p50", "202 p99", "push p50", "push p99", *_RATIOS.values(), "flood/s", "accepted/s", "CPU %"),
)
def measure_abuse(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Latency of honest wallets with and without a flood beside them."""
    raise_file_limit()
    size, seconds = plan.sizes[0], plan.seconds * _DURATION_FACTOR
    with open_mediator(plan, assign_cores(), _FLOOD_SETTINGS) as mediator:
        online = CycleLoad(mediator, table.failures, _HONEST_WALLETS, size, apart=True)
        floods = FloodGenerator(mediator.url, _FRESH_DIDS, _OF_ONE_DID, size)

        def run(do: str) -> Figures:
            flood_seconds = seconds + _FLOOD_LEAD_SECONDS
            rate = _FLOOD_FACTOR * _HONEST_RATE
            call = ForkedCall(lambda: (os.nice(10), floods.run(do, flood_seconds, rate))[1]) if do else None
            sleep(_FLOOD_LEAD_SECONDS)
            result = online.run(_HONEST_WALLETS, seconds, _HONEST_RATE)
            flood = call.result() if call else {"sent": 0}
            return result.figures() | {
                "flood/s": safe_ratio(flood["sent"], flood_seconds),
                "accepted/s": safe_ratio(flood.get("202", 0), flood_seconds),
                "CPU %": 100 * safe_ratio(result.cpu_seconds, result.seconds),
            }

        run("")
        contenders = {name: partial(run, do) for name, do in _FLOODS.items()}
        table.compare(contenders, plan.rounds, "", {name: (_NO_FLOOD, figure) for figure, name in _RATIOS.items()})
        online.check_queues()
    for name in list(_FLOODS)[1:]:
        for ratio in _RATIOS.values():
            table.add_target(f"{name}, {ratio}", _FLOOD_GOAL, table.rows[name][ratio], most=True)
    table.notes = [
        f"{_HONEST_WALLETS} wallets in live mode, each at its own address, receive {_HONEST_RATE:.0f} messages per "
        "second in total.",
        f"A flood has {_FLOOD_FACTOR} times that rate and starts {_FLOOD_LEAD_SECONDS:.0f} s earlier; limits are the "
        "defaults.",
        f"Milliseconds since a forward was due, and relative to runs without a flood. {mediator.note}",
    ]
