"""What a busy node does, without end and without seasons."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import exp
from random import Random
from typing import Any

from analytics.sample.front import FAULTS, FORWARD, PICKUP, RATE_LIMITED, REPLAYED
from analytics.sample.spec import HOUR

USERS = 20_000
Happening = tuple[float, str, Mapping[str, Any]]

_GAUGE_S = 60.0
_TTL_S = 259_200
# Of messages: no shares of their own for what happens once in so many.
_LIVE, _EXPIRED, _EVICTED, _REMOVED = 0.6, 0.01, 0.005, 0.002
_FELL_BACK = 0.01
_SOCKETS = 0.1
_REFUSED = sum(fault[4] for fault in FAULTS)


class Life:
    """
    :param rate: messages a second.
    :param begin: seconds since the epoch.
    """

    def __init__(self, rng: Random, rate: float, begin: float) -> None:
        self._rng, self._rate, self._now, self._begin = rng, rate, begin, begin
        self._users = [f"{Random(number).getrandbits(128):032x}" for number in range(USERS)]
        self._sums = list(accumulate(1 / rank for rank in range(1, USERS + 1)))
        self._calendar: list[tuple[float, int, str, Mapping[str, Any]]] = []
        self._entries = self._requests = self._sockets = 0

    def happenings(self) -> Iterator[Happening]:
        """In order of time; of `counters` without the fields."""
        calendar, rng = self._calendar, self._rng
        gauge = self._begin + _GAUGE_S
        while True:
            self._now += rng.expovariate(self._rate)
            while self._now > gauge:
                self._at(gauge, "gauge", self._gauge())
                self._at(gauge, "counters", {})
                gauge += _GAUGE_S
            self._message()
            while calendar[0][0] <= self._now:
                at, _, event, fields = heapq.heappop(calendar)
                yield at, event, fields

    def _at(self, at: float, event: str, fields: Mapping[str, Any]) -> None:
        self._entries += 1
        heapq.heappush(self._calendar, (at, self._entries, event, fields))

    def _user(self) -> str:
        return self._users[bisect_left(self._sums, self._rng.random() * self._sums[-1])]

    def _message(self) -> None:
        rng, now = self._rng, self._now
        if rng.random() < _REFUSED:
            self._fault()
        if rng.random() < _SOCKETS:
            self._socket()
        chance = rng.random()
        half = "didcomm" if chance < 0.7 else "decentrl"
        rcpt, msg = self._user(), f"{rng.getrandbits(128):032x}"
        about = {"msg": msg, "rcpt": rcpt}
        size = int(1900 * exp(rng.gauss(0, 0.9)))
        live = rng.random() < _LIVE
        sender = self._user()
        method = "live" if live else "queue"
        accepted = {**about, "sender": sender, "proto": half, "size": size, "method": method}
        if half == "didcomm":
            accepted["ttl_s"] = _TTL_S
        self._at(now, "msg.accept", accepted)
        kind = FORWARD if half == "didcomm" else "TWO_WAY_PRIVATE"
        self._request(now, half, kind, 202 if half == "didcomm" else 200, size + 900, sender)
        if live:
            self._live(now, about, half)
        else:
            self._queued(now, about, half, size)

    def _live(self, now: float, about: Mapping[str, Any], half: str) -> None:
        rng = self._rng
        pushed = {**about, "conn": self._conn(), "proto": half, "path": "live", "attempt": 1}
        self._at(now, "msg.push", {**pushed, "latency_ms": int(4 * exp(rng.gauss(0, 0.8))), "ok": True})
        if rng.random() < _FELL_BACK:
            self._at(now + 60, "msg.push", {**pushed, "latency_ms": 60_000, "ok": False})
            self._fetched(now, now + HOUR * rng.random(), about, half, 2)
        else:
            self._acknowledged(now, now + 0.18 * exp(rng.gauss(0, 1.1)), about, half, "live")

    def _queued(self, now: float, about: Mapping[str, Any], half: str, size: int) -> None:
        rng = self._rng
        waited = HOUR * exp(rng.gauss(0.3, 0.8))
        chance = rng.random()
        for event, reason, share in (
            ("msg.expire", "ttl", _EXPIRED),
            ("msg.evict", "fifo_count", _EVICTED),
            ("msg.remove", "deregistered", _REMOVED),
        ):
            chance -= share
            if chance < 0:
                lost = {"proto": half, "size": size, "age_ms": int(waited * 1000), "reason": reason, "pushes": 0}
                self._at(now + waited, event, {**about, **lost})
                return
        self._fetched(now, now + waited, about, half, 1)

    def _fetched(self, since: float, at: float, about: Mapping[str, Any], half: str, attempt: int) -> None:
        """Of Decentrl events there is no line when they are shown, only when they are acknowledged."""
        if half == "didcomm":
            latency = int((at - since) * 1000)
            pushed = {"conn": self._conn(), "proto": half, "path": "pickup", "attempt": attempt}
            self._at(at, "msg.push", {**about, **pushed, "latency_ms": latency, "ok": True})
            self._request(at, half, PICKUP + "delivery-request", 200, 780, about["rcpt"])
        self._acknowledged(since, at + self._rng.random(), about, half, "pickup" if half == "didcomm" else "poll")

    def _acknowledged(self, since: float, at: float, about: Mapping[str, Any], half: str, path: str) -> None:
        self._at(at, "msg.ack", {**about, "proto": half, "path": path, "latency_ms": int((at - since) * 1000)})
        kind = PICKUP + "messages-received" if half == "didcomm" else "ACKNOWLEDGE_PENDING_EVENTS"
        self._request(at, half, kind, 200, 820, about["rcpt"])

    def _request(
        self,
        at: float,
        half: str,
        kind: str | None,
        status: int,
        size: int,
        sender: str | None,
        code: str | None = None,
    ) -> None:
        took = 5.5 * exp(self._rng.gauss(0, 0.6))
        self._requests += 1
        fields: dict[str, Any] = {"req": f"{self._requests:x}", "proto": half}
        if kind is not None:
            fields["mtype"] = kind
        fields["status"] = status
        if code is not None:
            fields["code"] = code
        fields |= {"size": size, "dur_ms": round(took, 3), "crypto_ms": round(took * 0.7, 3)}
        if sender is not None:
            fields["sender"] = sender
        fields["peer"] = self._users[self._requests % 4096]
        self._at(at, "req.done", fields)

    def _fault(self) -> None:
        """A refusal; now and then something rarer goes with it."""
        rng, now = self._rng, self._now
        half, kind, status, code, _ = rng.choices(FAULTS, weights=[fault[4] for fault in FAULTS])[0]
        self._request(now, half, kind, status, 2000, None, code)
        rare = rng.randrange(40)
        user = self._user()
        if rare < 4:
            self._at(now, "limit.hit", {"who": user, "limit": "did_per_minute", "retry_after_s": 20, "peer": user})
            self._request(now, "didcomm", None, 429, 2000, None, RATE_LIMITED["didcomm"])
        elif rare < 8:
            self._at(now, "replay.drop", {"sender": user, "code": REPLAYED})
        elif rare < 12:
            self._at(now, "acct.grant", {"did": user, "proto": "didcomm"})
            self._at(now, "acct.update", {"did": user, "proto": "didcomm", "n_added": 1, "n_removed": 0})
        elif rare < 13:
            self._at(now, "acct.deny", {"did": user, "proto": "didcomm", "reason": "policy"})

    def _conn(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _socket(self) -> None:
        rng, now = self._rng, self._now
        conn, user, half = self._conn(), self._user(), "didcomm" if rng.random() < 0.7 else "decentrl"
        lasted = 900 * exp(rng.gauss(0, 1.1))
        self._at(now, "conn.open", {"conn": conn, "transport": "ws", "peer": user})
        self._at(now, "conn.auth", {"conn": conn, "did": user, "proto": half})
        n_in, n_out = rng.randrange(1, 40), rng.randrange(1, 40)
        closed = {
            "conn": conn,
            "proto": half,
            "dur_ms": round(lasted * 1000, 3),
            "ws_code": rng.choice((1000, 1001, 1006)),
        }
        traffic = {"n_in": n_in, "n_out": n_out, "bytes_in": 800 * n_in, "bytes_out": 2600 * n_out}
        self._at(now + lasted, "conn.close", {**closed, "reason": "peer", **traffic})

    def _gauge(self) -> dict[str, Any]:
        waiting = len(self._calendar)
        return {
            "depth": waiting,
            "bytes": waiting * 1900,
            "rcpts": min(USERS, waiting),
            "oldest_ms": 7_200_000,
            "conns": 400,
            "rss": 120_000_000,
            "fds": 440,
            "lag_ms": round(self._rng.expovariate(1.0), 3),
        }
