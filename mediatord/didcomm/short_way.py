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

from mediatord.admission import SMALL
from mediatord.deadline import one_request
from mediatord.didcomm.exchange import ACCEPTED, Reply
from mediatord.didcomm.packing import Packing
from mediatord.didcomm.routing import FORWARD_NAME, Route, Routing, RoutingSettings
from mediatord.errors import InternalFault, MediatorError
from mediatord.faults import release_frames, without_text
from mediatord.interfaces import Deposit, Deposited, EarlyOutcomes, Payload
from mediatord.journal import Told
from mediatord.protocol.canonical_did import canonical_did, is_short_of_other
from mediatord.protocol.didcomm.forward import expiry
from mediatord.protocol.didcomm.usual import UsualForward
from mediatord.stopwatch import Stopwatch

_log = Logger()

Answer = Callable[[Reply], None]
# When it came, what, from whom, and where it leads to.
_Waiting = tuple[float, bytes, str, Answer, Callable[[], None]]


class _Request(NamedTuple):
    """A forward that is being stored. :param recipient: whose queue it goes to."""

    told: Told
    found: UsualForward
    recipient: str
    answer: Answer


class Door(Protocol):
    """Where work is let in; :class:`mediatord.gate.Gate`."""

    def enter(self) -> bool:
        """Whether work may begin at once."""

    def leave(self) -> None:
        """It is done."""


@dataclass(frozen=True, slots=True)
class Ways:
    """
    What the short way leads through, and where it may end.

    :param read: a usual forward, or None for anything else; never raises.
    """

    door: Door
    read: Callable[[bytes], UsualForward | None]
    routing: Routing
    packing: Packing


