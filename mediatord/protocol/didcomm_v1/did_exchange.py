"""DID Exchange 1.0 and 1.1: requests of wallets, and the responses and refusals of a mediator (Aries RFC 0023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mediatord.errors import InvalidBody, UnresolvableDID
from mediatord.protocol.didcomm_v1.did_document import (
    DIDForm,
    WalletDocument,
    find_did_form,
    make_own_document,
    parse_wallet_did,
    parse_wallet_document,
)
from mediatord.protocol.didcomm_v1.keys import (
    KEY_SIZE,
    InvalidKey,
    SigningKey,
    encode_did_key,
    parse_key,
    verify_signature,
)
from mediatord.protocol.didcomm_v1.message import V1Answer, V1Message
from mediatord.protocol.encoding import (
    decode_base64url,
    decode_lenient_base64,
    dumps,
    encode_base64url,
    loads_object,
)

FAMILY = "didexchange"
_HIGHEST_MINOR = 1
# Of either side a request has one; each costs an Ed25519 verification.
_MAX_SIGNATURES = 4
MAX_DOCUMENT_BYTES = 16_384
MAX_REQUEST_BYTES = 2 * MAX_DOCUMENT_BYTES


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """
    A request of a wallet, of either protocol.

    :param protocol: with version, such as `didexchange/1.1`.
    :param form: of its DID, which is that of the answer.
    """

    protocol: str
    form: DIDForm
    document: WalletDocument


def parse_request(message: V1Message) -> ConnectionRequest:
    """
    Read a request, and verify the signature of an attached document by one of its keys.

    :raise InvalidBody: too long, or there is no DID, or no readable document where one is needed.
    :raise UnresolvableDID: the DID or its document is unusable, or its signature is not of one of its keys.
    :raise UnsupportedDIDMethod: the method of the DID has neither a document inside nor one attached.
    """
    did = message.members.get("did")
    if not isinstance(did, str) or len(message.source) > MAX_REQUEST_BYTES:
        raise InvalidBody
    form = find_did_form(did)
    protocol = f"{FAMILY}/1.{min(message.type.minor, _HIGHEST_MINOR)}"
    if form in ("did:peer:2", "did:peer:4"):
        return ConnectionRequest(protocol, form, parse_wallet_did(did))
    content, signers = open_signed_attachment(message.members.get("did_doc~attach"))
    try:
        document = parse_wallet_document(did, loads_object(content))
    except ValueError:
        raise InvalidBody from None
    if not any(key in document.keys for key in signers):
        raise UnresolvableDID
    return ConnectionRequest(protocol, form, document)


def make_response(
    request: ConnectionRequest, key: SigningKey, signer: SigningKey, endpoints: Sequence[str], thid: str, pthid: str
) -> V1Answer:
    """
    The response to a request, with a DID of the form that the wallet has.

    :param key: of the mediator for this connection.
    :param signer: key of the invitation, which vouches for the other one.
    :param endpoints: URLs of the mediator, the one that is preferred first.
    :param thid: id of the request, by which Credo finds its connection.
    :param pthid: id of the invitation, without which ACA-Py refuses the response.
    """
    own = make_own_document(request.form, key, endpoints)
    if own.document is None:
        name, content, media_type = "did_rotate", own.did.encode("ascii"), "text/string"
    else:
        name, content, media_type = "did_doc", dumps(own.document), "application/json"
    attachment = {"@id": name, **make_signed_attachment(content, media_type, signer)}
    return V1Answer(f"{request.protocol}/response", {"did": own.did, f"{name}~attach": attachment}, thid, pthid)


def open_signed_attachment(attachment: object) -> tuple[bytes, list[str]]:
    """
    Content of an attachment, and the keys whose signatures of it are valid.

    :raise InvalidBody: no attachment in base64 with a JWS, too long, or too many signatures.
    """
    data = _get_object(attachment, "data")
    text, jws = data.get("base64"), _get_object(data, "jws")
    if not isinstance(text, str) or len(text) > MAX_REQUEST_BYTES:
        raise InvalidBody
    try:
        content = decode_lenient_base64(text)
    except ValueError:
        raise InvalidBody from None
    entries = jws.get("signatures", [jws])
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_SIGNATURES or len(content) > MAX_DOCUMENT_BYTES:
        raise InvalidBody
    payload = encode_base64url(content)
    return content, [key for entry in entries for key in _verify_entry(entry, payload)]


def _verify_entry(entry: object, payload: str) -> Iterator[str]:
    """The key of a signature, if it is valid. Libraries name it in either header, or give it as a JWK."""
    try:
        if not isinstance(entry, dict):
            return
        protected, signature = entry["protected"], decode_base64url(entry["signature"])
        header = loads_object(decode_base64url(protected))
        if header.get("alg") != "EdDSA" or "crit" in header:
            return
        key = _find_signer(header, entry.get("header"))
        if verify_signature(key, f"{protected}.{payload}".encode("ascii"), signature):
            yield key
    except (KeyError, ValueError):
        return


def _find_signer(protected: Mapping[str, Any], unprotected: object) -> str:
    """:raise ValueError: none is named, or its key is of another kind."""
    jwk = protected.get("jwk")
    if isinstance(jwk, dict) and jwk.get("crv") == "Ed25519":
        raw = decode_base64url(jwk.get("x"))
        if len(raw) != KEY_SIZE:
            raise InvalidKey("not 32 bytes")
        return encode_did_key(raw)
    kid = unprotected.get("kid") if isinstance(unprotected, dict) else None
    return parse_key(kid or protected.get("kid"))


def make_signed_attachment(content: bytes, media_type: str, signer: SigningKey) -> dict[str, Any]:
    """
    An attachment without an id, with a JWS that all libraries read: Credo takes the key from the unprotected header,
    ACA-Py from the JWK, some versions from its `kid`.
    """
    payload = encode_base64url(content)
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": encode_base64url(signer.verkey), "kid": signer.did_key}
    protected = encode_base64url(dumps({"alg": "EdDSA", "jwk": jwk}))
    signature = encode_base64url(signer.sign(f"{protected}.{payload}".encode("ascii")))
    jws = {"header": {"kid": signer.did_key}, "protected": protected, "signature": signature}
    return {"mime-type": media_type, "data": {"base64": payload, "jws": jws}}


def _get_object(value: object, name: str) -> Mapping[str, Any]:
    """:raise InvalidBody: not an object, or without this member, or that is no object."""
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise InvalidBody
    return found
