"""What happened, told once: to the counters of Prometheus and to the event log."""

from __future__ import annotations

import re
from collections.abc import Sized
from dataclasses import dataclass
from typing import Literal, Protocol

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediatorError
from mediatord.eventlog.events import EventLog
from mediatord.interfaces import Removed
from mediatord.metrics import Metrics
from mediatord.tags import Tags
from mediatord.wire import DecentrlWire, Wire, decentrl_wire_for, wire_for

Path = Literal["live", "pickup", "poll", "http"]
Method = Literal["live", "queue"]
Half = Literal["didcomm", "decentrl"]

# A century: what is more says nothing about a clock, and might not fit where the log is read.
_LONGEST_AGE_MS = 3_155_760_000_000


@dataclass(frozen=True, slots=True)
class Told:
    """A request that was begun."""

    request: str
    protocol: Half
    peer: str
    size: int
    began: float


class Carried(Protocol):
    """
    A payload on its way to a recipient, in either half.

    :ivar expires_at: None when it waits until it is acknowledged.
    """

    @property
    def id(self) -> str: ...

    @property
    def recipient_did(self) -> str: ...

    @property
    def payload(self) -> Sized: ...

    @property
    def received_at(self) -> float: ...

    @property
    def expires_at(self) -> float | None: ...


