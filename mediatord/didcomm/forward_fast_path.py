"""
Fast path of forwards (UC-021 main flow).

Nearly all traffic is anoncrypted forwards with one payload for a registered recipient. What
:meth:`~mediatord.didcomm.dispatcher.DIDCommDispatcher.receive` does with one in coroutines is done here in plain
    calls, for all that arrive in one reactor iteration together; only the commit is awaited. Everything else, and all
    that would be refused before it is stored, is handed to the general path as if it had not been here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

from twisted.internet.defer import fail
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.clock import Stopwatch, request_scope
from mediatord.didcomm.forward_router import FORWARD_NAME, ForwardContext, ForwardRouter, ForwardSettings
from mediatord.didcomm.messages import ACCEPTED, DIDCommReply, MessagePacker
from mediatord.errors import InternalFault, MediatorError
from mediatord.log_redaction_and_throttle import redact_failure, release_traceback
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.canonical_did import canonicalize_did, is_did_peer_3
from mediatord.protocol.didcomm.forward import FastForward, FastForwardParser, compute_expiry
from mediatord.ratelimit.rate_limiter import SMALL_REQUEST_BYTES
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, Payload

_log = Logger()

ReplyCallback = Callable[[DIDCommReply], None]


class _ReceivedMessage(NamedTuple):
    """:ivar received_at: by the recorder's monotonic clock."""

    received_at: float
    raw: bytes
    peer: str
    answer: ReplyCallback
    fallback: Callable[[], None]


class _PendingForward(NamedTuple):
    """A forward that is being stored. :ivar recipient: owner of the queue."""

    record: RequestRecord
    forward: FastForward
    recipient: str
    answer: ReplyCallback


class IRequestGate(Protocol):
    """Tracks requests in flight; :class:`mediatord.ratelimit.request_gate.RequestGate`."""

    def enter(self) -> bool:
        """Whether a request may begin at once."""

    def leave(self) -> None:
        """A request is done."""


