"""Coordinate Mediation 2.0 and 3.0: bodies of requests and responses (reference section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mediatord.errors import InvalidPagination, InvalidUpdates
from mediatord.protocol.canonical_did import canonicalize_did

COORDINATE_MEDIATION = "https://didcomm.org/coordinate-mediation"
MAX_UPDATES = 1000
MAX_RECIPIENTS_PER_PAGE = 1000


@dataclass(frozen=True, slots=True)
class MediationVersion:
    """
    Names that differ between the protocol versions.

    :param has_single_routing_did: 2.0 has one routing DID as a string, 3.0 a list.
    """

    version: str
    update_response: str
    query_response: str
    list_member: str
    has_single_routing_did: bool

    def type(self, name: str) -> str:
        """Type URI of a message in this version."""
        return f"{COORDINATE_MEDIATION}/{self.version}/{name}"


MEDIATION_VERSIONS = {
    2: MediationVersion("2.0", "keylist-update-response", "keylist", "keys", True),
    3: MediationVersion("3.0", "recipient-update-response", "recipient", "dids", False),
}


@dataclass(frozen=True, slots=True)
class RecipientUpdate:
    """One entry of an update as received; the values are unchecked strings."""

    recipient_did: str
    action: str


def parse_updates(body: Mapping[str, Any]) -> list[RecipientUpdate]:
    """
    Entries of a `recipient-update` or `keylist-update`, in order.

    :raise InvalidUpdates: `updates` is not a list of objects with two strings, or has more than 1000 entries.
    """
    entries = body.get("updates")
    if not isinstance(entries, list) or len(entries) > MAX_UPDATES:
        raise InvalidUpdates
    updates = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise InvalidUpdates
        # Veramo calls the member recipient_key (reference 10.3).
        did, action = entry.get("recipient_did", entry.get("recipient_key")), entry.get("action")
        if not (isinstance(did, str) and isinstance(action, str)):
            raise InvalidUpdates
        updates.append(RecipientUpdate(did, action))
    return updates


def make_update_response_body(updates: Sequence[RecipientUpdate], results: Sequence[str]) -> dict[str, Any]:
    """Body of the response to an update: one result per entry, in the same order."""
    return {
        "updated": [
            {"recipient_did": update.recipient_did, "action": update.action, "result": result}
            for update, result in zip(updates, results, strict=True)
        ]
    }


@dataclass(frozen=True, slots=True)
class RecipientPage:
    """Offset and limit of a recipient query."""

    offset: int = 0
    limit: int = MAX_RECIPIENTS_PER_PAGE

    def describe(self, count: int, total: int) -> dict[str, int] | None:
        """Member `pagination` of the response, with `count` recipients; None if it has all (reference 5.3)."""
        remaining = max(0, total - self.offset - count)
        if self.offset == 0 and remaining == 0:
            return None
        return {"count": count, "offset": self.offset, "remaining": remaining}


def parse_pagination(body: Mapping[str, Any]) -> RecipientPage:
    """
    Page that a query requests; without `paginate`, the first 1000.

    :raise InvalidPagination: a member of `paginate` is missing, negative or not an integer.
    """
    paginate = body.get("paginate")
    if paginate is None:
        return RecipientPage()
    if not isinstance(paginate, dict):
        raise InvalidPagination
    limit, offset = paginate.get("limit"), paginate.get("offset")
    for number in (limit, offset):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
            raise InvalidPagination
    assert isinstance(limit, int) and isinstance(offset, int)
    return RecipientPage(offset, min(limit, MAX_RECIPIENTS_PER_PAGE))


def make_query_response_body(
    mediation_version: MediationVersion, dids: Sequence[str], page: RecipientPage, total: int
) -> dict[str, Any]:
    """Body of the response to a query; `pagination` only if there are recipients outside the page."""
    body: dict[str, Any] = {mediation_version.list_member: [{"recipient_did": did} for did in dids]}
    pagination = page.describe(len(dids), total)
    if pagination is not None:
        body["pagination"] = pagination
    return body


def make_grant_body(mediation_version: MediationVersion, routing_did: str) -> dict[str, Any]:
    """Body of a `mediate-grant`."""
    return {"routing_did": routing_did if mediation_version.has_single_routing_did else [routing_did]}


def display_recipient_did(recipient_did: str) -> str:
    """
    A recipient DID as shown to its account: as received, but did:peer:4 in short form (reference 4.3).

    Ownership is decided by :func:`~mediatord.protocol.canonical_did.canonicalize_did`.
    """
    did, hash_, fragment = recipient_did.partition("#")
    return (canonicalize_did(did) if did.startswith("did:peer:4") else did) + hash_ + fragment
