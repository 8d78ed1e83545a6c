"""What an identity says to a mediator, built and signed (DCTRL-0004 sections 4 and 10.2)."""

from __future__ import annotations

import uuid
from typing import Any

from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.commands import Channel
from mediatord.wallet.decentrl.identity import Identity

DIRECT: Channel = "DIRECT_AUTHENTICATED"
PRIVATE: Channel = "TWO_WAY_PRIVATE"
PUBLIC: Channel = "ONE_WAY_PUBLIC"


def compose(
    identity: Identity,
    channel: Channel,
    recipient_did: str,
    payload: dict[str, Any] | str,
    /,
    timestamp_ms: int,
    **headers: Any,
) -> dict[str, Any]:
    """
    A command, signed.

    :param headers: added to or replacing those that follow from the arguments; `nonce`, for one.
    """
    header = {
        "channel": channel,
        "sender_did": identity.did,
        "sender_signing_key_id": identity.signing_key_id,
        "recipient_did": recipient_did,
        "timestamp": timestamp_ms,
        "nonce": str(uuid.uuid4()),
        **headers,
    }
    return {"header": header, "payload": payload, "signature": identity.sign({"header": header, "payload": payload})}


def authenticate(identity: Identity, timestamp_ms: int, **members: Any) -> dict[str, Any]:
    """
    The first message on a socket, signed.

    :param members: as `headers` of :func:`compose`.
    """
    said = {
        "did": identity.did,
        "signing_key_id": identity.signing_key_id,
        "timestamp": timestamp_ms,
        "nonce": str(uuid.uuid4()),
        **members,
    }
    return {"type": "AUTHENTICATE", **said, "signature": identity.sign(said)}


def encode(command: dict[str, Any]) -> bytes:
    """As it goes over the wire."""
    return jsontext.dumps(command)