class ShortWay:
    """
    Takes usual forwards.

    :param settings: some leave nothing to be taken.
    """

    def __init__(self, route: Route, settings: RoutingSettings, ways: Ways) -> None:
        self._route = route
        self._settings = settings
        self._ways = ways
        self._waiting: list[_Waiting] = []
        self._crowded_out: list[Callable[[], None]] = []
        self._leads_anywhere = not (settings.rewrap or settings.registered_senders_only)

    def take(self, raw: bytes, peer: str, answer: Answer, otherwise: Callable[[], None]) -> bool:
        """
        Take a message that came by POST, if it may be a usual forward.

        It is looked at when the reactor's turn ends, together with all others that came in it: going the same steps
        for one after the other is a seventh faster than going all steps for each.

        :param peer: who is charged for it.
        :param answer: called once, now or later, with what :meth:`Mediator.receive` would return.
        :param otherwise: called instead if it is something else; then nothing has happened.
        :return: whether one of them will be called.
        """
        door = self._ways.door
        if not self._leads_anywhere or not door.enter():
            return False
        if not self._route.admission.stranger_at_once(peer, 1 + len(raw) // SMALL):
            door.leave()
            if not self._waiting:
                return False
            # Some of those that wait may turn out not to be charged to the address: that is to be known first.
            self._crowded_out.append(otherwise)
            return True
        if not self._waiting:
            self._route.clock.callLater(0, self._turn_ended)
        self._waiting.append((self._route.journal.steady(), raw, peer, answer, otherwise))
        return True

    def _turn_ended(self) -> None:
        waiting, self._waiting = self._waiting, []
        crowded_out, self._crowded_out = self._crowded_out, []
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
        for otherwise in crowded_out:
            _go(otherwise)

    def _read(self, one: _Waiting, now: float) -> _Request | None:
        came, raw, peer, answer, _ = one
        began = perf_counter()
        try:
            found = self._ways.read(raw)
            recipient = None if found is None else self._recipient(found, now)
        except Exception:
            _log.failure("reading a message failed", without_text())
            return None  # whatever it is, it concerns no other message
        if found is None or recipient is None:
            return None
        told = self._route.journal.begin("didcomm", peer, len(raw), Stopwatch(perf_counter() - began), came)
        return _Request(told, found, recipient, answer)

    def _leave(self, one: _Waiting) -> None:
        _, raw, peer, _, otherwise = one
        self._route.admission.not_a_stranger(peer, 1 + len(raw) // SMALL)
        self._ways.door.leave()
        _go(otherwise)

    def _recipient(self, found: UsualForward, now: float) -> str | None:
        """Whose queue it goes to; None if that cannot be said at once, or it does not go there as it is."""
        recipient = canonical_did(found.next)
        if self._route.owns(recipient) or len(found.payload) > self._settings.max_payload:
            return None
        if found.expires_time is not None and found.expires_time <= now:
            return None
        if is_short_of_other(recipient) or recipient in self._settings.routing_keys:
            return None
        return recipient

    def _deposit(self, requests: Sequence[_Request], now: float) -> None:
        # None in place of what has been answered.
        waiting: list[_Request | None] = list(requests)
        early: EarlyOutcomes = partial(self._answer_early, waiting)
        done: Deferred[Sequence[Reply]] = maybeDeferred(self._begin, requests, now, early).addCallback(
            self._replies, waiting
        )
        done.addErrback(self._refusals, waiting)
        done.addCallback(self._finish_all, waiting)
        done.addErrback(lambda failure: _log.failure("serving messages failed", without_text(failure)))

    def _begin(
        self, requests: Sequence[_Request], now: float, early: EarlyOutcomes
    ) -> Deferred[list[Deposited | MediatorError]]:
        route = self._route
        deposits = [
            Deposit(
                one.recipient,
                (self._payload(one.found),),
                expiry(one.found, now, self._settings.ttl),
                origin=route.origins.of(one.recipient, one.told.peer, None),
            )
            for one in requests
        ]
        with one_request(route.clock):
            return route.store.deposit_each(deposits, early)

    def _payload(self, found: UsualForward) -> Payload:
        return Payload(self._route.sources.new_message_id(), found.payload, found.form)

    def _answer_early(
        self, waiting: list[_Request | None], outcomes: Sequence[tuple[int, Deposited | MediatorError]]
    ) -> None:
        """Some are stored: they do not wait for strangers that came in the same reactor iteration."""
        requests, replies = [], []
        for place, outcome in outcomes:
            one, waiting[place] = waiting[place], None
            if one is not None:
                requests.append(one)
                replies.append(self._hand_over(one, outcome))
        self._finish(replies, requests)

    def _replies(
        self, outcomes: Sequence[Deposited | MediatorError], waiting: Sequence[_Request | None]
    ) -> Sequence[Reply]:
        """Of those that wait, in order."""
        return [
            self._hand_over(one, outcome) for one, outcome in zip(waiting, outcomes, strict=True) if one is not None
        ]

    def _hand_over(self, one: _Request, outcome: Deposited | MediatorError) -> Reply:
        if isinstance(outcome, MediatorError):
            return self._refusal(one, outcome)
        try:
            self._ways.routing.hand_over(one.told, outcome, None)
        except Exception:
            _log.failure("serving a message failed", without_text())
            return self._refusal(one, InternalFault())
        return ACCEPTED

    def _refusals(self, failure: Failure, waiting: Sequence[_Request | None]) -> Sequence[Reply]:
        error = failure.value
        if not isinstance(error, MediatorError):
            _log.failure("serving messages failed", without_text(failure))
            error = InternalFault()
        return [self._refusal(one, error) for one in waiting if one is not None]

    def _refusal(self, one: _Request, error: MediatorError) -> Reply:
        release_frames(error)
        if isinstance(error, InternalFault):
            return self._ways.packing.refuse_unopened(error)
        found = one.found
        return self._ways.packing.refuse_anonymous(error, found.id, found.thread, found.kid)

    def _finish_all(self, replies: Sequence[Reply], waiting: Sequence[_Request | None]) -> None:
        self._finish(replies, [one for one in waiting if one is not None])

    def _finish(self, replies: Sequence[Reply], requests: Sequence[_Request]) -> None:
        """Whatever fails on the way, each is answered, and nothing is waited for that is over."""
        for one, reply in zip(requests, replies, strict=True):
            try:
                self._end(one, reply)
            except Exception:
                _log.failure("telling of a message failed", without_text())
        # Answers are in the kernel before the turn ends: whoever is killed then has told the log of what it accepted.
        self._route.journal.settle()
        for one, reply in zip(requests, replies, strict=True):
            try:
                one.answer(reply)
            except Exception:
                _log.failure("answering a message failed", without_text())
            finally:
                self._ways.door.leave()

    def _end(self, one: _Request, reply: Reply) -> None:
        self._route.journal.end(
            one.told,
            status=reply.status,
            fault=reply.fault,
            kind=FORWARD_NAME,
            sender=None,
            session=None,
            code=reply.code,
        )


def _go(otherwise: Callable[[], None]) -> None:
    try:
        otherwise()
    except Exception:
        _log.failure("beginning a request failed", without_text())  # and it concerns no other
