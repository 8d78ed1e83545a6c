"""What happened, told once: to the counters of Prometheus and to the event log."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediatorError
from mediatord.eventlog.events import EventLog, milliseconds
from mediatord.interfaces import ExpiredAccount
from mediatord.message_journal import Half, MessageJournal, Path
from mediatord.metrics import Metrics
from mediatord.stopwatch import Stopwatch, begin_timing
from mediatord.synthetic import ITSELF
from mediatord.tags import Tags
from mediatord.wire import DecentrlWire, Situation, Wire, decentrl_wire_for, wire_for

__all__ = ["Half", "Journal", "Path", "Told"]

# A century: what is more says nothing about a clock, and might not fit where the log is read.
_LONGEST_AGE_MS = 3_155_760_000_000


@dataclass(slots=True)
class Told:
    """
    A request that was begun; not frozen, which would take longer than all of :meth:`Journal.begin`.

    :param began: by a clock that nobody sets.
    """

    request: str
    protocol: Half
    peer: str
    size: int
    began: float
    crypto: Stopwatch


@dataclass(slots=True)
class _Connection:
    """
    An open socket.

    :param began: when it was opened, by a clock that nobody sets.
    :param did: bound to it first; its tag depends on when it is asked for.
    """

    began: float
    did: str | None = field(default=None, repr=False)


# What is charged by the minute; other limits are called by their settings.
_A_MINUTE = frozenset({"did", "ip", "account"})


class Journal(MessageJournal):
    """
    Counts and logs. No method takes a payload, an envelope or a key.

    What has a line in the log and a counter is counted right before its line is written, one by one: so the counters
    that stand in the log are those of the lines before (:meth:`Metrics.totals`).

    :ivar steady: seconds since any time, by a clock that nobody sets.
    :ivar on_refusal: told of requests that were refused or failed: protocol, situation in words, and code.
    """

    def __init__(
        self,
        clock: IReactorTime,
        events: EventLog,
        metrics: Metrics,
        tags: Tags,
        steady: Callable[[], float] | None = None,
        is_own: Callable[[str], bool] = lambda did: False,
    ) -> None:
        super().__init__(clock, events, metrics, tags, is_own)
        self.steady = steady or clock.seconds
        self._since = self.steady()
        self.on_refusal: Callable[[Half, str, str], None] = lambda protocol, situation, code: None
        self._requests = 0
        self._connections: dict[str, _Connection] = {}

    def begin(
        self, protocol: Half, peer: str, size: int, watch: Stopwatch | None = None, came: float | None = None
    ) -> Told:
        """
        A request or frame of `size` bytes came in.

        :param watch: of this request; by default one that those find who work for it.
        :param came: when, by :attr:`steady`; by default now.
        """
        self._requests += 1
        began = self.steady() if came is None else came
        return Told(f"{self._requests:x}", protocol, peer, size, began, watch or begin_timing())

    def end(
        self,
        told: Told,
        *,
        status: int,
        fault: type[MediatorError] | None,
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
        if told.peer == ITSELF:
            return
        seconds = self.steady() - told.began
        outcome = "failed" if status >= 500 else "accepted" if fault is None else "rejected"
        self.metrics.request(told.protocol, outcome, seconds)
        if fault is not None:
            self.metrics.rejected(_situation(fault))
        if fault is not None or outcome == "failed":
            self.on_refusal(told.protocol, *_reason(told.protocol, fault, code))
        code = None if fault is None else code or _wire(told.protocol, fault).code
        self._events.write("req.done", self._done(told, seconds, status, code, kind, sender, session))

    def _done(
        self,
        told: Told,
        seconds: float,
        status: int,
        code: str | None,
        kind: str | None,
        sender: str | None,
        session: str | None,
    ) -> dict[str, object]:
        fields: dict[str, object] = {
            "req": told.request,
            "proto": told.protocol,
            "status": status,
            "size": told.size,
            "dur_ms": milliseconds(seconds * 1000),
        }
        if session is not None:
            fields["conn"] = session
        if kind is not None:
            fields["mtype"] = kind
        if code is not None:
            fields["code"] = code
        if told.crypto.seconds:
            fields["crypto_ms"] = milliseconds(told.crypto.seconds * 1000)
        if sender is not None:
            fields["sender"] = self._tags.did(sender)
        if peer := self._tags.peer(told.peer):
            fields["peer"] = peer
        return fields

    def turned_away(self, protocol: Half, peer: str, size: int, fault: MediatorError) -> None:
        """A request was refused before anybody looked at it."""
        told = self.begin(protocol, peer, size)
        self.end(told, status=_wire(protocol, fault).status, fault=type(fault), kind=None, sender=None, session=None)

    def limited(self, bucket: str, who: str, peer: str, wait: int) -> None:
        """Somebody is over a limit; signature of :data:`mediatord.admission.OnLimit`."""
        self._events.emit(
            "limit.hit",
            # An address never stands in a line as it is.
            who=self._tags.did(who) if who.startswith("did:") else self._tags.peer(who) or "unknown",
            limit=f"{bucket}_per_minute" if bucket in _A_MINUTE else bucket,
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

    def granted(self, did: str, half: Half) -> None:
        """A wallet has mediation, or an identity is registered."""
        if not self.is_own(did):
            self._events.emit("acct.grant", did=self._tags.did(did), proto=half)

    def denied(self, did: str, reason: str, half: Half) -> None:
        """A wallet or an identity was refused that; `reason` is one fixed word."""
        self._events.emit("acct.deny", did=self._tags.did(did), proto=half, reason=reason)

    def registered(self, did: str, added: int, removed: int) -> None:
        """An account changed its recipient DIDs."""
        if (added or removed) and not self.is_own(did):
            self._events.emit(
                "acct.update",
                did=self._tags.did(did),
                proto="didcomm",
                reason="recipients",
                n_added=added,
                n_removed=removed,
            )

    def account_expired(self, account: ExpiredAccount) -> None:
        """An account was removed because nobody used it."""
        self.metrics.account_expired(account.reason)
        self._events.emit(
            "acct.expire",
            did=self._tags.did(account.did),
            proto="didcomm",
            reason=account.reason,
            n_removed=account.recipients,
        )

    def moved(self, did: str) -> None:
        """An account goes by a new DID."""
        self._events.emit("acct.update", did=self._tags.did(did), proto="didcomm", reason="rotated")

    def connection_opened(self, name: str, peer: str) -> None:
        """A socket finished its handshake."""
        if peer == ITSELF:
            return
        self._connections[name] = _Connection(self.steady())
        self.metrics.active_connections.inc()
        self._events.emit("conn.open", conn=name, transport="ws", peer=self._tags.peer(peer) or None)

    def connection_bound(self, protocol: Half, name: str, did: str) -> None:
        """A DID proved itself on a socket for the first time."""
        if self.is_own(did):
            return
        connection = self._connections.get(name)
        if connection is not None:
            connection.did = connection.did or did
        self._events.emit("conn.auth", conn=name, did=self._tags.did(did), proto=protocol)

    def connection_refused(self, name: str, code: str) -> None:
        """A Decentrl socket did not authenticate."""
        self._events.emit("conn.auth", conn=name, proto="decentrl", code=code)

    def connection_closed(
        self,
        name: str,
        protocol: Half,
        code: int | None,
        by: Literal["us", "peer"],
        traffic: tuple[int, ...],
    ) -> None:
        """
        A socket is gone that was opened before.

        :param protocol: what it spoke, or would have.
        :param code: of the close frame that was sent first; 1006 when there was none.
        :param by: who began to close.
        :param traffic: messages in, messages out, bytes in, bytes out.
        """
        connection = self._connections.pop(name, None)
        if connection is None:  # the daemon's own
            return
        self.metrics.active_connections.dec()
        n_in, n_out, bytes_in, bytes_out = traffic
        self._events.emit(
            "conn.close",
            conn=name,
            did=None if connection.did is None else self._tags.did(connection.did),
            proto=protocol,
            dur_ms=(self.steady() - connection.began) * 1000,
            ws_code=code,
            reason=by,
            n_in=n_in,
            n_out=n_out,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    def gauge(self, **values: int | float | None) -> None:
        """The state, once a minute; and what the counters say."""
        self._events.emit("gauge", **values)
        self._events.emit("counters", **self.metrics.totals())

    def started(self, version: str) -> None:
        """The daemon takes work."""
        self.metrics.reloaded(self._clock.seconds(), True)
        self._events.emit("proc.start", version=version, reason="start", dur_ms=self._lap_ms())

    def stopped(self, version: str) -> None:
        """The daemon is stopping."""
        self._events.emit("proc.stop", version=version, reason="signal", dur_ms=self._lap_ms())

    def reloaded(
        self, version: str, reason: Literal["ok", "refused", "restart_needed"], seconds: float, *, success: bool
    ) -> None:
        """The configuration was read again, in so many seconds. :param success: whether all files could be used."""
        self.metrics.reloaded(self._clock.seconds(), success)
        self._events.emit("proc.reload", version=version, reason=reason, dur_ms=seconds * 1000)

    def _lap_ms(self) -> float:
        """Since it was made, or since this was asked last."""
        before, self._since = self._since, self.steady()
        return (self._since - before) * 1000


def _wire(protocol: Half, fault: Situation) -> Wire | DecentrlWire:
    return wire_for(fault) if protocol == "didcomm" else decentrl_wire_for(fault)


def _reason(protocol: Half, fault: type[MediatorError] | None, code: str | None) -> tuple[str, str]:
    """The situation in words, and what the peer was told of it."""
    if fault is None:
        return "internal_error", code or ""
    return _situation(fault), code or _wire(protocol, fault).code


def _situation(fault: type[MediatorError]) -> str:
    """The name of a situation as a label: `RecipientUnknown` is `recipient_unknown`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", fault.__name__).lower()
