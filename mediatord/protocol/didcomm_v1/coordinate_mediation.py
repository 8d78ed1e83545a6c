"""
Coordinate Mediation 1.0 (Aries RFC 0211): requests and answers. Updates have the members of v2, so its parser reads
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mediatord.errors import InvalidPagination
from mediatord.protocol.didcomm.coordinate_mediation import MAX_RECIPIENTS_PER_PAGE, RecipientPage, RecipientUpdate
from mediatord.protocol.didcomm_v1.keys import InvalidKey, KeySpelling, parse_key, spell_key
from mediatord.protocol.didcomm_v1.message import V1Answer
from mediatord.protocol.didcomm_v1.problem_report import COORDINATE_MEDIATION

_DID_KEY = "did:key:"
# Of an X25519 key, to which senders of v2 encrypt.
_AGREEMENT_DID_KEY = "did:key:z6LS"
_LARGEST_NUMBER = 2**31


def parse_recipient(text: str) -> str | None:
    """
    The name under which a recipient is registered: of an Ed25519 key, in any spelling, its did:key; of another DID,
    by which senders of v2 may know the wallet, the DID as it is. None for anything else.
    """
    try:
        return parse_key(text)
    except InvalidKey:
        is_did_of_v2 = text.startswith("did:") and not text.startswith(_DID_KEY)
        return text if is_did_of_v2 or text.startswith(_AGREEMENT_DID_KEY) else None


def spell_recipient(name: str, spelling: KeySpelling) -> str:
    """A registered recipient as the wallet spells keys; a DID that names no Ed25519 key as it is."""
    try:
        return spell_key(parse_key(name), spelling)
    except InvalidKey:
        return name


def parse_page(members: Mapping[str, Any]) -> RecipientPage:
    """
    Page that a query requests; without `paginate`, the first 1000. ACA-Py sends a limit of -1 for none.

    :raise InvalidPagination: a member of `paginate` is not an integer, or its offset is negative.
    """
    paginate = members.get("paginate")
    if paginate is None:
        return RecipientPage()
    if not isinstance(paginate, dict):
        raise InvalidPagination
    limit, offset = _read_number(paginate, "limit", -1), _read_number(paginate, "offset", 0)
    if offset < 0:
        raise InvalidPagination
    return RecipientPage(offset, MAX_RECIPIENTS_PER_PAGE if limit < 0 else min(limit, MAX_RECIPIENTS_PER_PAGE))


def _read_number(paginate: Mapping[str, Any], name: str, default: int) -> int:
    number = paginate.get(name)
    if number is None:
        return default
    if not isinstance(number, int) or isinstance(number, bool) or abs(number) >= _LARGEST_NUMBER:
        raise InvalidPagination
    return number


def make_grant(endpoint: str, routing_key: str) -> V1Answer:
    """
    A `mediate-grant`.

    :param routing_key: as did:key.
    """
    return V1Answer(f"{COORDINATE_MEDIATION}/mediate-grant", {"endpoint": endpoint, "routing_keys": [routing_key]})


def make_denial() -> V1Answer:
    """A `mediate-deny`."""
    return V1Answer(f"{COORDINATE_MEDIATION}/mediate-deny")


def make_update_response(updates: Sequence[RecipientUpdate], results: Sequence[str]) -> V1Answer:
    """
    The answer to an update: one result an entry, in the same order.

    :param updates: as received, since wallets look for the keys that they sent.
    """
    updated = [
        {"recipient_key": update.recipient_did, "action": update.action, "result": result}
        for update, result in zip(updates, results, strict=True)
    ]
    return V1Answer(f"{COORDINATE_MEDIATION}/keylist-update-response", {"updated": updated})


def make_keylist(names: Sequence[str], spelling: KeySpelling, page: RecipientPage, total: int) -> V1Answer:
    """
    The answer to a query; `pagination` only if there are recipients outside the page.

    :param names: registered ones of the page.
    """
    members: dict[str, Any] = {"keys": [{"recipient_key": spell_recipient(name, spelling)} for name in names]}
    pagination = page.describe(len(names), total)
    if pagination is not None:
        members["pagination"] = pagination
    return V1Answer(f"{COORDINATE_MEDIATION}/keylist", members)
