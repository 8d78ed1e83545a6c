"""Message Pickup 3.0: bodies of requests and responses (reference section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mediatord.errors import InvalidBody, InvalidLimit
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE

MESSAGE_PICKUP = "https://didcomm.org/messagepickup/3.0"
STATUS = f"{MESSAGE_PICKUP}/status"
DELIVERY = f"{MESSAGE_PICKUP}/delivery"
MAX_MESSAGE_IDS = 10_000

AttachmentFormat = Literal["as-received", "json", "base64"]


def parse_recipient(body: Mapping[str, Any]) -> str | None:
    """
    The recipient DID that a request is restricted to; None for all of the account.

    :raise InvalidBody: not a string.
    """
    # Veramo calls the member recipient_key (reference 10.3).
    did = body.get("recipient_did", body.get("recipient_key"))
    if did is None or isinstance(did, str):
        return did
    raise InvalidBody


def parse_limit(body: Mapping[str, Any], most: int) -> int:
    """
    Number of messages that a delivery-request asks for, at most `most`.

    :raise InvalidLimit: `limit` is missing, not an integer or below 1.
    """
    limit = body.get("limit")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise InvalidLimit
    return min(limit, most)


def parse_message_ids(body: Mapping[str, Any]) -> list[str]:
    """
    Message ids that a `messages-received` acknowledges.

    :raise InvalidBody: `message_id_list` is not a list of strings, or longer than 10 000.
    """
    ids = body.get("message_id_list")
    if not isinstance(ids, list) or len(ids) > MAX_MESSAGE_IDS:
        raise InvalidBody
    for one in ids:
        if not isinstance(one, str):
            raise InvalidBody
    return ids


def parse_live_delivery(body: Mapping[str, Any]) -> bool:
    """
    Whether live delivery is requested. Accepts strings, which a public conformance suite sends.

    :raise InvalidBody: `live_delivery` is not a boolean.
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
    oldest: float | None,
    newest: float | None,
    now: float,
    recipient_did: str | None,
    live: bool,
) -> dict[str, Any]:
    """
    Body of a `status`; times in whole seconds.

    :param oldest: when the oldest queued message arrived; `newest` likewise. None if the queue is empty.
    """
    body: dict[str, Any] = {"message_count": count, "total_bytes": total_bytes, "live_delivery": live}
    if oldest is not None and newest is not None:
        body["longest_waited_seconds"] = max(0, int(now - oldest))
        body["oldest_received_time"] = int(oldest)
        body["newest_received_time"] = int(newest)
    if recipient_did is not None:
        body["recipient_did"] = recipient_did
    return body


def make_delivery_attachment(
    id_: str, payload: bytes, received_as: Literal["json", "base64"], form: AttachmentFormat
) -> dict[str, Any]:
    """
    A queued message as an attachment with exactly one data member (reference 6.2).

    A payload was validated as JSON on arrival, so it is embedded without parsing.
    """
    data: dict[str, Any]
    if (received_as if form == "as-received" else form) == "json":
        data = {"json": encoding.wrap_json_fragment(payload)}
    else:
        data = {"base64": encoding.encode_base64url(payload)}
    return {"id": id_, "media_type": ENCRYPTED_MEDIA_TYPE, "data": data}


def make_delivery_body(recipient_did: str | None) -> dict[str, Any]:
    """Body of a `delivery`; names the recipient DID only if the request did."""
    return {} if recipient_did is None else {"recipient_did": recipient_did}
