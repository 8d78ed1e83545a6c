"""Operations of a store in several transactions: enqueues that are submitted together, and `acknowledge_once`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import InternalFault, MediatorError, StoreUnavailable
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.store.interfaces.messages import (
    AcknowledgementResult,
    EarlyResultCallback,
    EnqueueRequest,
    EnqueueResult,
    Payload,
)
from mediatord.store.interfaces.store import IStore

_log = Logger(namespace="mediatord.store")


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
        outcomes: dict[int, EnqueueResult | MediatorError] = {}
        unreported: list[int] = []

        def take(result: Any, place: int) -> None:
            outcomes[place] = _to_outcome(result)
            if early is not None and len(outcomes) < len(deposits):
                if not unreported:
                    # Results of one transaction arrive together, and are reported together.
                    self._clock.callLater(0, report, early)
                unreported.append(place)

        def report(early: EarlyResultCallback) -> None:
            places = unreported.copy()
            unreported.clear()
            if len(outcomes) < len(deposits):
                early([(place, outcomes[place]) for place in places])

        begun = [self.enqueue_all([one]).addCallback(lambda many: many[0]) for one in deposits]
        done = gatherResults([one.addBoth(take, place) for place, one in enumerate(begun)])
        return done.addCallback(lambda _: [outcomes[place] for place in range(len(deposits))])


def _to_outcome(result: Any) -> EnqueueResult | MediatorError:
    if isinstance(result, Failure):
        if isinstance(result.value, MediatorError):
            return result.value.with_traceback(None)
        # The others may have been stored, and their senders have to get that result.
        _log.failure("storing a message failed", redact_failure(result))
        return InternalFault()
    enqueued: EnqueueResult = result
    return enqueued


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
