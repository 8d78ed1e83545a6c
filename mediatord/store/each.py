"""Deposits that have nothing to do with each other, for stores that have no better way to do them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import InternalFault, MediatorError
from mediatord.faults import without_text
from mediatord.interfaces import Deposit, Deposited, EarlyOutcomes

_log = Logger(namespace="mediatord.store")

_Outcome = Deposited | MediatorError


def one_by_one(
    clock: IReactorTime,
    deposit: Callable[..., Deferred[Deposited]],
    deposits: Sequence[Deposit],
    early: EarlyOutcomes | None = None,
) -> Deferred[list[_Outcome]]:
    """
    As :meth:`~mediatord.interfaces.IMessageStore.deposit_each`.

    :param deposit: as :meth:`~mediatord.interfaces.IMessageStore.deposit`.
    """
    outcomes = _Outcomes(clock, len(deposits), early)
    for place, one in enumerate(deposits):
        begun = deposit(
            one.recipient_did, one.payloads, expires_at=one.expires_at, due_at=one.due_at, origin=one.origin
        )
        begun.addBoth(outcomes.take, place)
    return outcomes.done


class _Outcomes:
    """
    Collects the outcomes of several deposits.

    :param early: told of those of one reactor iteration together, while others are waiting.
    :ivar done: fires with all of them.
    """

    def __init__(self, clock: IReactorTime, number: int, early: EarlyOutcomes | None) -> None:
        self.done: Deferred[list[_Outcome]] = Deferred()
        self._clock = clock
        self._early = early
        self._left = number
        self._outcomes: list[_Outcome] = [InternalFault()] * number
        self._untold: list[int] = []
        self._telling: IDelayedCall
        self._is_telling = False
        if not number:
            self.done.callback([])

    def take(self, result: Any, place: int) -> None:
        """The deposit of this place is done, or has failed."""
        self._outcomes[place] = _outcome(result)
        self._left -= 1
        if not self._left:
            if self._is_telling:
                self._telling.cancel()
            self.done.callback(self._outcomes)
        elif self._early is not None:
            self._untold.append(place)
            if not self._is_telling:
                # Those of one transaction are done in one go: whoever waits for them is told once.
                self._is_telling = True
                self._telling = self._clock.callLater(0, self._tell, self._early)

    def _tell(self, early: EarlyOutcomes) -> None:
        self._is_telling = False
        untold, self._untold = self._untold, []
        early([(place, self._outcomes[place]) for place in untold])


def _outcome(result: Any) -> _Outcome:
    if isinstance(result, Failure):
        if isinstance(result.value, MediatorError):
            return result.value.with_traceback(None)
        # The others may have been stored, and their senders are to be told so.
        _log.failure("storing a message failed", without_text(result))
        return InternalFault()
    deposited: Deposited = result
    return deposited
