"""How long a push takes to a wallet whose socket is at another node than the one that took the forward."""

from __future__ import annotations

from contextlib import ExitStack
from urllib.parse import urlsplit

from mediatord.bench.cluster import cluster_of
from mediatord.bench.crowd import Crowd, forwards, gather
from mediatord.bench.figures import Contender, Figures, Table, Target, percentile, size_name, take_turns
from mediatord.bench.load import request_for
from mediatord.bench.plan import Plan
from mediatord.bench.push import Exchange, expect_silence, lanes_to
from mediatord.bench.rawsocket import RawSocket
from mediatord.bench.sockets import go_live
from mediatord.wallet.throwaway import Daemon

_RECIPIENTS = 32
_AT_ONCE = (1, 8)
_MESSAGES_PER_RECIPIENT = 4
_HERE, _THERE = "at the same node", "at another node"
_PUSH_P99 = "sent-push p99"


class _Audience:
    """Wallets in live mode at one node."""

    def __init__(self, crowd: Crowd, at: Daemon, size: int) -> None:
        target = urlsplit(crowd.mediator.http_uri)
        address = urlsplit(at.url).netloc
        self._port = target.port or 80
        self.sockets = [RawSocket(f"ws://{address}{target.path}") for _ in crowd.wallets]
        for one, wallet in zip(self.sockets, crowd.wallets, strict=True):
            go_live(one, wallet, crowd)
        bodies = forwards(crowd, size, _RECIPIENTS * _MESSAGES_PER_RECIPIENT)
        self._requests = [request_for(self._port, target.path, body) for body in bodies]

    def exchange(self, at_once: int, seconds: float) -> Figures:
        """Post to the first node, and wait for every push."""
        exchange = Exchange(lanes_to(self._port, self._requests, self.sockets, at_once), seconds)
        exchange.run()
        return exchange.figures()


def measure_elsewhere(plan: Plan) -> Table:
    """Both ways in turn, in one cluster of two nodes."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    targets: list[Target] = []
    with ExitStack() as stack:
        daemons, database = stack.enter_context(cluster_of(2, plan.mongodb))
        first, second = daemons
        audiences = {
            name: _Audience(gather(first.url, _RECIPIENTS), at, size)
            for name, at in ((_HERE, first), (_THERE, second))
        }
        for audience in audiences.values():
            for one in audience.sockets:
                stack.callback(one.close)
        round_trip = percentile(database.round_trips(), 0.99)
        for at_once in _AT_ONCE:
            contenders = {name: _contender(audience, at_once, plan.seconds) for name, audience in audiences.items()}
            rounds = take_turns(contenders, plan.rounds)
            for name in contenders:
                rows[f"{size_name(size)}  {name}, {at_once} at once"] = rounds.medians(name)
            allowed = 2 * rounds.medians(_HERE)[_PUSH_P99] + round_trip
            measured = allowed / rounds.medians(_THERE)[_PUSH_P99]
            targets.append(Target(f"twice the same node's p99 and a round trip, {at_once} at once", 1.0, measured))
        expect_silence([one for audience in audiences.values() for one in audience.sockets])
    columns = ("msg/s", "sent-202 p50", "sent-push p50", _PUSH_P99, "202-push p50", "202-push p99")
    note = (
        f"Milliseconds. A round trip to the store takes {round_trip:.2f} (p99). Each forward was pushed exactly once."
    )
    return Table("Live push across nodes", columns, rows, tuple(targets), (note,))


def _contender(audience: _Audience, at_once: int, seconds: float) -> Contender:
    return lambda: audience.exchange(at_once, seconds)
