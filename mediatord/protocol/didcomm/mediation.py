"""Coordinate Mediation 2.0 and 3.0: bodies of requests and answers (reference section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mediatord.errors import BadPaginate, BadUpdates

BASE = "https://didcomm.org/coordinate-mediation"
MAX_UPDATES = 1000
MAX_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Wording:
    """
    What a version calls things; everything else is the same in both.

    :param single_routing_did: 2.0 names one routing DID as a string, 3.0 a list of them.
    """

    version: str
    update_response: str
    query_answer: str
    list_member: str
    single_routing_did: bool

    def type(self, name: str) -> str:
        """Type URI of the message `name` in this version."""
        return f"{BASE}/{self.version}/{name}"


WORDING = {
    2: Wording("2.0", "keylist-update-response", "keylist", "keys", True),
    3: Wording("3.0", "recipient-update-response", "recipient", "dids", False),
}


@dataclass(frozen=True, slots=True)
class Update:
    """One entry of an update as it came; either member may be nonsense."""

    recipient_did: str
    action: str


def read_updates(body: Mapping[str, Any]) -> list[Update]:
    """
    The entries of a `recipient-update` or `keylist-update`, in order.

    :raise BadUpdates: `updates` is not a list of objects with two strings, or has more than 1000 entries.
    """
    entries = body.get("updates")
    if not isinstance(entries, list) or len(entries) > MAX_UPDATES:
        raise BadUpdates
    updates = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise BadUpdates
        # Veramo calls the member recipient_key (reference 10.3).
        did, action = entry.get("recipient_did", entry.get("recipient_key")), entry.get("action")
        if not (isinstance(did, str) and isinstance(action, str)):
            raise BadUpdates
        updates.append(Update(did, action))
    return updates


def updated_body(updates: Sequence[Update], results: Sequence[str]) -> dict[str, Any]:
    """Body of the answer to an update: one result an entry, same order."""
    return {
        "updated": [
            {"recipient_did": update.recipient_did, "action": update.action, "result": result}
            for update, result in zip(updates, results, strict=True)
        ]
    }


@dataclass(frozen=True, slots=True)
class Page:
    """A slice of the recipient DIDs."""

    offset: int = 0
    limit: int = MAX_PAGE


def read_page(body: Mapping[str, Any]) -> Page:
    """
    What a query asks for; without `paginate`, everything up to 1000.

    :raise BadPaginate: one member of `paginate` is missing, negative or no integer.
    """
    paginate = body.get("paginate")
    if paginate is None:
        return Page()
    if not isinstance(paginate, dict):
        raise BadPaginate
    limit, offset = paginate.get("limit"), paginate.get("offset")
    for number in (limit, offset):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
            raise BadPaginate
    assert isinstance(limit, int) and isinstance(offset, int)
    return Page(offset, min(limit, MAX_PAGE))


def page_body(wording: Wording, dids: Sequence[str], page: Page, total: int) -> dict[str, Any]:
    """Body of the answer to a query; `pagination` only when something lies outside the slice (reference 5.3)."""
    body: dict[str, Any] = {wording.list_member: [{"recipient_did": did} for did in dids]}
    remaining = max(0, total - page.offset - len(dids))
    if page.offset > 0 or remaining > 0:
        body["pagination"] = {"count": len(dids), "offset": page.offset, "remaining": remaining}
    return body


def grant_body(wording: Wording, routing_did: str) -> dict[str, Any]:
    """Body of a `mediate-grant`."""
    return {"routing_did": routing_did if wording.single_routing_did else [routing_did]}
