"""Trust ping, discover features, problem reports and empty messages (reference section 7)."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.exchange import Origin, Received
from mediatord.didcomm.packing import Packing
from mediatord.errors import TooManyErrors
from mediatord.interfaces import Account
from mediatord.protocol.didcomm.message import Draft
from mediatord.protocol.didcomm.small import (
    DISCLOSE,
    PING_RESPONSE,
    disclosures,
    read_queries,
    wants_response,
)
from mediatord.protocol.limits import SlidingWindow

MAX_REPORTS = 10
REPORT_PERIOD = 3600.0


class SmallTalk:
    """
    Answers that need no account.

    :param max_receive_bytes: disclosed as a constraint, as it is now.
    """

    def __init__(self, clock: IReactorTime, packing: Packing, max_receive_bytes: Callable[[], int]) -> None:
        self._clock = clock
        self._packing = packing
        self._max_receive_bytes = max_receive_bytes
        self._reports = SlidingWindow(MAX_REPORTS, REPORT_PERIOD)
        self._told = SlidingWindow(1, REPORT_PERIOD)

    async def ping(self, received: Received, account: Account | None, origin: Origin) -> Draft | None:
        """A `ping-response`, unless none is wanted or nobody is known to send it to."""
        if not wants_response(received.message.object()) or received.correspondent is None:
            return None
        return self._packing.answer(received.message, PING_RESPONSE, {})

    async def queries(self, received: Received, account: Account | None, origin: Origin) -> Draft | None:
        """What is served, as far as it was asked for."""
        found = disclosures(read_queries(received.message.object()), self._max_receive_bytes())
        return self._packing.answer(received.message, DISCLOSE, {"disclosures": found})

    async def problem_report(self, received: Received, account: Account | None, origin: Origin) -> Draft | None:
        """
        Never answered, but for one `max-errors-exceeded` to a peer that sends too many (reference 7.3).

        :raise TooManyErrors: once an hour and peer.
        """
        who, now = received.sender or origin.peer, self._clock.seconds()
        if self._reports.admit(who, now) and not self._told.admit(who, now) and received.correspondent:
            raise TooManyErrors
        return None

    async def nothing(self, received: Received, account: Account | None, origin: Origin) -> Draft | None:
        """Only the headers of the message matter."""
        return None
