"""Protocols that need no account: trust ping, discover features, problem reports, empty (reference section 7)."""

from __future__ import annotations

from collections.abc import Callable

from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.errors import TooManyErrors
from mediatord.protocol.didcomm.discover_features import DISCLOSE, parse_queries, select_features
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter

MAX_PROBLEM_REPORTS = 10
PROBLEM_REPORT_PERIOD = 3600.0


class UtilityProtocols:
    """
    Trust ping, discover features, problem reports and empty messages.

    :param max_receive_bytes: returns the constraint to disclose.
    """

    def __init__(self, context: DIDCommContext, max_receive_bytes: Callable[[], int]) -> None:
        self._context = context
        self._max_receive_bytes = max_receive_bytes
        self._reports = SlidingWindowLimiter(MAX_PROBLEM_REPORTS, PROBLEM_REPORT_PERIOD)
        self._told = SlidingWindowLimiter(1, PROBLEM_REPORT_PERIOD)

    async def ping(self, request: MessageRequest) -> OutgoingMessage | None:
        """A `ping-response`, unless none is requested or the sender is not authenticated."""
        message = request.received.message
        wants_response = message.require_body().get("response_requested", True) is not False
        if not wants_response or request.received.authcrypt_sender is None:
            return None
        return self._context.packer.answer(message, "https://didcomm.org/trust-ping/2.0/ping-response", {})

    async def queries(self, request: MessageRequest) -> OutgoingMessage | None:
        """The features that match the queries."""
        message = request.received.message
        found = select_features(parse_queries(message.require_body()), self._max_receive_bytes())
        return self._context.packer.answer(message, DISCLOSE, {"disclosures": found})

    async def problem_report(self, request: MessageRequest) -> OutgoingMessage | None:
        """
        Never answered, but for one `max-errors-exceeded` to a peer that sends too many (reference 7.3).

        :raise TooManyErrors: once an hour and peer.
        """
        received, now = request.received, self._context.clock.seconds()
        who = received.sender or request.origin.peer
        if self._reports.admit(who, now) and not self._told.admit(who, now) and received.authcrypt_sender:
            raise TooManyErrors
        return None

    async def ignore(self, request: MessageRequest) -> OutgoingMessage | None:
        """No reply; only the headers of the message have an effect."""
        return None
