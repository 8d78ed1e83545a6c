"""
Fast paths of the most frequent messages: forwards that come by POST, and acknowledgements that come on a socket.

What :meth:`~mediatord.didcomm.dispatcher.DIDCommDispatcher.receive` does with one message in coroutines is done here
in plain calls, for all that arrive in one reactor iteration together; only the commit is awaited. Taking each step
for all of them in turn is faster by a seventh than taking all steps for each. All other messages, and all that would
be refused before the store is changed, are handed to the general path as if they had not been here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Generic, NamedTuple, Protocol, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.didcomm.dispatcher import DIDCommDispatcher
from mediatord.didcomm.forward_router import FORWARD_NAME, ForwardRouter, SenderFingerprint
from mediatord.didcomm.messages import ACCEPTED, MessageOrigin, UnpackedMessage
from mediatord.didcomm.pickup import Pickup
from mediatord.errors import ExpiredForward, InternalFault, MediatorError, StoreUnavailable
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.canonical_did import DID_PEER_3, canonicalize_did
from mediatord.protocol.didcomm.forward import FastForward, FastForwardParser, compute_expiry
from mediatord.ratelimit.admission import RequestGate, RequestMemoryBudget, RequestReply, estimate_request_memory
from mediatord.ratelimit.rate_limiter import SMALL_REQUEST_BYTES, compute_request_cost
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.memory_reclaimer import release_traceback
from mediatord.runtime.request_time import Stopwatch, request_deadline
from mediatord.store.interfaces.messages import (
    AcknowledgementRequest,
    AcknowledgementResult,
    EnqueueRequest,
    EnqueueResult,
    Payload,
)
from mediatord.store.interfaces.store import Account

_log = Logger()

ReplyCallback = Callable[[RequestReply], None]


class _Pending(Protocol):
    """A message that waits for the store."""

    @property
    def record(self) -> RequestRecord: ...

    @property
    def answer(self) -> ReplyCallback: ...


P = TypeVar("P", bound=_Pending)
R = TypeVar("R")


class _FastPath(Generic[P, R]):
    """
    Answers messages when the store has changed: the part that all fast paths have in common.

    :param push: pushes what was stored, all of it together; returns the ids of the messages that a socket took.
        None if nothing is to be pushed.
    """

    def __init__(
        self,
        context: DIDCommContext,
        gate: RequestGate,
        push: Callable[[Sequence[R]], Container[str]] | None = None,
    ) -> None:
        self._context = context
        self._gate = gate
        self._push = push

    def _finish(self, one: P, result: R, taken_here: Container[str]) -> RequestReply:
        """Do what follows the change of the store; the reply. :param taken_here: the result of the push."""
        raise NotImplementedError

    def _refuse(self, one: P, error: MediatorError) -> RequestReply:
        """The reply for an error, as of the general path."""
        raise NotImplementedError

    def _wait_for(self, stored: Deferred[list[R | MediatorError]], pending: list[P | None]) -> None:
        """Answer messages when the store has changed. :param pending: those answered are replaced by None."""
        stored.addCallback(self._complete, pending)
        stored.addErrback(self._refuse_all, pending)
        stored.addErrback(lambda failure: _log.failure("processing messages failed", redact_failure(failure)))

    def _complete(self, outcomes: Sequence[R | MediatorError], pending: list[P | None]) -> None:
        if len(outcomes) != len(pending):
            raise ValueError("the store lost a message")
        self._answer(pending, enumerate(outcomes))

    def _refuse_all(self, failure: Failure, pending: list[P | None]) -> None:
        error = failure.value
        if not isinstance(error, MediatorError):
            _log.failure("processing messages failed", redact_failure(failure))
            error = InternalFault()
        self._answer(pending, enumerate([error] * len(pending)))

    def _answer(self, pending: list[P | None], outcomes: Iterable[tuple[int, R | MediatorError]]) -> None:
        """
        Finish, record and answer those of which the outcome is known; whatever fails, each is answered once.

        :param outcomes: with their places in `pending`.
        """
        context, known, results, finished = self._context, [], [], []
        for place, outcome in outcomes:
            one = pending[place]
            if one is not None:
                pending[place] = None
                known.append((one, outcome))
                if not isinstance(outcome, MediatorError):
                    results.append(outcome)
        taken_here: Container[str] = ()
        if self._push is not None:
            try:
                taken_here = self._push(results)
            except Exception:
                _log.failure("pushing messages failed", redact_failure())
        for one, outcome in known:
            reply = self._make_reply(one, outcome, taken_here)
            finished.append((one, reply))
            try:
                context.recorder.end_request(one.record, status=reply.status, fault=reply.fault, code=reply.code)
            except Exception:
                _log.failure("recording a message failed", redact_failure())
        self._reply_all(finished)

    def _make_reply(self, one: P, outcome: R | MediatorError, taken_here: Container[str]) -> RequestReply:
        if isinstance(outcome, MediatorError):
            error = outcome
        else:
            try:
                return self._finish(one, outcome, taken_here)
            except MediatorError as refusal:
                error = refusal
            except Exception:
                _log.failure("processing a message failed", redact_failure())
                error = InternalFault()
        release_traceback(error)
        return self._try_refuse(one, error)

    def _reply_all(self, finished: Sequence[tuple[P, RequestReply]]) -> None:
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

    def _try_refuse(self, one: P, error: MediatorError) -> RequestReply:
        try:
            return self._refuse(one, error)
        except Exception:
            _log.failure("refusing a message failed", redact_failure())
            return self._context.packer.refuse(InternalFault(), None)


def _call_fallback(fallback: Callable[[], None]) -> None:
    try:
        fallback()
    except Exception:
        _log.failure("starting a request failed", redact_failure())  # it concerns no other


class _ReceivedForward(NamedTuple):
    """:ivar received_at: by the recorder's monotonic clock."""

    received_at: float
    raw: bytes
    peer: str
    answer: ReplyCallback
    fallback: Callable[[], None]


