"""
Message Pickup 2.0 (Aries RFC 0685) and 1.0 (RFC 0212): members of requests and answers.

Where members are those of 3.0, they are read by :mod:`mediatord.protocol.didcomm.message_pickup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from mediatord.errors import InvalidBody
from mediatord.protocol.didcomm.message_pickup import MAX_MESSAGE_IDS, make_status_body
from mediatord.protocol.didcomm_v1.keys import InvalidKey, parse_key
from mediatord.protocol.encoding import encode_base64url, wrap_json_fragment

PICKUP_2 = "messagepickup/2.0"
PICKUP_1 = "messagepickup/1.0"
STATUS = f"{PICKUP_2}/status"
DELIVERY = f"{PICKUP_2}/delivery"
STATUS_1 = f"{PICKUP_1}/status"
BATCH = f"{PICKUP_1}/batch"
LIST_RESPONSE = f"{PICKUP_1}/list-response"
# Messages in one delivery, as Credo asks for at most.
MAX_DELIVERY = 10


def parse_recipient_key(members: Mapping[str, Any]) -> tuple[str, str] | None:
    """
    The recipient key that a request is restricted to, as it spells it and as did:key; None for all of the account.

    :raise InvalidBody: not a key.
    """
    named = members.get("recipient_key")
    if named is None:
        return None
    try:
        return named, parse_key(named)
    except InvalidKey:
        raise InvalidBody from None


def parse_batch_size(members: Mapping[str, Any], most: int) -> int:
    """
    Number of messages that a `batch-pickup` asks for, at most `most`, which is the default.

    :raise InvalidBody: not a positive integer.
    """
    size = members.get("batch_size", most)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidBody
    return min(size, most)


def parse_listed_ids(members: Mapping[str, Any]) -> list[str]:
    """
    Message ids that a `list-pickup` asks for.

    :raise InvalidBody: `message_ids` is not a list of strings, or too long.
    """
    ids = members.get("message_ids")
    if not isinstance(ids, list) or len(ids) > MAX_MESSAGE_IDS or not all(isinstance(one, str) for one in ids):
        raise InvalidBody
    return ids


def make_status_members(
    *,
    count: int,
    total_bytes: int,
    oldest: float | None,
    newest: float | None,
    now: float,
    recipient_key: str | None,
    live: bool,
) -> dict[str, Any]:
    """
    Members of a `status`, with times as text in ISO 8601.

    :param recipient_key: as the request spells it.
    """
    members = make_status_body(
        count=count,
        total_bytes=total_bytes,
        oldest=oldest,
        newest=newest,
        now=now,
        recipient_did=None,
        live=live,
    )
    for name in ("oldest_received_time", "newest_received_time"):
        if name in members:
            members[name] = _format_time(members[name])
    return members | _name_recipient(recipient_key)


def make_delivery_members(messages: Iterable[tuple[str, bytes]], recipient_key: str | None = None) -> dict[str, Any]:
    """
    Members of a `delivery`.

    :param messages: ids, by which they are acknowledged, and payloads.
    """
    attachments = [{"@id": id_, "data": {"base64": encode_base64url(payload)}} for id_, payload in messages]
    return _name_recipient(recipient_key) | {"~attach": attachments}


def make_batch_members(messages: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """
    Members of a `batch` or a `list-response`: each message has its id twice, as the RFC and as Credo name it.

    A payload was validated as a JSON object on arrival, so it is embedded without parsing.
    """
    attachments = [{"@id": id_, "id": id_, "message": wrap_json_fragment(payload)} for id_, payload in messages]
    return {"messages~attach": attachments}


def _name_recipient(recipient_key: str | None) -> dict[str, Any]:
    return {} if recipient_key is None else {"recipient_key": recipient_key}


def _format_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
