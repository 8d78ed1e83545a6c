"""Protocols that need no account: trust ping, discover features, problem reports, empty (reference section 7)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.errors import InvalidBody, TooManyErrors
from mediatord.protocol.didcomm.message import OutgoingMessage
from mediatord.protocol.didcomm.push_notifications import NOTIFICATION_SENDER, PUSH_PROTOCOLS
from mediatord.push.registry import DeviceRegistry
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter

DISCLOSE = "https://didcomm.org/discover-features/2.0/disclose"
MAX_QUERIES = 100
_MAX_MATCH = 512

_SUPPORTED_PROTOCOLS: dict[str, list[str]] = {
    "https://didcomm.org/routing/2.0": ["mediator"],
    "https://didcomm.org/coordinate-mediation/2.0": ["mediator"],
    "https://didcomm.org/coordinate-mediation/3.0": ["mediator"],
    "https://didcomm.org/messagepickup/3.0": ["mediator"],
    "https://didcomm.org/trust-ping/2.0": ["receiver"],
    "https://didcomm.org/discover-features/2.0": ["responder"],
    "https://didcomm.org/out-of-band/2.0": ["sender"],
    "https://didcomm.org/report-problem/2.0": [],
    "https://didcomm.org/empty/1.0": [],
}
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
        queries = parse_queries(message.require_body())
        found = select_features(queries, self._max_receive_bytes(), self._context.devices)
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


def parse_queries(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """
    The queries of a discover-features request as (feature type, match).

    :raise InvalidBody: `queries` is not a list of at most 100 objects with two strings of at most 512 characters.
    """
    entries = body.get("queries")
    if not isinstance(entries, list) or len(entries) > MAX_QUERIES:
        raise InvalidBody
    queries = []
    for entry in entries:
        kind = entry.get("feature-type") if isinstance(entry, dict) else None
        match = entry.get("match") if isinstance(entry, dict) else None
        if not isinstance(kind, str):
            raise InvalidBody
        queries.append((kind, parse_match(match)))
    return queries


def parse_match(value: object) -> str:
    """
    An id of features, with wildcards.

    :raise InvalidBody: no string of at most 512 characters.
    """
    if not (isinstance(value, str) and len(value) <= _MAX_MATCH):
        raise InvalidBody
    return value


def select_features(
    queries: list[tuple[str, str]], max_receive_bytes: int, devices: DeviceRegistry | None = None
) -> list[dict[str, Any]]:
    """
    What is served and asked about; each feature once, unknown feature types contribute nothing.

    :param devices: for push notifications; None if they are not served.
    """
    return match_features(queries, [*_list_features(max_receive_bytes), *list_push_features(devices)])


def match_features(queries: Iterable[tuple[str, str]], features: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the features that are asked about."""
    found: list[dict[str, Any]] = []
    for feature in features:
        kind, id_ = feature["feature-type"], feature["id"]
        if any(kind == wanted and _matches_wildcard(match, id_) for wanted, match in queries):
            found.append(feature)
    return found


def _matches_wildcard(match: str, id_: str) -> bool:
    """`*` stands for any text. Runs of it are one, and pieces are searched in turn: no backtracking to abuse."""
    pieces = re.split(r"\*+", match)
    if len(pieces) == 1:
        return match == id_
    first, *middle, last = pieces
    if not (id_.startswith(first) and id_.endswith(last)) or len(id_) < len(first) + len(last):
        return False
    position, end = len(first), len(id_) - len(last)
    for piece in middle:
        position = id_.find(piece, position, end)
        if position < 0:
            return False
        position += len(piece)
    return True


def _list_features(max_receive_bytes: int) -> list[dict[str, Any]]:
    features: list[dict[str, Any]] = []
    for uri, roles in _SUPPORTED_PROTOCOLS.items():
        feature: dict[str, Any] = {"feature-type": "protocol", "id": uri}
        if roles:
            feature["roles"] = roles
        features.append(feature)
    features.append({"feature-type": "header", "id": "return_route"})
    features.append({"feature-type": "goal-code", "id": "request-mediate"})
    features.append(
        {
            "feature-type": "constraint",
            "id": "max_receive_bytes",
            # A string: so it stands in the specification's example.
            "max_receive_bytes": str(max_receive_bytes),
        }
    )
    return features


def list_push_features(devices: DeviceRegistry | None) -> list[dict[str, Any]]:
    """
    Protocols of the configured services, with what wake-ups contain; that of Web Push with the key that subscriptions
    are bound to.
    """
    if devices is None:
        return []
    shared = {"feature-type": "protocol", "roles": [NOTIFICATION_SENDER], "mediator": devices.mediator_id}
    features: list[dict[str, Any]] = [{"id": PUSH_PROTOCOLS[service].uri, **shared} for service in devices.services]
    for feature in features:
        if feature["id"] == PUSH_PROTOCOLS["web_push"].uri:
            feature["vapid_public_key"] = devices.vapid_public_key
    return features