class Journal:
    """
    Counts and logs. No method takes a payload, an envelope or a key.

    :ivar metrics: the counters; who only counts may use them directly.
    """

    def __init__(self, clock: IReactorTime, events: EventLog, metrics: Metrics, tags: Tags) -> None:
        self._clock = clock
        self._events = events
        self._tags = tags
        self._requests = 0
        self.metrics = metrics

    def begin(self, protocol: Half, peer: str, size: int) -> Told:
        """A request or frame of `size` bytes came in."""
        self._requests += 1
        return Told(f"{self._requests:x}", protocol, peer, size, self._clock.seconds())

    def end(
        self,
        told: Told,
        *,
        status: int,
        fault: MediatorError | None,
        kind: str | None,
        sender: str | None,
        session: str | None,
        code: str | None = None,
    ) -> None:
        """
        It was answered.

        :param kind: name of the message type as it is served; what a peer wrote could be anything.
        :param code: what the peer was told, where that is not the code of `fault` in the protocol's table.
        """
        seconds = max(0.0, self._clock.seconds() - told.began)
        outcome = "accepted" if fault is None else "failed" if status >= 500 else "rejected"
        self.metrics.request(told.protocol, outcome, seconds)
        if fault is not None:
            self.metrics.rejected(_situation(fault))
        self._events.emit(
            "req.done",
            req=told.request,
            conn=session,
            proto=told.protocol,
            mtype=kind,
            status=status,
            code=None if fault is None else code or _wire(told.protocol, fault).code,
            size=told.size,
            dur_ms=round(seconds * 1000, 3),
            sender=None if sender is None else self._tags.did(sender),
            peer=self._tags.peer(told.peer) or None,
        )

    def turned_away(self, protocol: Half, peer: str, size: int, fault: MediatorError) -> None:
        """A request was refused before anybody looked at it."""
        told = self.begin(protocol, peer, size)
        self.end(told, status=_wire(protocol, fault).status, fault=fault, kind=None, sender=None, session=None)

    def accepted(self, message: Carried, sender: str | None, method: Method) -> None:
        """
        A payload was stored (UC-021 "Logging").

        :param method: `live` when a socket took it at once, else `queue`.
        """
        expires_at = message.expires_at
        self.metrics.forwarded.inc()
        if method == "queue":
            self.metrics.stored.inc()
        self._events.emit(
            "msg.accept",
            msg=self._tags.message(message.id),
            sender=None if sender is None else self._tags.did(sender),
            rcpt=self._tags.did(message.recipient_did),
            size=len(message.payload),
            ttl_s=None if expires_at is None else round(expires_at - message.received_at),
            method=method,
        )

    def fell_back(self, count: int) -> None:
        """Pushes came to nothing: so many messages are waiting in the queue after all."""
        self.metrics.stored.inc(count)

    def pushed(self, message: Carried, session: str | None, path: Path) -> None:
        """A message was handed over, and stays until it is acknowledged."""
        self._events.emit(
            "msg.push",
            msg=self._tags.message(message.id),
            rcpt=self._tags.did(message.recipient_did),
            conn=session,
            path=path,
            latency_ms=self._age_ms(message.received_at),
            ok=True,
        )

    def acknowledged(self, removed: Removed, path: Path) -> None:
        """A message was delivered and is gone."""
        self.metrics.delivered.inc()
        self.metrics.latency(path, max(0.0, self._clock.seconds() - removed.received_at))
        self._events.emit(
            "msg.ack",
            msg=self._tags.message(removed.id),
            rcpt=self._tags.did(removed.recipient_did),
            path=path,
            latency_ms=self._age_ms(removed.received_at),
        )

    def expired(self, removed: Removed) -> None:
        """A message was not fetched in time (UC-021 AF-5)."""
        self.metrics.expired.inc()
        self._lost("msg.expire", removed, "ttl")

    def evicted(self, removed: Removed) -> None:
        """A message made room for a newer one (UC-021 AF-4)."""
        self.metrics.evicted.inc()
        self._lost("msg.evict", removed, removed.reason or "fifo_count")

    def _lost(self, event: str, removed: Removed, reason: str) -> None:
        self._events.emit(
            event,
            msg=self._tags.message(removed.id),
            rcpt=self._tags.did(removed.recipient_did),
            size=removed.size,
            age_ms=self._age_ms(removed.received_at),
            reason=reason,
            pushes=removed.pushes,
        )

    def limited(self, bucket: str, who: str, peer: str, wait: int) -> None:
        """Somebody is over a limit; signature of :data:`mediatord.admission.OnLimit`."""
        self._events.emit(
            "limit.hit",
            # An address never stands in a line as it is.
            who=self._tags.did(who) if who.startswith("did:") else self._tags.peer(who) or "unknown",
            limit=f"{bucket}_per_minute",
            retry_after_s=wait,
            peer=self._tags.peer(peer) or None,
        )

    def replayed(
        self, protocol: Half, sender: str | None, fault: MediatorError, *, age_ms: float | None = None
    ) -> None:
        """
        An envelope or command came a second time, or was made at another time than now.

        :param age_ms: milliseconds since it was made, by its own clock; what is absurd is cut off.
        """
        self._events.emit(
            "replay.drop",
            sender=None if sender is None else self._tags.did(sender),
            code=_wire(protocol, fault).code,
            age_ms=None if age_ms is None else int(max(-_LONGEST_AGE_MS, min(_LONGEST_AGE_MS, age_ms))),
        )

    def granted(self, did: str) -> None:
        """A wallet has mediation."""
        self._events.emit("acct.grant", did=self._tags.did(did))

    def denied(self, did: str, reason: str) -> None:
        """A wallet was refused mediation; `reason` is one fixed word."""
        self._events.emit("acct.deny", did=self._tags.did(did), reason=reason)

    def registered(self, did: str, added: int, removed: int) -> None:
        """An account changed its recipient DIDs."""
        if added or removed:
            self._events.emit("acct.update", did=self._tags.did(did), n_added=added, n_removed=removed)

    def moved(self, did: str) -> None:
        """An account goes by a new DID."""
        self._events.emit("acct.update", did=self._tags.did(did), reason="rotated")

    def connection_opened(self, name: str, peer: str) -> None:
        """A socket finished its handshake."""
        self.metrics.active_connections.inc()
        self._events.emit("conn.open", conn=name, transport="ws", peer=self._tags.peer(peer) or None)

    def connection_bound(self, protocol: Half, name: str, did: str) -> None:
        """A DID proved itself on a socket for the first time."""
        self._events.emit("conn.auth", conn=name, did=self._tags.did(did), proto=protocol)

    def connection_refused(self, name: str, code: str) -> None:
        """A Decentrl socket did not authenticate."""
        self._events.emit("conn.auth", conn=name, proto="decentrl", code=code)

    def connection_closed(
        self,
        name: str,
        protocol: Half,
        lasted: float,
        code: int | None,
        by: Literal["us", "peer"],
        traffic: tuple[int, ...],
    ) -> None:
        """
        A socket is gone.

        :param protocol: what it spoke, or would have.
        :param code: of the close frame that was sent first; 1006 when there was none.
        :param by: who began to close.
        :param traffic: messages in, messages out, bytes in, bytes out.
        """
        self.metrics.active_connections.dec()
        n_in, n_out, bytes_in, bytes_out = traffic
        self._events.emit(
            "conn.close",
            conn=name,
            dur_ms=round(lasted * 1000, 3),
            proto=protocol,
            ws_code=code,
            reason=by,
            n_in=n_in,
            n_out=n_out,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    def gauge(self, **values: int | None) -> None:
        """The state, once a minute."""
        self._events.emit("gauge", **values)

    def started(self, version: str) -> None:
        """The daemon takes work."""
        self._events.emit("proc.start", version=version)

    def stopped(self, version: str) -> None:
        """The daemon is done."""
        self._events.emit("proc.stop", version=version, reason="signal")

    def _age_ms(self, since: float) -> int:
        return max(0, int((self._clock.seconds() - since) * 1000))


def _wire(protocol: Half, fault: MediatorError) -> Wire | DecentrlWire:
    return wire_for(fault) if protocol == "didcomm" else decentrl_wire_for(fault)


def _situation(fault: MediatorError) -> str:
    """The name of a situation as a label: `RecipientUnknown` is `recipient_unknown`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(fault).__name__).lower()
