"""
Signatures of communication contracts (DCTRL-0003, reference section 7).

Contracts remain mappings as received, unknown members included, since that is what was signed. The requestor signs
before the recipient has generated its encryption key; the specification leaves open which terms are then excluded, so
all consistent readings are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mediatord.errors import InvalidCommand
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.canonical_json import canonicalize, loads
from mediatord.protocol.decentrl.crypto import sign_json, verify_bytes
from mediatord.protocol.encoding import JSONSource, encode_base64

_RECIPIENT_ENCRYPTION_KEY = "recipient_encryption_public_key"
_RECIPIENT_SIGNING_KEY = "recipient_signing_key_id"
_WRAPPERS = ("communication_contract", "communication_contract_request")
_SIGNATURES = ("requestor_signature", "signature")
_TEXT_MEMBERS = ("requestor_did", "recipient_did", "requestor_signing_key_id", "requestor_encryption_public_key")
_TIME_MEMBERS = ("expires_at", "timestamp")


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """
    A registration proposed to the mediator. Texts are strings and times numbers; nothing else is checked.

    :param contract: as received, without the terms that the recipient adds.
    :param source: JSON source of the contract.
    """

    contract: Mapping[str, Any] = field(repr=False)
    requestor_signature: str = field(repr=False)
    source: bytes = field(repr=False, compare=False, default=b"")


# Terms that a signature does not cover: by reading (a) of the requestor's, and of the recipient's, none; by (b) the
# recipient's encryption key, which is generated later; by (c) its signing key id as well.
OMITTED_BY_A: tuple[str, ...] = ()
OMITTED_BY_B = (_RECIPIENT_ENCRYPTION_KEY,)
OMITTED_BY_C = (_RECIPIENT_ENCRYPTION_KEY, _RECIPIENT_SIGNING_KEY)
# The likeliest first: only invalid signatures need all attempts.
_CONTRACT_READINGS = (OMITTED_BY_B, OMITTED_BY_A, OMITTED_BY_C)
_REQUEST_READINGS = (OMITTED_BY_B, OMITTED_BY_C)


def omit_terms(contract: Mapping[str, Any], omitted: Collection[str]) -> dict[str, Any]:
    """The terms that a signature covers."""
    return {name: term for name, term in contract.items() if name not in omitted}


def verify_contract_signatures(signed: Mapping[str, Any], key_of: Callable[[str, str], bytes | None]) -> bool:
    """
    Whether both parties signed a SignedCommunicationContract; never raises.

    :param key_of: Ed25519 public key of a DID and key id; None if unknown.
    """
    contract = signed.get("communication_contract")
    if not isinstance(contract, Mapping):
        return False
    requestor = _find_signing_key(contract, "requestor", key_of)
    recipient = _find_signing_key(contract, "recipient", key_of)
    if requestor is None or recipient is None:
        return False
    return _verify_any_terms(
        contract, signed.get("recipient_signature"), recipient, (OMITTED_BY_A,)
    ) and _verify_any_terms(contract, signed.get("requestor_signature"), requestor, _CONTRACT_READINGS)


def compute_contract_digest(signed: Mapping[str, Any]) -> bytes:
    """
    SHA-256 of the canonical communication contract in a SignedCommunicationContract (reference 7.4).

    Signatures are excluded, since one contract can carry different ones.

    :raise InvalidCommand: it has no canonical form.
    """
    try:
        return sha256(canonicalize(signed.get("communication_contract"))).digest()
    except ValueError:
        raise InvalidCommand from None


def parse_registration_request(plaintext: bytes) -> RegistrationRequest:
    """
    Read a decrypted registration request: a contract with its signature beside or inside it (reference 7.6).

    :raise InvalidCommand: anything else.
    """
    try:
        document = loads(plaintext)
    except ValueError:
        raise InvalidCommand from None
    signature = next((document[name] for name in _SIGNATURES if name in document), None)
    flat = {name: member for name, member in document.items() if name not in _SIGNATURES}
    wrapper = next((name for name in _WRAPPERS if name in document), None)
    contract = flat if wrapper is None else document[wrapper]
    if not isinstance(signature, str) or not isinstance(contract, dict) or not _has_request_members(contract):
        raise InvalidCommand
    source = JSONSource(plaintext)
    try:
        text = source.edited(without=_SIGNATURES) if wrapper is None else source.text(source.find(wrapper))
    except ValueError:
        raise InvalidCommand from None
    return RegistrationRequest(contract, signature, text)


def verify_request_signature(request: RegistrationRequest, key: bytes) -> bool:
    """
    Whether the requestor signed the request as received, except for terms only the recipient knows.

    :param key: the requestor's Ed25519 public key.
    """
    return _verify_any_terms(request.contract, request.requestor_signature, key, _REQUEST_READINGS)


def countersign_contract(
    request: RegistrationRequest, *, mediator_did: str, encryption_key: bytes, seed: bytes
) -> dict[str, Any]:
    """
    Make the SignedCommunicationContract of a registration request.

    :param encryption_key: the mediator's public X25519 key for this contract.
    :param seed: 32-byte seed of the mediator's Ed25519 key.
    :raise InvalidCommand: the request has no canonical form.
    """
    contract = {
        **request.contract,
        _RECIPIENT_SIGNING_KEY: f"{mediator_did}#signing",
        _RECIPIENT_ENCRYPTION_KEY: encode_base64(encryption_key),
    }
    try:
        signature = sign_contract(contract, seed)
    except ValueError:
        raise InvalidCommand from None
    return {
        "communication_contract": contract,
        "requestor_signature": request.requestor_signature,
        "recipient_signature": signature,
    }


def render_countersigned_contract(request: RegistrationRequest, signed: Mapping[str, Any]) -> bytes:
    """
    Serialise the result of :func:`countersign_contract` with the requestor's terms verbatim.

    :raise InvalidCommand: more members than any contract has.
    """
    contract, source = signed["communication_contract"], JSONSource(request.source)
    ours = {name: encoding.dumps(contract[name]) for name in (_RECIPIENT_SIGNING_KEY, _RECIPIENT_ENCRYPTION_KEY)}
    try:
        text = source.edited(added=ours)
    except ValueError:
        raise InvalidCommand from None
    return encoding.dumps({**signed, "communication_contract": encoding.wrap_json_fragment(text)})


def sign_contract_request(contract: Mapping[str, Any], seed: bytes) -> str:
    """
    The requestor's signature by reading (b), as mediatord's wallet makes it.

    :raise ValueError: the contract has no canonical form.
    """
    return sign_json(omit_terms(contract, OMITTED_BY_B), seed)


def sign_contract(contract: Mapping[str, Any], seed: bytes) -> str:
    """
    The recipient's signature.

    :raise ValueError: as :func:`sign_contract_request`.
    """
    return sign_json(dict(contract), seed)


def _find_signing_key(
    contract: Mapping[str, Any], role: str, key_of: Callable[[str, str], bytes | None]
) -> bytes | None:
    did, key_id = contract.get(f"{role}_did"), contract.get(f"{role}_signing_key_id")
    return key_of(did, key_id) if isinstance(did, str) and isinstance(key_id, str) else None


def _verify_any_terms(
    contract: Mapping[str, Any], signature: object, key: bytes, readings: Collection[Collection[str]]
) -> bool:
    if not isinstance(signature, str):
        return False
    tried = set()
    for omitted in readings:
        try:
            terms = canonicalize(omit_terms(contract, omitted))
        except ValueError:
            return False
        if terms not in tried and verify_bytes(terms, signature, key):
            return True
        tried.add(terms)
    return False


def _has_request_members(contract: Mapping[str, Any]) -> bool:
    texts = [contract.get(name) for name in _TEXT_MEMBERS]
    if _RECIPIENT_SIGNING_KEY in contract:
        texts.append(contract[_RECIPIENT_SIGNING_KEY])
    times = [contract.get(name) for name in _TIME_MEMBERS]
    return all(isinstance(text, str) and text for text in texts) and all(
        isinstance(time, (int, float)) and not isinstance(time, bool) for time in times
    )
