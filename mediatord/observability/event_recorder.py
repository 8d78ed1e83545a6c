"""Records requests, messages, accounts and connections: counts Prometheus metrics and writes the event log."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediatorError
from mediatord.observability.event_schema import EventLog
from mediatord.observability.metrics import REQUEST_BUCKETS, FastCounter, Metrics
from mediatord.observability.pseudonyms import Pseudonymizer
from mediatord.protocol.canonical_did import is_decentrl_did
from mediatord.protocol.error_codes import (
    DecentrlErrorCode,
    DIDCommErrorCode,
    ErrorOrClass,
    get_decentrl_error_code,
    get_didcomm_error_code,
)
from mediatord.protocol.probe_markers import PROBE_CLIENT, PROBE_DID_INFIX
from mediatord.runtime.request_time import Stopwatch, start_stopwatch
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import (
    LEDGER_ENTRIES,
    MessageLedger,
    RemovedMessage,
    StoredMessage,
    StoreLedger,
)
from mediatord.store.interfaces.store import ExpiredAccount

DeliveryPath = Literal["live", "pickup", "poll", "http"]
ProtocolName = Literal["didcomm", "didcomm_v1", "decentrl"]

# Messages of which the number of pushes is kept; the least recently pushed are dropped.
_MAX_ATTEMPT_COUNTERS = 10_000
# A century. Larger values say nothing about a clock, and might not fit a reader's types.
_MAX_AGE_MS = 3_155_760_000_000
# Limits by the minute; others are named after their settings.
_PER_MINUTE_LIMITS = frozenset({"did", "ip", "account", "connections"})


@dataclass(slots=True)
class RequestRecord:
    """
    A request in progress. Not frozen, as that would take longer than :meth:`EventRecorder.begin_request` does.

    :param began: by the monotonic clock.
    :param kind: name of the message type in the dispatch table, never as the peer wrote it.
    :param sender: its authenticated DID; None if there is none, or it is not known yet.
    :param session: name of the socket.
    """

    request: str
    protocol: ProtocolName
    peer: str
    size: int
    began: float
    crypto: Stopwatch
    kind: str | None = None
    sender: str | None = None
    session: str | None = None


@dataclass(slots=True)
class _ConnectionRecord:
    """
    An open socket.

    :param began: when it was opened, by the monotonic clock.
    :param did: the first DID that authenticated; kept in the clear, since pseudonym keys change.
    :param protocol: by which it did.
    """

    began: float
    did: str | None = field(default=None, repr=False)
    protocol: ProtocolName | None = None


class EventRecorder:
    """
    Records what happens. No method takes a payload, an envelope or a key, except to measure it.

    Each counter is incremented right before its line is written, so that the counters in the log are those of the
    lines before them (:meth:`Metrics.collect_totals`).

    :param is_own: whether a DID belongs to the daemon's end-to-end probe, of which nothing is recorded.
    :ivar metrics: the counters; those without a log line may be counted directly.
    :ivar flush_events: writes the lines of this reactor iteration, which has to happen before clients are answered.
    :ivar monotonic: returns seconds since an arbitrary time, by a clock that cannot be set.
    :ivar on_rejection: called for requests that were refused or failed: protocol, situation, and code.
    """

    def __init__(
        self,
        clock: IReactorTime,
        events: EventLog,
        metrics: Metrics,
        pseudonymizer: Pseudonymizer,
        monotonic: Callable[[], float] | None = None,
        is_own: Callable[[str], bool] = lambda did: False,
    ) -> None:
        self._clock = clock
        self._events = events
        self._pseudonymizer = pseudonymizer
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._own: Counter[str] = Counter()
        self._requests = 0
        self._connections: dict[str, _ConnectionRecord] = {}
        self.metrics = metrics
        self.is_own = is_own
        self.flush_events = events.flush
        self.monotonic = monotonic or clock.seconds
        self._since = self.monotonic()
        self.on_rejection: Callable[[ProtocolName, str, str], None] = lambda protocol, situation, code: None

    @property
    def attempt_count(self) -> int:
        """Number of messages of which the pushes are counted."""
        return len(self._attempts)

    def pseudonymize(self, did: str) -> str:
        """The pseudonym of a DID in the log."""
        return self._pseudonymizer.did(did)

    def _emit(self, event: str, **fields: object) -> None:
        """Write an event with pseudonyms for DIDs, message ids and addresses; fields that are None are omitted."""
        names = self._pseudonymizer
        pseudonymize = {"msg": names.message, "peer": names.peer}
        pseudonymize |= dict.fromkeys(("did", "rcpt", "sender"), names.did)
        for name in fields.keys() & pseudonymize.keys():
            if fields[name] is not None:
                fields[name] = pseudonymize[name](str(fields[name]))
        self._events.emit(event, **fields)

    def record_accept(
        self,
        request: str,
        message: StoredMessage | PendingEvent,
        sender: str | None,
        protocol: ProtocolName,
        pushed: bool,
    ) -> None:
        """
        A payload was stored (UC-021 "Logging").

        :param request: id of its request.
        :param pushed: whether a socket took it at once.
        """
        if PROBE_DID_INFIX in message.recipient_did and self.is_own(message.recipient_did):
            self._own["accepted"] += 1
            return
        self.metrics.forwarded.counts[()] += 1
        if not pushed:
            self.metrics.stored.counts[()] += 1
        fields: dict[str, object] = {
            "msg": self._pseudonymizer.message(message.id),
            "req": request,
            "rcpt": self._pseudonymizer.did(message.recipient_did),
            "proto": protocol,
            "size": len(message.payload),
            "method": "live" if pushed else "queue",
        }
        if sender is not None:
            fields["sender"] = self._pseudonymizer.did(sender)
        if (expires_at := message.expires_at) is not None:
            fields["ttl_s"] = round(expires_at - message.received_at)
        self._events.write("msg.accept", fields)

    def record_push(
        self,
        message: StoredMessage | PendingEvent,
        sessions: Sequence[str | None],
        path: DeliveryPath,
        protocol: ProtocolName,
    ) -> None:
        """
        A message was delivered, and stays queued until it is acknowledged.

        :param sessions: names of the sockets that took it; None for a request without a socket.
        """
        if PROBE_DID_INFIX in message.recipient_did and self.is_own(message.recipient_did):
            return
        attempt = self._attempts.pop(message.id, 0) + 1
        self._attempts[message.id] = attempt
        if len(self._attempts) > _MAX_ATTEMPT_COUNTERS:
            self._attempts.popitem(last=False)
        shared: dict[str, object] = {
            "msg": self._pseudonymizer.message(message.id),
            "rcpt": self._pseudonymizer.did(message.recipient_did),
            "proto": protocol,
            "path": path,
            "attempt": attempt,
            "latency_ms": max(0, int((self._clock.seconds() - message.received_at) * 1000)),
            "ok": True,
        }
        for session in sessions:
            self._events.write("msg.push", {**shared, **({} if session is None else {"conn": session})})

    def record_push_failure(self, id_: str, recipient_did: str, received_at: float) -> None:
        """A push was not acknowledged, so the message is pending again (UC-021 AF-6)."""
        if self.is_own(recipient_did):
            return
        self.metrics.stored.inc()
        push = {"path": "live", "attempt": self._attempts.get(id_), "latency_ms": self._age_ms(received_at)}
        self._emit("msg.push", msg=id_, rcpt=recipient_did, proto="didcomm", ok=False, **push)

    def record_remote_push_failures(self, count: int) -> None:
        """As :meth:`record_push_failure`, for unknown messages that a dead node had pushed."""
        for _ in range(count):
            self.metrics.stored.inc()
            self._events.emit("msg.push", proto="didcomm", path="live", ok=False)

    def record_acknowledgement(self, removed: RemovedMessage, path: DeliveryPath, protocol: ProtocolName) -> None:
        """A message was acknowledged and removed."""
        if PROBE_DID_INFIX in removed.recipient_did and self.is_own(removed.recipient_did):
            self._own["acknowledged"] += 1
            return
        self._attempts.pop(removed.id, None)
        self.metrics.delivered.counts[()] += 1
        seconds = max(0.0, self._clock.seconds() - removed.received_at)
        self.metrics.delivery_latency.observe(seconds, path)
        self._events.write(
            "msg.ack",
            {
                "msg": self._pseudonymizer.message(removed.id),
                "rcpt": self._pseudonymizer.did(removed.recipient_did),
                "proto": protocol,
                "path": path,
                "latency_ms": int(seconds * 1000),
            },
        )

    def record_expiry(self, removed: RemovedMessage) -> None:
        """A message expired (UC-021 AF-5)."""
        self._record_loss("msg.expire", removed, "ttl", "expired", self.metrics.expired)

    def record_eviction(self, removed: RemovedMessage) -> None:
        """A message was evicted for a newer one (UC-021 AF-4)."""
        reason = removed.reason or "fifo_count"
        self._record_loss("msg.evict", removed, reason, "evicted", self.metrics.evicted)

    def record_purge(self, removed: RemovedMessage, protocol: ProtocolName) -> None:
        """The operator removed a message."""
        self._emit_loss("msg.remove", removed, "purged", protocol)

    def _record_loss(
        self, event: str, removed: RemovedMessage, reason: str, entry: str, counter: FastCounter
    ) -> None:
        """Decentrl events are lost only by a purge."""
        if self.is_own(removed.recipient_did):
            self._own[entry] += 1
            return
        counter.inc()
        self._emit_loss(event, removed, reason, "didcomm")

    def _emit_loss(self, event: str, removed: RemovedMessage, reason: str, protocol: ProtocolName) -> None:
        self._attempts.pop(removed.id, None)
        lost = {"size": removed.size, "age_ms": self._age_ms(removed.received_at), "pushes": removed.pushes}
        self._emit(event, msg=removed.id, rcpt=removed.recipient_did, proto=protocol, reason=reason, **lost)

    def update_ledger_metrics(self, store_ledger: StoreLedger) -> None:
        """Set the ledger metrics from the store's ledger."""
        for protocol, ledger, gone in _list_ledgers(store_ledger):
            self.metrics.ledgers[protocol] = {**gone, "waiting": ledger.waiting}, ledger.difference

    def record_ledger(self, store: str, store_ledger: StoreLedger) -> None:
        """
        Log the store's ledger, with the messages of the probe since the last call, which have no lines.

        :param store: pseudonym of the store.
        """
        own, self._own = self._own, Counter()
        for protocol, ledger, gone in _list_ledgers(store_ledger):
            fields = {"waiting": ledger.waiting, "difference": ledger.difference}
            fields |= {f"all_{name}": number for name, number in gone.items()}
            if protocol == "didcomm":
                fields |= {f"own_{name}": number for name, number in own.items()}
            self._events.emit("ledger", proto=protocol, store=store, **fields)

    def _age_ms(self, since: float) -> int:
        return max(0, int((self._clock.seconds() - since) * 1000))

    def begin_request(
        self, protocol: ProtocolName, peer: str, size: int, watch: Stopwatch | None = None, came: float | None = None
    ) -> RequestRecord:
        """
        A request or frame of `size` bytes was received.

        :param watch: of this request; by default a new one, which becomes that of the current context.
        :param came: when, by :attr:`monotonic`; by default now.
        """
        self._requests += 1
        began = self.monotonic() if came is None else came
        return RequestRecord(f"{self._requests:x}", protocol, peer, size, began, watch or start_stopwatch())

    def end_request(
        self,
        request_record: RequestRecord,
        *,
        status: int,
        fault: type[MediatorError] | None,
        code: str | None = None,
    ) -> None:
        """
        A request was answered.

        :param code: sent to the peer, if it is not the code of `fault` in the protocol's table.
        """
        if request_record.peer == PROBE_CLIENT:
            return
        protocol = request_record.protocol
        seconds = self.monotonic() - request_record.began
        outcome = "failed" if status >= 500 else "accepted" if fault is None else "rejected"
        self.metrics.requests.counts[protocol, outcome] += 1
        # As FastHistogram.observe does, for each message.
        durations = self.metrics.request_duration.series[protocol,]
        durations[bisect_left(REQUEST_BUCKETS, seconds)] += 1
        durations[-1] += seconds
        if outcome != "accepted":
            code = self._record_rejection(protocol, fault, code)
        fields: dict[str, object] = {
            "req": request_record.request,
            "proto": protocol,
            "status": status,
            "size": request_record.size,
            "dur_ms": round(seconds * 1000, 3),
        }
        for name, value in (("conn", request_record.session), ("mtype", request_record.kind), ("code", code)):
            if value is not None:
                fields[name] = value
        if request_record.crypto.seconds:
            fields["crypto_ms"] = round(request_record.crypto.seconds * 1000, 3)
        if request_record.sender is not None:
            fields["sender"] = self._pseudonymizer.did(request_record.sender)
        if peer := self._pseudonymizer.peer(request_record.peer):
            fields["peer"] = peer
        self._events.write("req.done", fields)

    def _record_rejection(
        self, protocol: ProtocolName, fault: type[MediatorError] | None, code: str | None
    ) -> str | None:
        """Returns the code of the refusal; None for an unexpected failure."""
        if fault is None:
            self.on_rejection(protocol, "internal_error", code or "")
            return None
        code = code or _find_error_code(protocol, fault).code
        self.metrics.rejected.inc(fault.reason)
        self.on_rejection(protocol, fault.reason, code)
        return code

    def record_early_rejection(self, protocol: ProtocolName, peer: str, size: int, fault: MediatorError) -> None:
        """A request was refused unread."""
        record, status = self.begin_request(protocol, peer, size), _find_error_code(protocol, fault).status
        self.end_request(record, status=status, fault=type(fault))

    def record_rate_limit(self, bucket: str, who: str, peer: str, wait: int) -> None:
        """A limit was exceeded; signature of :data:`mediatord.ratelimit.rate_limiter.RateLimitCallback`."""
        # Addresses are never logged in the clear.
        names = self._pseudonymizer
        tag = names.did(who) if who.startswith("did:") else names.peer(who) or "unknown"
        limit = f"{bucket}_per_minute" if bucket in _PER_MINUTE_LIMITS else bucket
        self._emit("limit.hit", who=tag, limit=limit, retry_after_s=wait, peer=peer)

    def record_replay(
        self, protocol: ProtocolName, sender: str | None, fault: MediatorError, *, age_ms: float | None = None
    ) -> None:
        """
        An envelope or command was a replay, or outside the time window.

        :param age_ms: milliseconds since its timestamp; limited to a century.
        """
        age = None if age_ms is None else int(max(-_MAX_AGE_MS, min(_MAX_AGE_MS, age_ms)))
        self._emit("replay.drop", sender=sender, code=_find_error_code(protocol, fault).code, age_ms=age)

    def record_grant(self, did: str, protocol: ProtocolName) -> None:
        """Mediation was granted to a wallet, or an identity was registered."""
        if not self.is_own(did):
            self._emit("acct.grant", did=did, proto=protocol)

    def record_denial(self, did: str, reason: str, protocol: ProtocolName) -> None:
        """Mediation or registration was denied. :param reason: one fixed word."""
        self._emit("acct.deny", did=did, proto=protocol, reason=reason)

    def record_recipient_update(self, did: str, added: int, removed: int, protocol: ProtocolName = "didcomm") -> None:
        """An account added or removed recipient DIDs."""
        if (added or removed) and not self.is_own(did):
            numbers = {"n_added": added, "n_removed": removed}
            self._emit("acct.update", did=did, proto=protocol, reason="recipients", **numbers)

    def record_account_expired(self, account: ExpiredAccount) -> None:
        """An unused account was removed."""
        self.metrics.accounts_expired.inc(account.reason)
        gone = {"reason": account.reason, "n_removed": account.recipients}
        self._emit("acct.expire", did=account.did, proto="didcomm", **gone)

    def record_wakeup(
        self,
        did: str,
        service: str,
        outcome: str,
        *,
        code: str | None,
        status: int | None,
        age: float,
        seconds: float,
        retry_after: float | None,
    ) -> None:
        """
        A push service was asked to wake a device of an account, or the webhook was called.

        :param code: documented error code of the service, or a constant word.
        :param age: seconds since the message arrived.
        :param seconds: duration of the request.
        """
        self.metrics.push_requests.counts[service, outcome] += 1
        self.metrics.push_duration.observe(seconds, service)
        fields: dict[str, object] = {
            "did": self._pseudonymizer.did(did),
            "proto": _name_protocol(did),
            "service": service,
            "outcome": outcome,
            "age_ms": int(age * 1000),
            "dur_ms": round(seconds * 1000, 3),
        }
        if code is not None:
            fields["code"] = code
        if status is not None:
            fields["status"] = status
        if retry_after is not None:
            fields["retry_after_s"] = round(retry_after)
        self._events.write("push.wake", fields)

    def record_device_forgotten(self, did: str, service: str, reason: str) -> None:
        """A device was removed because its push service does not know it. :param reason: as `code` above."""
        self.metrics.push_devices_forgotten.inc(service)
        self._emit("push.forget", did=did, proto=_name_protocol(did), service=service, reason=reason)

    def record_did_rotation(self, did: str) -> None:
        """An account was rotated to a new DID."""
        self._emit("acct.update", did=did, proto="didcomm", reason="rotated")

    def record_connection_opened(self, name: str, peer: str) -> None:
        """A socket completed its handshake."""
        if peer == PROBE_CLIENT:
            return
        self._connections[name] = _ConnectionRecord(self.monotonic())
        self.metrics.active_connections.inc()
        self._emit("conn.open", conn=name, transport="ws", peer=peer)

    def record_connection_authenticated(self, protocol: ProtocolName, name: str, did: str) -> None:
        """A DID authenticated on a socket for the first time."""
        if self.is_own(did):
            return
        connection = self._connections.get(name)
        if connection is not None and connection.did is None:
            connection.did, connection.protocol = did, protocol
        self._emit("conn.auth", conn=name, did=did, proto=protocol)

    def record_authentication_failure(self, name: str, code: str) -> None:
        """A Decentrl socket did not authenticate."""
        self._emit("conn.auth", conn=name, proto="decentrl", code=code)

    def record_connection_closed(
        self,
        name: str,
        protocol: ProtocolName,
        code: int | None,
        by: Literal["us", "peer"],
        received: tuple[int, int],
        sent: tuple[int, int],
    ) -> None:
        """
        A socket was closed.

        :param protocol: what it spoke, or would have, if no DID authenticated.
        :param code: of the first close frame; 1006 without one.
        :param by: who sent it.
        :param received: messages, and their bytes.
        :param sent: likewise.
        """
        connection = self._connections.pop(name, None)
        if connection is None:  # the daemon's own
            return
        self.metrics.active_connections.dec()
        seconds = self.monotonic() - connection.began
        protocol = connection.protocol or protocol
        about = {"conn": name, "did": connection.did, "proto": protocol, "dur_ms": seconds * 1000}
        traffic = {"n_in": received[0], "n_out": sent[0], "bytes_in": received[1], "bytes_out": sent[1]}
        self._emit("conn.close", ws_code=code, reason=by, **about, **traffic)

    def record_gauge(self, **values: int | float | None) -> None:
        """Log the gauges and the counters, once a minute."""
        self._events.emit("gauge", **values)
        self._events.emit("counters", **self.metrics.collect_totals())

    def record_start(self, version: str) -> None:
        """The daemon accepts requests."""
        self.metrics.set_reload_result(self._clock.seconds(), True)
        self._events.emit("proc.start", version=version, reason="start", dur_ms=self._lap_ms())

    def record_stop(self, version: str) -> None:
        """The daemon is stopping."""
        self._events.emit("proc.stop", version=version, reason="signal", dur_ms=self._lap_ms())

    def record_reload(
        self, version: str, reason: Literal["ok", "refused", "restart_needed"], seconds: float, *, success: bool
    ) -> None:
        """The configuration was reloaded in `seconds`. :param success: whether all files could be used."""
        self.metrics.set_reload_result(self._clock.seconds(), success)
        self._events.emit("proc.reload", version=version, reason=reason, dur_ms=seconds * 1000)

    def _lap_ms(self) -> float:
        """Milliseconds since the last call, or since this object was made."""
        before, self._since = self._since, self.monotonic()
        return (self._since - before) * 1000


def _name_protocol(did: str) -> ProtocolName:
    """The protocol of an account."""
    return "decentrl" if is_decentrl_did(did) else "didcomm"


def _find_error_code(protocol: ProtocolName, fault: ErrorOrClass) -> DIDCommErrorCode | DecentrlErrorCode:
    return get_decentrl_error_code(fault) if protocol == "decentrl" else get_didcomm_error_code(fault)


def _list_ledgers(store_ledger: StoreLedger) -> Iterator[tuple[ProtocolName, MessageLedger, dict[str, int | None]]]:
    """Protocols, their ledgers, and the number of messages by outcome."""
    for protocol, ledger in (("didcomm", store_ledger.didcomm), ("decentrl", store_ledger.decentrl)):
        yield protocol, ledger, {name: getattr(ledger, name) for name in LEDGER_ENTRIES}  # type: ignore[misc]
