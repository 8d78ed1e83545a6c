"""Where requests of wallets arrive, and how they are answered in the log."""

from __future__ import annotations

from math import exp, log

from analytics.sample.node import Node
from analytics.sample.people import Socket, Wallet, Zipf, population
from analytics.sample.world import Place, World
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey

FORWARD = "routing/2.0/forward"
PICKUP = "messagepickup/3.0/"
Fault = tuple[str, str | None, int, str, float]

# Refusals of an ordinary day: half, message type, HTTP status, code, share of what is sent.
FAULTS: tuple[Fault, ...] = (
    ("didcomm", FORWARD, 400, "e.p.me.res.not-found", 0.005),
    ("didcomm", None, 400, "e.p.trust.crypto", 0.002),
    ("didcomm", None, 400, "e.p.msg", 0.0015),
    ("didcomm", None, 413, "e.p.me.res.storage.message_too_big", 0.0005),
    ("didcomm", PICKUP + "delivery-request", 200, "e.p.req.not_enroll", 0.001),
    ("didcomm", FORWARD, 503, "e.p.me.res.storage", 0.0003),
    ("decentrl", "TWO_WAY_PRIVATE", 404, "RECIPIENT_NOT_REGISTERED", 0.002),
    ("decentrl", None, 400, "INVALID_COMMAND", 0.001),
    ("decentrl", "QUERY_PENDING_EVENTS", 401, "INVALID_SIGNATURE", 0.0005),
    ("decentrl", "TWO_WAY_PRIVATE", 503, "UNAVAILABLE", 0.0002),
)
RATE_LIMITED = {"didcomm": "e.m.req.rate-limited", "decentrl": "RATE_LIMITED"}
REPLAYED = "e.p.crypto.message.dejavu"
UNTIMELY = "TIMESTAMP_OUT_OF_RANGE"


class Front:
    """:ivar wallets: all of the month, also those that have yet to join."""

    def __init__(self, world: World) -> None:
        spec = world.spec
        self.world, self.rng = world, world.rng
        self.tags = Pseudonymizer("keyed", PseudonymKey(1, spec.seed.to_bytes(32, "big")))
        self.wallets = population(spec, self.tags, self.rng)
        self._senders = Zipf(self.wallets, self.rng)
        self._ids = 0

    def request(
        self,
        place: Place,
        half: str,
        kind: str | None,
        status: int,
        *,
        size: int,
        code: str | None = None,
        sender: Wallet | None = None,
        socket: Socket | None = None,
        peer: str | None = None,
    ) -> None:
        """A request or frame was answered."""
        took = self.spread(5.5 if kind else 0.9, 0.6) * place.slowness
        node = self.writer(place)
        node.requests += 1
        if socket is not None:
            socket.traffic[0] += 1
            socket.traffic[2] += size
        node.emit(
            "req.done",
            req=f"{node.requests:x}",
            conn=socket.name if socket else None,
            proto=half,
            mtype=kind,
            status=status,
            code=code,
            size=size,
            dur_ms=took,
            crypto_ms=took * 0.7 if kind else None,
            sender=sender.did if sender else None,
            peer=peer or (sender.peer if sender else self.anybody().peer),
        )

    def anybody(self) -> Wallet:
        """Somebody who sends."""
        return self._senders.pick(self.world.now)

    def refuse(self, fault: Fault) -> None:
        """A request was refused."""
        half, kind, status, code, _ = fault
        place = self.world.places[self.somewhere()]
        sender = self.anybody() if kind and kind != FORWARD and status != 401 else None
        self.request(place, half, kind, status, size=int(self.spread(2000, 0.5)), code=code, sender=sender)

    def somewhere(self) -> int:
        """The number of a process that runs."""
        return self.rng.choice(self.world.up()).number

    def emit(self, place: Place, event: str, **fields: object) -> None:
        """A line of a process that runs."""
        self.writer(place).emit(event, **fields)

    @staticmethod
    def writer(place: Place) -> Node:
        """The log of a process that runs."""
        assert place.node is not None
        return place.node

    def tag(self) -> str:
        """Of a new message."""
        self._ids += 1
        return self.tags.message(f"{int(self.world.now * 1000):012x}{self._ids:020x}")

    def spread(self, median: float, sigma: float) -> float:
        """A log-normal number with this median."""
        return exp(self.rng.gauss(log(median), sigma))
