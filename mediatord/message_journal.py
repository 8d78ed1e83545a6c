"""What became of messages, told once to the counters of Prometheus and to the event log."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Sized
from typing import Literal, Protocol

from twisted.internet.interfaces import IReactorTime

from mediatord.eventlog.events import EventLog
from mediatord.interfaces import Books, Ledger, Removed
from mediatord.metrics import Metrics
from mediatord.tags import Tags

Path = Literal["live", "pickup", "poll", "http"]
Method = Literal["live", "queue"]
Half = Literal["didcomm", "decentrl"]

# What the books of a store consist of, beside what waits.
LEDGER_ENTRIES = ("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn")

# Messages whose pushes are counted until they are gone, those that were pushed last.
_MAX_PUSHED = 10_000


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


class MessageJournal:
    """
    The part of :class:`~mediatord.journal.Journal` that is about messages.

    :param is_own: whether a DID is one of those that the daemon writes to itself with, which is not to be told of.
    :ivar metrics: the counters; who only counts what has no line may use them directly.
    """

    def __init__(
        self,
        clock: IReactorTime,
        events: EventLog,
        metrics: Metrics,
        tags: Tags,
        is_own: Callable[[str], bool] = lambda did: False,
    ) -> None:
        self._clock = clock
        self._events = events
        self._tags = tags
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._own: Counter[str] = Counter()
        self.metrics = metrics
        self.is_own = is_own

    @property
    def remembered(self) -> int:
        """Messages whose pushes are counted."""
        return len(self._attempts)

    def settle(self) -> None:
        """What was told is in the log, before those are answered whom it is about."""
        self._events.flush()

    def tag(self, did: str) -> str:
        """What stands for a DID in the log."""
        return self._tags.did(did)

    def accepted(self, request: str, message: Carried, sender: str | None, method: Method, half: Half) -> None:
        """
        A payload was stored (UC-021 "Logging").

        :param request: id of the request that it came with.
        :param method: `live` when a socket took it at once, else `queue`.
        """
        if self.is_own(message.recipient_did):
            self._own["accepted"] += 1
            return
        expires_at = message.expires_at
        self.metrics.forwarded.inc()
        if method == "queue":
            self.metrics.stored.inc()
        fields: dict[str, object] = {
            "msg": self._tags.message(message.id),
            "req": request,
            "rcpt": self._tags.did(message.recipient_did),
            "proto": half,
            "size": len(message.payload),
            "method": method,
        }
        if sender is not None:
            fields["sender"] = self._tags.did(sender)
        if expires_at is not None:
            fields["ttl_s"] = round(expires_at - message.received_at)
        self._events.write("msg.accept", fields)

    def pushed(self, message: Carried, sessions: Sequence[str | None], path: Path, half: Half) -> None:
        """
        A message was handed over, and stays until it is acknowledged.

        :param sessions: names of the sockets that took it; None where it was asked for without one.
        """
        if self.is_own(message.recipient_did):
            return
        attempt = self._attempts.pop(message.id, 0) + 1
        self._attempts[message.id] = attempt
        if len(self._attempts) > _MAX_PUSHED:
            self._attempts.popitem(last=False)
        tag, rcpt = self._tags.message(message.id), self._tags.did(message.recipient_did)
        latency_ms = self._age_ms(message.received_at)
        for session in sessions:
            fields: dict[str, object] = {
                "msg": tag,
                "rcpt": rcpt,
                "proto": half,
                "path": path,
                "attempt": attempt,
                "latency_ms": latency_ms,
                "ok": True,
            }
            if session is not None:
                fields["conn"] = session
            self._events.write("msg.push", fields)

    def fell_back(self, id_: str, recipient_did: str, received_at: float) -> None:
        """A push came to nothing: the message waits in the queue after all (UC-021 AF-6)."""
        if self.is_own(recipient_did):
            return
        self.metrics.stored.inc()
        self._events.emit(
            "msg.push",
            msg=self._tags.message(id_),
            rcpt=self._tags.did(recipient_did),
            proto="didcomm",
            path="live",
            attempt=self._attempts.get(id_),
            latency_ms=self._age_ms(received_at),
            ok=False,
        )

    def others_fell_back(self, count: int) -> None:
        """So many pushes of a node that is gone came to nothing; which ones is not known here."""
        for _ in range(count):
            self.metrics.stored.inc()
            self._events.emit("msg.push", proto="didcomm", path="live", ok=False)

    def acknowledged(self, removed: Removed, path: Path, half: Half) -> None:
        """A message was delivered and is gone."""
        if self.is_own(removed.recipient_did):
            self._own["acknowledged"] += 1
            return
        self._attempts.pop(removed.id, None)
        self.metrics.delivered.inc()
        self.metrics.latency(path, max(0.0, self._clock.seconds() - removed.received_at))
        self._events.write(
            "msg.ack",
            {
                "msg": self._tags.message(removed.id),
                "rcpt": self._tags.did(removed.recipient_did),
                "proto": half,
                "path": path,
                "latency_ms": self._age_ms(removed.received_at),
            },
        )

    def expired(self, removed: Removed) -> None:
        """A message was not fetched in time (UC-021 AF-5)."""
        if self.is_own(removed.recipient_did):
            self._own["expired"] += 1
            return
        self.metrics.expired.inc()
        self._lost("msg.expire", removed, "ttl")

    def evicted(self, removed: Removed) -> None:
        """A message made room for a newer one (UC-021 AF-4)."""
        if self.is_own(removed.recipient_did):
            self._own["evicted"] += 1
            return
        self.metrics.evicted.inc()
        self._lost("msg.evict", removed, removed.reason or "fifo_count")

    def purged(self, removed: Removed, half: Half) -> None:
        """The operator has removed a message."""
        self._lost("msg.remove", removed, "purged", half)

    def show_ledger(self, books: Books) -> None:
        """Have the metrics say what the store's own books say."""
        for half, ledger in (("didcomm", books.didcomm), ("decentrl", books.decentrl)):
            gone = {name: getattr(ledger, name) for name in LEDGER_ENTRIES}
            self.metrics.ledger.tell(half, {**gone, "waiting": ledger.waiting}, ledger.difference)

    def ledger(self, store: str, books: Books) -> None:
        """
        Log what the store's own books say; and what of it this process did for itself since it was asked before,
        which has no lines.

        :param store: what stands for it.
        """
        own, self._own = self._own, Counter()
        self._keep("didcomm", store, books.didcomm, own)
        self._keep("decentrl", store, books.decentrl, Counter())

    def _keep(self, half: Half, store: str, ledger: Ledger, own: Counter[str]) -> None:
        gone = {name: getattr(ledger, name) for name in LEDGER_ENTRIES}
        self._events.emit(
            "ledger",
            proto=half,
            store=store,
            waiting=ledger.waiting,
            difference=ledger.difference,
            **{f"all_{name}": number for name, number in gone.items()},
            **{f"own_{name}": number for name, number in own.items()},
        )

    def _lost(self, event: str, removed: Removed, reason: str, half: Half = "didcomm") -> None:
        """By itself only the DIDComm half loses messages: what the other one keeps waits until it is acknowledged."""
        self._attempts.pop(removed.id, None)
        self._events.emit(
            event,
            msg=self._tags.message(removed.id),
            rcpt=self._tags.did(removed.recipient_did),
            proto=half,
            size=removed.size,
            age_ms=self._age_ms(removed.received_at),
            reason=reason,
            pushes=removed.pushes,
        )

    def _age_ms(self, since: float) -> int:
        return max(0, int((self._clock.seconds() - since) * 1000))
