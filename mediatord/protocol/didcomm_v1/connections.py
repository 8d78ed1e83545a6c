"""Connections 1.0: requests of older wallets, and responses with a signed field (Aries RFC 0160, 0234)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mediatord.errors import InvalidBody
from mediatord.protocol.didcomm_v1.did_document import make_own_document, parse_wallet_document
from mediatord.protocol.didcomm_v1.did_exchange import MAX_REQUEST_BYTES, ConnectionRequest
from mediatord.protocol.didcomm_v1.keys import InvalidKey, SigningKey, encode_base58_key, parse_key, verify_signature
from mediatord.protocol.didcomm_v1.message import V1Answer, V1Message
from mediatord.protocol.encoding import decode_lenient_base64, dumps, encode_base64url, loads_object

FAMILY = "connections"
_PROTOCOL = f"{FAMILY}/1.0"
_SIGNATURE_TYPE = "signature/1.0/ed25519Sha512_single"
_TIME_BYTES = 8
_DID = re.compile(r"[!-~]{1,512}")


def parse_request(message: V1Message) -> ConnectionRequest:
    """
    Read a request. Its document is not signed: the envelope proves who sent it.

    :raise InvalidBody: too long, or there is no DID or no document.
    :raise UnresolvableDID: the document is unusable.
    """
    connection = message.members.get("connection")
    if not isinstance(connection, dict) or len(message.source) > MAX_REQUEST_BYTES:
        raise InvalidBody
    # Libraries have written these members in either way.
    did = connection.get("DID", connection.get("did"))
    document = connection.get("DIDDoc", connection.get("did_doc"))
    # Any text will do: the DID is a mere name of the document.
    if not isinstance(did, str) or not _DID.fullmatch(did) or not isinstance(document, dict):
        raise InvalidBody
    return ConnectionRequest(_PROTOCOL, "nym", parse_wallet_document(did, document))


def make_response(
    key: SigningKey,
    signer: SigningKey,
    endpoints: Sequence[str],
    prefix: str,
    thid: str,
    pthid: str | None,
    now: float,
) -> V1Answer:
    """
    The response to a request.

    :param key: of the mediator for this connection.
    :param signer: key of the invitation.
    :param endpoints: URLs of the mediator, the one that is preferred first.
    :param prefix: of message types.
    :param thid: id of the request, by which wallets find their connection.
    :param pthid: id of the invitation, if the wallet has named it.
    """
    own = make_own_document("nym", key, endpoints)
    connection = {"DID": own.did, "DIDDoc": own.document}
    members = {"connection~sig": sign_field(connection, signer, now, prefix)}
    return V1Answer(f"{_PROTOCOL}/response", members, thid, pthid)


def sign_field(value: Mapping[str, Any], signer: SigningKey, now: float, prefix: str) -> dict[str, str]:
    """A field in the form of a signature decorator, which replaces it (Aries RFC 0234)."""
    data = int(now).to_bytes(_TIME_BYTES, "big") + dumps(dict(value))
    return {
        "@type": prefix + _SIGNATURE_TYPE,
        "signature": encode_base64url(signer.sign(data)),
        "sig_data": encode_base64url(data),
        "signer": encode_base58_key(signer.did_key),
    }


def open_signed_field(field: object) -> tuple[dict[str, Any], str]:
    """
    The value of a signed field, and the key that signed it. The time inside is ignored: some libraries give seconds,
    others milliseconds.

    :raise InvalidBody: malformed, too long, or a signature that is not valid.
    """
    members = field if isinstance(field, dict) else {}
    text, signature, signer = (members.get(name) for name in ("sig_data", "signature", "signer"))
    if not (isinstance(text, str) and len(text) <= MAX_REQUEST_BYTES and isinstance(signature, str)):
        raise InvalidBody
    try:
        data, key = decode_lenient_base64(text), parse_key(signer)
        if not verify_signature(key, data, decode_lenient_base64(signature)):
            raise InvalidKey("not a signature of this key")
        return loads_object(data[_TIME_BYTES:]), key
    except ValueError:
        raise InvalidBody from None
