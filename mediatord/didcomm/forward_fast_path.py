"""
The short way of a forward (UC-021 main flow).

Nearly all that comes is an anoncrypted forward with one payload for a wallet of ours. What :meth:`Mediator.receive`
does with it step by step, ready to wait at each, is done here in one go, and only the commit is waited for. Whatever
is not exactly that, and whatever would be refused, is left to the long way as if it had never been here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.clock import Stopwatch, request_scope
from mediatord.didcomm.forward_router import FORWARD_NAME, ForwardContext, ForwardRouter, ForwardSettings
from mediatord.didcomm.messages import ACCEPTED, DIDCommReply, MessagePacker
from mediatord.errors import InternalFault, MediatorError
from mediatord.failure_logging import redact_failure, release_traceback
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.canonical_did import canonicalize_did, is_did_peer_3
from mediatord.protocol.didcomm.forward import FastForward, compute_expiry
from mediatord.ratelimit.rate_limiter import SMALL_REQUEST_BYTES
from mediatord.store.interfaces.messages import EarlyResultCallback, EnqueueRequest, EnqueueResult, Payload

_log = Logger()

ReplyCallback = Callable[[DIDCommReply], None]
# When it came, what, from whom, and where it leads to.
_QueuedForward = tuple[float, bytes, str, ReplyCallback, Callable[[], None]]


class _PendingForward(NamedTuple):
    """A forward that is being stored. :param recipient: whose queue it goes to."""

    record: RequestRecord
    found: FastForward
    recipient: str
    answer: ReplyCallback


class IRequestGate(Protocol):
    """Where work is let in; :class:`mediatord.ratelimit.request_gate.RequestGate`."""

    def enter(self) -> bool:
        """Whether work may begin at once."""

    def leave(self) -> None:
        """It is done."""


@dataclass(frozen=True, slots=True)
class FastPathContext:
    """
    What the short way leads through, and where it may end.

    :param read: a usual forward, or None for anything else; never raises.
    """

    gate: IRequestGate
    read: Callable[[bytes], FastForward | None]
    forward_router: ForwardRouter
    packer: MessagePacker


class ForwardFastPath:
    """
    Takes usual forwards.

    :param settings: some leave nothing to be taken.
    """

    def __init__(self, route: ForwardContext, settings: ForwardSettings, context: FastPathContext) -> None:
        self._route = route
        self._settings = settings
        self._context = context
        self._waiting: list[_QueuedForward] = []
        self._rejected: list[Callable[[], None]] = []
        self._is_enabled = not (settings.rewrap or settings.registered_senders_only)

    def take(self, raw: bytes, peer: str, answer: ReplyCallback, fallback: Callable[[], None]) -> bool:
        """
        Take a message that came by POST, if it may be a usual forward.

        It is looked at when the reactor's turn ends, together with all others that came in it: going the same steps
        for one after the other is a seventh faster than going all steps for each.

        :param peer: who is charged for it.
        :param answer: called once, now or later, with what :meth:`Mediator.receive` would return.
        :param otherwise: called instead if it is something else; then nothing has happened.
        :return: whether one of them will be called.
        """
        gate = self._context.gate
        if not self._is_enabled or not gate.enter():
            return False
        if not self._route.admission.try_charge_anonymous(peer, 1 + len(raw) // SMALL_REQUEST_BYTES):
            gate.leave()
            if not self._waiting:
                return False
            # Some of those that wait may turn out not to be charged to the address: that is to be known first.
            self._rejected.append(fallback)
            return True
        if not self._waiting:
            self._route.clock.callLater(0, self._process_queued)
        self._waiting.append((self._route.recorder.steady(), raw, peer, answer, fallback))
        return True

    def _process_queued(self) -> None:
        waiting, self._waiting = self._waiting, []
        rejected, self._rejected = self._rejected, []
        now = self._route.clock.seconds()
        requests = []
        for one in waiting:
            request = self._read(one, now)
            if request is None:
                self._leave(one)
            else:
                requests.append(request)
        if requests:
            self._deposit(requests, now)
        for fallback in rejected:
            _call_fallback(fallback)

    def _read(self, one: _QueuedForward, now: float) -> _PendingForward | None:
        came, raw, peer, answer, _ = one
        began = perf_counter()
        try:
            found = self._context.read(raw)
            recipient = None if found is None else self._recipient(found, now)
        except Exception:
            _log.failure("reading a message failed", redact_failure())
            return None  # whatever it is, it concerns no other message
        if found is None or recipient is None:
            return None
        record = self._route.recorder.begin("didcomm", peer, len(raw), Stopwatch(perf_counter() - began), came)
        return _PendingForward(record, found, recipient, answer)

    def _leave(self, one: _QueuedForward) -> None:
        _, raw, peer, _, fallback = one
        self._route.admission.refund_anonymous(peer, 1 + len(raw) // SMALL_REQUEST_BYTES)
        self._context.gate.leave()
        _call_fallback(fallback)

    def _recipient(self, found: FastForward, now: float) -> str | None:
        """Whose queue it goes to; None if that cannot be said at once, or it does not go there as it is."""
        recipient = canonicalize_did(found.next)
        if self._route.owns(recipient) or len(found.payload) > self._settings.max_payload:
            return None
        if found.expires_time is not None and found.expires_time <= now:
            return None
        if is_did_peer_3(recipient) or recipient in self._settings.routing_keys:
            return None
        return recipient

    def _deposit(self, requests: Sequence[_PendingForward], now: float) -> None:
        # None in place of what has been answered.
        waiting: list[_PendingForward | None] = list(requests)
        early: EarlyResultCallback = partial(self._answer_early, waiting)
        done: Deferred[Sequence[DIDCommReply]] = maybeDeferred(self._begin, requests, now, early).addCallback(
            self._replies, waiting
        )
        done.addErrback(self._refusals, waiting)
        done.addCallback(self._finish_all, waiting)
        done.addErrback(lambda failure: _log.failure("serving messages failed", redact_failure(failure)))

    def _begin(
        self, requests: Sequence[_PendingForward], now: float, early: EarlyResultCallback
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        route = self._route
        deposits = [
            EnqueueRequest(
                one.recipient,
                (self._payload(one.found),),
                compute_expiry(one.found, now, self._settings.ttl),
                origin=route.origins.compute(one.recipient, one.record.peer, None),
            )
            for one in requests
        ]
        with request_scope(route.clock):
            return route.store.enqueue_each(deposits, early)

    def _payload(self, found: FastForward) -> Payload:
        return Payload(self._route.sources.new_message_id(), found.payload, found.form)

    def _answer_early(
        self, waiting: list[_PendingForward | None], outcomes: Sequence[tuple[int, EnqueueResult | MediatorError]]
    ) -> None:
        """Some are stored: they do not wait for strangers that came in the same reactor iteration."""
        requests, replies = [], []
        for place, outcome in outcomes:
            one, waiting[place] = waiting[place], None
            if one is not None:
                requests.append(one)
                replies.append(self._dispatch(one, outcome))
        self._finish(replies, requests)

    def _replies(
        self, outcomes: Sequence[EnqueueResult | MediatorError], waiting: Sequence[_PendingForward | None]
    ) -> Sequence[DIDCommReply]:
        """Of those that wait, in order."""
        return [
            self._dispatch(one, outcome) for one, outcome in zip(waiting, outcomes, strict=True) if one is not None
        ]

    def _dispatch(self, one: _PendingForward, outcome: EnqueueResult | MediatorError) -> DIDCommReply:
        if isinstance(outcome, MediatorError):
            return self._refusal(one, outcome)
        try:
            self._context.forward_router.dispatch(one.record, outcome, None)
        except Exception:
            _log.failure("serving a message failed", redact_failure())
            return self._refusal(one, InternalFault())
        return ACCEPTED

    def _refusals(self, failure: Failure, waiting: Sequence[_PendingForward | None]) -> Sequence[DIDCommReply]:
        error = failure.value
        if not isinstance(error, MediatorError):
            _log.failure("serving messages failed", redact_failure(failure))
            error = InternalFault()
        return [self._refusal(one, error) for one in waiting if one is not None]

    def _refusal(self, one: _PendingForward, error: MediatorError) -> DIDCommReply:
        release_traceback(error)
        if isinstance(error, InternalFault):
            return self._context.packer.refuse_unopened(error)
        found = one.found
        return self._context.packer.refuse_anonymous(error, found.id, found.thread, found.kid)

    def _finish_all(self, replies: Sequence[DIDCommReply], waiting: Sequence[_PendingForward | None]) -> None:
        self._finish(replies, [one for one in waiting if one is not None])

    def _finish(self, replies: Sequence[DIDCommReply], requests: Sequence[_PendingForward]) -> None:
        """Whatever fails on the way, each is answered, and nothing is waited for that is over."""
        for one, reply in zip(requests, replies, strict=True):
            try:
                self._end(one, reply)
            except Exception:
                _log.failure("telling of a message failed", redact_failure())
        # Answers are in the kernel before the turn ends: whoever is killed then has told the log of what it accepted.
        self._route.recorder.settle()
        for one, reply in zip(requests, replies, strict=True):
            try:
                one.answer(reply)
            except Exception:
                _log.failure("answering a message failed", redact_failure())
            finally:
                self._context.gate.leave()

    def _end(self, one: _PendingForward, reply: DIDCommReply) -> None:
        self._route.recorder.end(
            one.record,
            status=reply.status,
            fault=reply.fault,
            kind=FORWARD_NAME,
            sender=None,
            session=None,
            code=reply.code,
        )


def _call_fallback(fallback: Callable[[], None]) -> None:
    try:
        fallback()
    except Exception:
        _log.failure("beginning a request failed", redact_failure())  # and it concerns no other
