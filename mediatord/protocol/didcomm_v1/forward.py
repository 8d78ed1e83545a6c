"""Routing 1.0 forwards (Aries RFC 0094)."""

from __future__ import annotations

from typing import NamedTuple

from mediatord.errors import InvalidAttachment, MissingNext
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import is_did, strip_did_url
from mediatord.protocol.didcomm.forward import MAX_NEXT, is_payload
from mediatord.protocol.didcomm_v1.keys import InvalidKey, parse_key
from mediatord.protocol.didcomm_v1.message import TypeKey, V1Message

FORWARD_KEY: TypeKey = ("routing", 1, "forward")
FORWARD_NAME = "routing/1.0/forward"
_ENVELOPE_MEMBERS = ("protected", "iv", "ciphertext", "tag")


class Forward(NamedTuple):
    """
    A forward that was read.

    :param to: did:key of the recipient, or another DID.
    :param payload: the envelope for it, as it was sent.
    :param expires_time: seconds since the epoch; None for none.
    """

    to: str
    payload: bytes
    expires_time: float | None


def read_forward(message: V1Message) -> Forward:
    """
    Read a forward.

    :raise MissingNext: no key or DID in `to`.
    :raise InvalidAttachment: no envelope in `msg`.
    """
    return Forward(_read_recipient(message.members.get("to")), _read_payload(message), message.expires_time)


def _read_recipient(to: object) -> str:
    if not isinstance(to, str) or not 0 < len(to) <= MAX_NEXT:
        raise MissingNext
    try:
        return parse_key(to)
    except InvalidKey:
        pass
    if not is_did(strip_did_url(to)):
        raise MissingNext
    return to


def _read_payload(message: V1Message) -> bytes:
    value = message.members.get("msg")
    try:
        if isinstance(value, str):  # in old libraries
            text = value.encode()
            value = encoding.loads_object(text)
        else:
            text = message.source_of("msg") or b""
    except ValueError:
        raise InvalidAttachment from None
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in _ENVELOPE_MEMBERS):
        raise InvalidAttachment
    if not is_payload(value, text, encrypted_only=True):
        raise InvalidAttachment
    return text