class ForwardFastPath:
    """
    Takes forwards of the common form.

    :param settings: some of them disable the fast path.
    """

    def __init__(
        self,
        context: ForwardContext,
        settings: ForwardSettings,
        gate: IRequestGate,
        parser: FastForwardParser,
        router: ForwardRouter,
        packer: MessagePacker,
    ) -> None:
        self._context = context
        self._settings = settings
        self._gate = gate
        self._parser = parser
        self._router = router
        self._packer = packer
        self._received: list[_ReceivedMessage] = []
        self._over_limit: list[Callable[[], None]] = []
        self._is_enabled = not (settings.rewrap or settings.registered_senders_only)

    def take(self, raw: bytes, peer: str, answer: ReplyCallback, fallback: Callable[[], None]) -> bool:
        """
        Take a message that came by POST, if it may be a forward of the common form.

        It is read at the end of the reactor iteration with all others that came in it: taking each step for all of
        them in turn is a seventh faster than taking all steps for each.

        :param peer: rate limit key that is charged.
        :param answer: called once, now or later, with what the general path would return.
        :param fallback: called instead for any other message; then nothing has happened.
        :return: whether one of them will be called.
        """
        if not self._is_enabled or not self._gate.enter():
            return False
        if not self._context.admission.try_charge_anonymous(peer, 1 + len(raw) // SMALL_REQUEST_BYTES):
            self._gate.leave()
            if not self._received:
                return False
            # Messages received before may turn out not to be charged to the address, which has to be known first.
            self._over_limit.append(fallback)
            return True
        if not self._received:
            self._context.clock.callLater(0, self._process_received)
        self._received.append(_ReceivedMessage(self._context.recorder.monotonic(), raw, peer, answer, fallback))
        return True

    def _process_received(self) -> None:
        received, self._received = self._received, []
        over_limit, self._over_limit = self._over_limit, []
        now = self._context.clock.seconds()
        pending: list[_PendingForward | None] = []
        for one in received:
            forward = self._read(one, now)
            if forward is not None:
                pending.append(forward)
                continue
            self._context.admission.refund_anonymous(one.peer, 1 + len(one.raw) // SMALL_REQUEST_BYTES)
            self._gate.leave()
            _call_fallback(one.fallback)
        if pending:
            self._enqueue(pending, now)
        for fallback in over_limit:
            _call_fallback(fallback)

    def _read(self, received: _ReceivedMessage, now: float) -> _PendingForward | None:
        """None for a message that the general path has to read, or to refuse."""
        began, settings = perf_counter(), self._settings
        try:
            forward = self._parser.read(received.raw)
            if forward is None or len(forward.payload) > settings.max_payload:
                return None
            if forward.expires_time is not None and forward.expires_time <= now:
                return None
            recipient = canonicalize_did(forward.next)
            if self._context.owns(recipient) or is_did_peer_3(recipient) or recipient in settings.routing_keys:
                return None
        except Exception:
            _log.failure("reading a message failed", redact_failure())
            return None  # it concerns no other message
        watch = Stopwatch(perf_counter() - began)
        record = self._context.recorder.begin_request(
            "didcomm", received.peer, len(received.raw), watch, received.received_at
        )
        return _PendingForward(record, forward, recipient, received.answer)

    def _enqueue(self, pending: list[_PendingForward | None], now: float) -> None:
        """:param pending: those that were answered are replaced by None."""
        context, requests = self._context, []
        try:
            for one in pending:
                assert one is not None
                forward = one.forward
                requests.append(
                    EnqueueRequest(
                        one.recipient,
                        (Payload(context.new_message_id(now), forward.payload, forward.form),),
                        compute_expiry(forward, now, self._settings.ttl),
                        origin=context.origins.compute(one.recipient, one.record.peer, None),
                    )
                )
            with request_scope(context.clock):
                stored = context.store.enqueue_each(requests, partial(self._answer, pending))
        except Exception:
            stored = fail(Failure())
        stored.addCallback(self._complete, pending)
        stored.addErrback(self._refuse_all, pending)
        stored.addErrback(lambda failure: _log.failure("serving messages failed", redact_failure(failure)))

    def _complete(
        self, outcomes: Sequence[EnqueueResult | MediatorError], pending: list[_PendingForward | None]
    ) -> None:
        if len(outcomes) != len(pending):
            raise ValueError("the store lost a message")
        self._answer(pending, enumerate(outcomes))

    def _refuse_all(self, failure: Failure, pending: list[_PendingForward | None]) -> None:
        error = failure.value
        if not isinstance(error, MediatorError):
            _log.failure("serving messages failed", redact_failure(failure))
            error = InternalFault()
        self._answer(pending, enumerate([error] * len(pending)))

    def _answer(
        self,
        pending: list[_PendingForward | None],
        outcomes: Iterable[tuple[int, EnqueueResult | MediatorError]],
    ) -> None:
        """
        Dispatch, record and answer those of which the outcome is known; whatever fails, each is answered once.

        :param outcomes: with their places in `pending`.
        """
        context, finished = self._context, []
        for place, outcome in outcomes:
            one = pending[place]
            if one is None:
                continue
            pending[place] = None
            reply = ACCEPTED
            if isinstance(outcome, MediatorError):
                reply = self._refuse(one, outcome)
            else:
                try:
                    self._router.dispatch(one.record, outcome, None)
                except Exception:
                    _log.failure("serving a message failed", redact_failure())
                    reply = self._refuse(one, InternalFault())
            finished.append((one, reply))
            try:
                context.recorder.end_request(
                    one.record,
                    status=reply.status,
                    fault=reply.fault,
                    kind=FORWARD_NAME,
                    sender=None,
                    session=None,
                    code=reply.code,
                )
            except Exception:
                _log.failure("recording a message failed", redact_failure())
        self._reply_all(finished)

    def _reply_all(self, finished: Sequence[tuple[_PendingForward, DIDCommReply]]) -> None:
        # Replies reach the kernel at once: the log has to have these messages before.
        try:
            self._context.recorder.flush_events()
        except Exception:
            _log.failure("writing the event log failed", redact_failure())
        for one, reply in finished:
            try:
                one.answer(reply)
            except Exception:
                _log.failure("answering a message failed", redact_failure())
            finally:
                self._gate.leave()

    def _refuse(self, one: _PendingForward, error: MediatorError) -> DIDCommReply:
        release_traceback(error)
        if isinstance(error, InternalFault):
            return self._packer.refuse_unopened(error)
        forward = one.forward
        try:
            return self._packer.refuse_anonymous(error, forward.id, forward.thread, forward.kid)
        except Exception:
            _log.failure("refusing a message failed", redact_failure())
            return self._packer.refuse_unopened(InternalFault())


def _call_fallback(fallback: Callable[[], None]) -> None:
    try:
        fallback()
    except Exception:
        _log.failure("beginning a request failed", redact_failure())  # it concerns no other
