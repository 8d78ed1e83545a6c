"""Message Pickup 3.0: bodies of requests and answers (reference section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from mediatord.errors import InvalidBody, InvalidLimit
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import ENCRYPTED_MEDIA_TYPE

MESSAGE_PICKUP = "https://didcomm.org/messagepickup/3.0"
STATUS = f"{MESSAGE_PICKUP}/status"
DELIVERY = f"{MESSAGE_PICKUP}/delivery"
MAX_MESSAGE_IDS = 10_000

AttachmentFormat = Literal["as-received", "json", "base64"]


def parse_recipient(body: Mapping[str, Any]) -> str | None:
    """
    The one recipient DID a request is narrowed to, or None for all of the account.

    :raise InvalidBody: it is there but no string.
    """
    # Veramo calls the member recipient_key (reference 10.3).
    did = body.get("recipient_did", body.get("recipient_key"))
    if did is None or isinstance(did, str):
        return did
    raise InvalidBody


def parse_limit(body: Mapping[str, Any], most: int) -> int:
    """
    How many messages a delivery-request wants, at most `most`.

    :raise InvalidLimit: `limit` is missing, not an integer or below 1.
    """
    limit = body.get("limit")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise InvalidLimit
    return min(limit, most)


def parse_message_ids(body: Mapping[str, Any]) -> list[str]:
    """
    The ids that a `messages-received` acknowledges.

    :raise InvalidBody: `message_id_list` is not a list of strings, or longer than 10 000.
    """
    ids = body.get("message_id_list")
    if not isinstance(ids, list) or len(ids) > MAX_MESSAGE_IDS or not all(isinstance(one, str) for one in ids):
        raise InvalidBody
    return ids


def parse_live_delivery(body: Mapping[str, Any]) -> bool:
    """
    Whether live delivery is wanted; a public conformance suite sends the truth value as a string.

    :raise InvalidBody: `live_delivery` is neither.
    """
    wanted = {True: True, False: False, "true": True, "false": False}
    value = body.get("live_delivery")
    if isinstance(value, (bool, str)) and value in wanted:
        return wanted[value]
    raise InvalidBody


def make_status_body(
    *,
    count: int,
    total_bytes: int,
    times: tuple[float, float] | None,
    now: float,
    recipient_did: str | None,
    live: bool,
) -> dict[str, Any]:
    """
    Body of a `status`; whole seconds.

    :param times: when the oldest and the newest message came; None when nothing waits.
    """
    body: dict[str, Any] = {"message_count": count, "total_bytes": total_bytes, "live_delivery": live}
    if times is not None:
        body["longest_waited_seconds"] = max(0, int(now - times[0]))
        body["oldest_received_time"] = int(times[0])
        body["newest_received_time"] = int(times[1])
    if recipient_did is not None:
        body["recipient_did"] = recipient_did
    return body


def make_delivery_attachment(
    id_: str, payload: bytes, received_as: Literal["json", "base64"], form: AttachmentFormat
) -> dict[str, Any]:
    """
    One queued message as an attachment with exactly one data member (reference 6.2).

    A payload is always JSON, checked on arrival, so that it can stand in either form without being parsed again.
    """
    data: dict[str, Any]
    if (received_as if form == "as-received" else form) == "json":
        data = {"json": orjson.Fragment(payload)}
    else:
        data = {"base64": encoding.encode_base64url(payload)}
    return {"id": id_, "media_type": ENCRYPTED_MEDIA_TYPE, "data": data}


def make_delivery_body(recipient_did: str | None) -> dict[str, Any]:
    """Body of a `delivery`: the recipient DID only if the request named one."""
    return {} if recipient_did is None else {"recipient_did": recipient_did}


def pair_status_times(oldest: float | None, newest: float | None) -> tuple[float, float] | None:
    """Both times or none."""
    return None if oldest is None or newest is None else (oldest, newest)