class _PendingForward(NamedTuple):
    """A forward that is being stored."""

    record: RequestRecord
    forward: FastForward
    request: EnqueueRequest
    answer: ReplyCallback


class ForwardFastPath(_FastPath[_PendingForward, EnqueueResult]):
    """
    Takes forwards of the common form (UC-021 main flow): nearly all traffic is anoncrypted forwards with one payload
    for a registered recipient.
    """

    def __init__(
        self,
        context: DIDCommContext,
        gate: RequestGate,
        parser: FastForwardParser,
        router: ForwardRouter,
        fingerprints: SenderFingerprint,
    ) -> None:
        super().__init__(context, gate, router.push)
        self._parser = parser
        self._router = router
        self._fingerprints = fingerprints
        self._received: list[_ReceivedForward] = []
        self._over_limit: list[Callable[[], None]] = []
        self._is_enabled = not (context.rewrap or context.registered_senders_only)

    def take(self, raw: bytes, peer: str, answer: ReplyCallback, fallback: Callable[[], None]) -> bool:
        """
        Take a message that came by POST, if it may be a forward of the common form.

        :param peer: rate limit key that is charged.
        :param answer: called once, now or later, with what the general path would return.
        :param fallback: called instead for any other message; then nothing has happened.
        :return: whether one of them will be called.
        """
        if not self._is_enabled or not self._gate.enter():
            return False
        if not self._context.rate_limiter.try_charge_anonymous(peer, 1 + len(raw) // SMALL_REQUEST_BYTES):
            self._gate.leave()
            if not self._received:
                return False
            # Messages received before may turn out not to be charged to the address, which has to be known first.
            self._over_limit.append(fallback)
            return True
        if not self._received:
            self._context.clock.callLater(0, self._process_received)
        self._received.append(_ReceivedForward(self._context.recorder.monotonic(), raw, peer, answer, fallback))
        return True

    def _process_received(self) -> None:
        received, self._received = self._received, []
        over_limit, self._over_limit = self._over_limit, []
        context, now = self._context, self._context.clock.seconds()
        pending: list[_PendingForward | None] = []
        requests = []
        for one in received:
            forward = self._read(one, now)
            if forward is not None:
                pending.append(forward)
                requests.append(forward.request)
                continue
            context.rate_limiter.refund_anonymous(one.peer, 1 + len(one.raw) // SMALL_REQUEST_BYTES)
            self._gate.leave()
            _call_fallback(one.fallback)
        if pending:
            try:
                with request_deadline(context.clock):
                    stored = context.store.enqueue_each(requests, partial(self._answer, pending))
            except Exception:
                stored = fail(Failure())
            self._wait_for(stored, pending)
        for fallback in over_limit:
            _call_fallback(fallback)

    def _read(self, received: _ReceivedForward, now: float) -> _PendingForward | None:
        """None for a message that the general path has to read, or to refuse."""
        began, context = perf_counter(), self._context
        try:
            forward = self._parser.read(received.raw)
            if forward is None or len(forward.payload) > context.max_payload:
                return None
            recipient = canonicalize_did(forward.next)
            if recipient in context.own_dids or recipient.startswith(DID_PEER_3) or recipient in context.routing_keys:
                return None
            expires_at = compute_expiry(forward.expires_time, now, context.ttl)
            payload = Payload(context.new_stored_id(now), forward.payload, forward.form)
            fingerprint = self._fingerprints.compute(recipient, received.peer, None)
        except ExpiredForward:
            return None
        except Exception:
            _log.failure("parsing a message failed", redact_failure())
            return None  # it concerns no other message
        watch = Stopwatch(perf_counter() - began)
        record = context.recorder.begin_request(
            "didcomm", received.peer, len(received.raw), watch, received.received_at
        )
        record.kind = FORWARD_NAME
        request = EnqueueRequest(recipient, (payload,), expires_at, origin=fingerprint)
        return _PendingForward(record, forward, request, received.answer)

    def _finish(self, one: _PendingForward, result: EnqueueResult, taken_here: Container[str]) -> RequestReply:
        self._router.dispatch(one.record, result, None, taken_here)
        return ACCEPTED

    def _refuse(self, one: _PendingForward, error: MediatorError) -> RequestReply:
        packer, forward = self._context.packer, one.forward
        if isinstance(error, InternalFault):
            return packer.refuse(error, None)
        return packer.refuse_anonymous(error, forward.id, forward.thread, forward.kid)


class _ReceivedAcknowledgement(NamedTuple):
    """:ivar received_at: by the recorder's monotonic clock."""

    received_at: float
    raw: bytes
    origin: MessageOrigin
    answer: ReplyCallback
    fallback: Callable[[UnpackedMessage | None], None]


class _PendingAcknowledgement(NamedTuple):
    """An acknowledgement that is being stored."""

    record: RequestRecord
    request: MessageRequest
    acknowledgement: AcknowledgementRequest
    answer: ReplyCallback


# Larger acknowledgements take the general path.
MAX_FAST_ACKNOWLEDGEMENT_BYTES = 16_384


class AcknowledgementFastPath(_FastPath[_PendingAcknowledgement, AcknowledgementResult]):
    """Takes small `messages-received` that come on a socket."""

    def __init__(
        self,
        context: DIDCommContext,
        gate: RequestGate,
        memory: RequestMemoryBudget,
        dispatcher: DIDCommDispatcher,
        pickup: Pickup,
    ) -> None:
        super().__init__(context, gate)
        self._memory = memory
        self._dispatcher = dispatcher
        self._pickup = pickup
        self._received: list[_ReceivedAcknowledgement] = []
        self._pending: list[_PendingAcknowledgement | None] = []
        self._is_collecting = False

    def take(
        self,
        raw: bytes,
        origin: MessageOrigin,
        answer: ReplyCallback,
        fallback: Callable[[UnpackedMessage | None], None],
    ) -> bool:
        """
        Take a message that came on a socket, if it may be an acknowledgement of the common form.

        :param answer: called once, later, with what the general path would return.
        :param fallback: called instead for any other message, which is passed if it has been opened; then nothing
            has happened.
        :return: whether one of them will be called.
        """
        # What is no envelope at all is refused at once.
        if len(raw) > MAX_FAST_ACKNOWLEDGEMENT_BYTES or not raw.startswith(b"{") or not self._gate.enter():
            return False
        if not self._received:
            self._context.clock.callLater(0, self._process_received)
        received_at = self._context.recorder.monotonic()
        self._received.append(_ReceivedAcknowledgement(received_at, raw, origin, answer, fallback))
        return True

    def _process_received(self) -> None:
        received, self._received = self._received, []
        self._is_collecting = True
        for one in received:
            request = self._read(one)
            if request is None:
                self._fall_back(one, None)
                continue
            with request_deadline(self._context.clock):
                account = self._dispatcher.find_account(request.received)
            account.addCallback(self._begin, request, one)
            account.addErrback(self._fail, request, one)
        self._store()

    def _read(self, received: _ReceivedAcknowledgement) -> MessageRequest | None:
        """None for a message that the general path has to read, or to refuse."""
        context, size = self._context, len(received.raw)
        cost, peer, session = compute_request_cost(size), received.origin.peer, received.origin.session
        memory = estimate_request_memory(size)
        if not context.rate_limiter.may_read(peer, cost) or not self._memory.try_acquire(peer, memory):
            return None
        opened = None
        try:
            opened = context.unpacker.open_at_once(received.raw)
        except Exception:
            _log.failure("parsing a message failed", redact_failure())  # it concerns no other message
        if opened is None:
            self._memory.release(peer, memory)
            return None
        watch = Stopwatch(opened.seconds)
        record = context.recorder.begin_request("didcomm", peer, size, watch, received.received_at)
        record.session = session.name if session else None
        return MessageRequest(opened, received.origin, record, cost, None)

    def _begin(self, account: Account | None, request: MessageRequest, received: _ReceivedAcknowledgement) -> None:
        acknowledgement = None if account is None else self._dispatcher.begin_acknowledgement(request, account)
        if acknowledgement is None:
            self._fall_back(received, request)
            return
        answer = partial(self._release_and_answer, request, received.answer)
        self._pending.append(_PendingAcknowledgement(request.record, request, acknowledgement, answer))
        if not self._is_collecting:
            # The account was read: perhaps together with others.
            self._is_collecting = True
            self._context.clock.callLater(0, self._store)

    def _fail(self, failure: Failure, request: MessageRequest, received: _ReceivedAcknowledgement) -> None:
        """The account cannot be read, which the general path has to find out."""
        if not failure.check(MediatorError):
            _log.failure("processing a message failed", redact_failure(failure))
        self._fall_back(received, request)

    def _release_and_answer(self, request: MessageRequest, answer: ReplyCallback, reply: RequestReply) -> None:
        self._release_memory(request)
        answer(reply)

    def _release_memory(self, request: MessageRequest) -> None:
        self._memory.release(request.origin.peer, estimate_request_memory(request.record.size))

    def _fall_back(self, received: _ReceivedAcknowledgement, request: MessageRequest | None) -> None:
        self._gate.leave()
        if request is not None:
            self._release_memory(request)
        _call_fallback(partial(received.fallback, None if request is None else request.received))

    def _store(self) -> None:
        """Store the acknowledgements of accounts that are known by now."""
        self._is_collecting = False
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        try:
            with request_deadline(self._context.clock):
                stored = self._context.store.acknowledge_each([one.acknowledgement for one in pending if one])
        except Exception:
            stored = fail(Failure())
        self._wait_for(stored, pending)

    def _finish(
        self, one: _PendingAcknowledgement, result: AcknowledgementResult, taken_here: Container[str]
    ) -> RequestReply:
        assert one.request.account is not None
        status = self._pickup.finish_acknowledgement(one.request, one.request.account, result)
        if status is None and one.acknowledgement.with_status:
            raise StoreUnavailable
        return self._dispatcher.reply(one.request, status)

    def _refuse(self, one: _PendingAcknowledgement, error: MediatorError) -> RequestReply:
        self._dispatcher.cancel_acknowledgement(one.request)
        return self._context.packer.refuse(error, None if isinstance(error, InternalFault) else one.request.received)
