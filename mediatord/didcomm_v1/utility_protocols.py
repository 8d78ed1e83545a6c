"""
Protocols that need no account: trust ping, discover features 1.0 and 2.0, and what is never answered, as acks and
problem reports (Aries RFC 0048, 0031, 0557, 0015, 0035).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mediatord.didcomm.utility_protocols import list_push_features, match_features, parse_match, parse_queries
from mediatord.didcomm_v1.context import V1Context, V1Request, V1RequestHandler
from mediatord.didcomm_v1.live_delivery import V1LiveDelivery
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, V1Answer
from mediatord.protocol.didcomm_v1.out_of_band import GOAL_CODE

_SUPPORTED_PROTOCOLS: dict[str, list[str]] = {
    "connections/1.0": ["inviter"],
    "coordinate-mediation/1.0": ["mediator"],
    "didexchange/1.0": ["responder"],
    "didexchange/1.1": ["responder"],
    "discover-features/1.0": ["responder"],
    "discover-features/2.0": ["responder"],
    "messagepickup/1.0": ["mediator"],
    "messagepickup/2.0": ["mediator"],
    "notification/1.0": [],
    "out-of-band/1.0": ["sender"],
    "out-of-band/1.1": ["sender"],
    "report-problem/1.0": [],
    "routing/1.0": ["mediator"],
    "trust_ping/1.0": ["receiver"],
}


class V1UtilityProtocols:
    """Serves messages of any connected wallet, one method for each kind."""

    def __init__(self, context: V1Context, live: V1LiveDelivery) -> None:
        self._devices = context.common.devices
        self._live = live

    def handlers(self) -> dict[str, V1RequestHandler]:
        """By type without prefix. A problem report is never answered, as the answer could be answered again."""
        return {
            "trust_ping/1.0/ping": self.ping,
            "trust_ping/1.0/ping_response": self.ignore,
            "discover-features/1.0/query": self.query,
            "discover-features/1.0/disclose": self.ignore,
            "discover-features/2.0/queries": self.queries,
            "discover-features/2.0/disclosures": self.ignore,
            "coordinate-mediation/1.0/problem-report": self.problem_report,
            "notification/1.0/ack": self.ignore,
            "notification/1.0/problem-report": self.problem_report,
            "report-problem/1.0/problem-report": self.problem_report,
        }

    async def ping(self, request: V1Request) -> V1Answer | None:
        """A `ping_response`, unless none is requested; a ping for return route all asks for implicit pickup then."""
        if request.message.members.get("response_requested", True) is not False:
            return V1Answer("trust_ping/1.0/ping_response")
        if request.account is not None and request.message.return_route == "all":
            await self._live.begin_implicit(request, request.account)
        return None

    async def problem_report(self, request: V1Request) -> V1Answer | None:
        """It may be about a message that was pushed."""
        if request.account is not None:
            self._live.note_problem_report(request, request.account)
        return None

    async def query(self, request: V1Request) -> V1Answer:
        """
        The protocols that match a query of 1.0.

        :raise InvalidBody: it is no string, or too long.
        """
        queries = [("protocol", parse_match(request.message.members.get("query")))]
        protocols = [
            {"pid": feature["id"], "roles": feature.get("roles", [])} for feature in self._select_features(queries)
        ]
        return V1Answer("discover-features/1.0/disclose", {"protocols": protocols})

    async def queries(self, request: V1Request) -> V1Answer:
        """
        The features that match the queries of 2.0.

        :raise InvalidBody: they are malformed, or too many.
        """
        found = self._select_features(parse_queries(request.message.members))
        return V1Answer("discover-features/2.0/disclosures", {"disclosures": found})

    async def ignore(self, request: V1Request) -> V1Answer | None:
        """No answer; only the decorators of the message have an effect."""
        return None

    def _select_features(self, queries: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """What is served and asked about, with the prefix that is asked for."""
        folded = [(kind, _change_prefix(match, OLD_PREFIX, DIDCOMM_ORG)) for kind, match in queries]
        found = match_features(folded, [*_list_features(), *list_push_features(self._devices)])
        if folded == queries:
            return found
        return [{**feature, "id": _change_prefix(feature["id"], DIDCOMM_ORG, OLD_PREFIX)} for feature in found]


def _list_features() -> list[dict[str, Any]]:
    features: list[dict[str, Any]] = []
    for name, roles in _SUPPORTED_PROTOCOLS.items():
        feature: dict[str, Any] = {"feature-type": "protocol", "id": DIDCOMM_ORG + name}
        features.append({**feature, "roles": roles} if roles else feature)
    return [*features, {"feature-type": "goal-code", "id": GOAL_CODE}]


def _change_prefix(text: str, old: str, new: str) -> str:
    return new + text.removeprefix(old) if text.startswith(old) else text
