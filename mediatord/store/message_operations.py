"""Parts of message operations that backends share: ledger entries, backlog by age, enqueues in steps, observation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import InternalFault, MediatorError, StoreUnavailable
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.store.interfaces.messages import (
    AcknowledgementResult,
    AgeBucket,
    EarlyResultCallback,
    EnqueueRequest,
    EnqueueResult,
    LargeQueue,
    Payload,
    QueueBacklog,
    QueueTotals,
    new_stored_message_id,
)
from mediatord.store.interfaces.store import IStore

LedgerEntry = Literal["accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn"]
LEDGER_ENTRIES: tuple[LedgerEntry, ...] = ("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn")

# Hexadecimal digits of an id that are its time.
_TIME_DIGITS = 12


def complete_buckets(cohorts: Sequence[AgeBucket], messages: int, size: int | None) -> list[AgeBucket]:
    """
    Fill in the only bucket that is not exact, if there is one, from the totals.

    :param size: bytes of all; None if unknown.
    """
    unknown = [place for place, one in enumerate(cohorts) if not one.exact]
    if len(unknown) != 1:
        return list(cohorts)
    rest = messages - sum([one.messages for one in cohorts if one.exact])
    sizes = [one.bytes for one in cohorts if one.exact]
    left = None if size is None or None in sizes else size - sum([one or 0 for one in sizes])
    (place,) = unknown
    last = cohorts[place]
    # The totals may be of another moment, or estimates.
    whole = replace(last, messages=max(rest, last.messages), bytes=left, exact=True)
    return [*cohorts[:place], whole, *cohorts[place + 1 :]]


def get_lowest_id(time: float) -> str:
    """Prefix that is not greater than the ids of messages of this time or later, and greater than earlier ids."""
    return new_stored_message_id(max(time, 0.0))[:_TIME_DIGITS]


def get_id_ranges(bounds: Sequence[float]) -> list[tuple[str | None, str | None]]:
    """For each bucket the first id that may be in it, and the first that may not."""
    edges = [get_lowest_id(bound) for bound in bounds]
    return list(zip([*edges, None], [None, *edges], strict=True))


def build_backlog(
    halves: Sequence[Sequence[AgeBucket]], totals: Iterable[tuple[int, int | None]], largest: Iterable[LargeQueue]
) -> QueueBacklog:
    """
    Backlog of the two halves together.

    :param totals: messages and bytes of each.
    """
    messages, sizes = zip(*totals, strict=True)
    size = None if None in sizes else sum(sizes)
    return QueueBacklog(sum(messages), size, sum_buckets(*halves), tuple(largest))


def sum_buckets(some: Sequence[AgeBucket], others: Sequence[AgeBucket]) -> tuple[AgeBucket, ...]:
    """Buckets of the two halves together."""
    return tuple(
        AgeBucket(
            one.messages + other.messages,
            None if one.bytes is None or other.bytes is None else one.bytes + other.bytes,
            one.exact and other.exact,
        )
        for one, other in zip(some, others, strict=True)
    )


def find_earliest(*times: float | None) -> float | None:
    """The earliest of the times that are known."""
    return min([at for at in times if at is not None], default=None)


def add_queue_totals(one: QueueTotals, other: QueueTotals) -> QueueTotals:
    """Totals of the two halves together."""
    times = [at for at in (one.oldest_received_at, other.oldest_received_at) if at is not None]
    return QueueTotals(
        one.messages + other.messages,
        None if one.bytes is None or other.bytes is None else one.bytes + other.bytes,
        None if one.recipients is None or other.recipients is None else one.recipients + other.recipients,
        min(times, default=None),
    )


_log = Logger(namespace="mediatord.store")

_EnqueueOutcome = EnqueueResult | MediatorError


class IndependentEnqueues:
    """Enqueues of :class:`~mediatord.store.interfaces.messages.IMessageStore` as separate calls of `enqueue_all`."""

    _clock: IReactorTime

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        raise NotImplementedError

    def enqueue(
        self,
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[EnqueueResult]:
        enqueued = self.enqueue_all([EnqueueRequest(recipient_did, tuple(payloads), expires_at, due_at, origin)])
        return enqueued.addCallback(lambda one: one[0])

    def enqueue_each(
        self, deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        unreported: list[tuple[int, _EnqueueOutcome]] = []
        reports: list[IDelayedCall] = []

        def take(result: Any, place: int) -> _EnqueueOutcome:
            outcome = _to_outcome(result)
            if early is not None and len(deposits) > 1:
                unreported.append((place, outcome))
                if len(unreported) == 1:
                    # Results of one transaction arrive together, and are reported together.
                    reports.append(self._clock.callLater(0, report, early))
            return outcome

        def report(early: EarlyResultCallback) -> None:
            some, unreported[:] = unreported[:], []
            early(some)

        def end(outcomes: list[_EnqueueOutcome]) -> list[_EnqueueOutcome]:
            if reports and reports[-1].active():
                reports[-1].cancel()
            return outcomes

        begun: list[Deferred[_EnqueueOutcome]] = [
            self.enqueue(
                one.recipient_did, one.payloads, expires_at=one.expires_at, due_at=one.due_at, origin=one.origin
            ).addBoth(take, place)
            for place, one in enumerate(deposits)
        ]
        return gatherResults(begun).addCallback(end)


def _to_outcome(result: EnqueueResult | Failure) -> _EnqueueOutcome:
    if not isinstance(result, Failure):
        return result
    if isinstance(result.value, MediatorError):
        return result.value.with_traceback(None)
    # The others may have been stored, and their senders have to get that result.
    _log.failure("storing a message failed", redact_failure(result))
    return InternalFault()


async def acknowledge_in_steps(
    store: IStore, account: str, ids: Sequence[str], key: bytes, until: float, share: float, *, with_status: bool
) -> AcknowledgementResult | None:
    """:meth:`~mediatord.store.interfaces.store.IStore.acknowledge_once` in several transactions."""
    if not await store.claim_nonce(key, until, share):
        return None
    try:
        result = AcknowledgementResult(await store.acknowledge(account, ids))
    except Exception:
        # Nothing was removed, so the same acknowledgement may come again.
        await store.release_nonce(key)
        raise
    if with_status:
        # What was removed has to be reported in any case.
        try:
            result.status = await store.get_queue_status(account, None)
        except StoreUnavailable:
            pass
        except Exception:
            _log.failure("reading the status of a queue failed", redact_failure())
    return result


class OperationObserver(Protocol):
    """Called with the name and duration of an operation, in seconds."""

    def __call__(self, operation: str, seconds: float, /) -> None: ...


def ignore_observation(_operation: str, _seconds: float, /) -> None:
    """An :class:`OperationObserver` that does nothing."""


def log_store_fault(what: str, error: BaseException | None) -> None:
    """Log a failure by the kind of error only: its text may contain stored data."""
    code = getattr(error, "sqlite_errorname", None)
    _log.error("{what}: {error} {code}", event="store.failed", what=what, error=type(error).__name__, code=code)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one batch, and of the operations that are queued for batches."""

    batch: int = 512
    batch_bytes: int = 8_388_608
    waiting: int = 20_000
    waiting_bytes: int = 134_217_728
