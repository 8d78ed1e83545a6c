"""Signatures of communication contracts (reference section 7 and 16)."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.errors import InvalidCommand
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.contracts import (
    OMITTED_BY_A,
    OMITTED_BY_B,
    OMITTED_BY_C,
    RegistrationRequest,
    compute_contract_digest,
    countersign_contract,
    omit_terms,
    parse_registration_request,
    sign_contract,
    sign_contract_request,
    verify_contract_signatures,
    verify_request_signature,
)
from mediatord.protocol.decentrl.crypto import sign_json
from tests.protocol.decentrl.vectors import ALICE, MEDIATOR, VECTORS, agreement_key, secret, signing_key, without

VECTOR = VECTORS["contract"]
REQUEST: dict[str, Any] = VECTOR["request"]
CONTRACT: dict[str, Any] = {
    **REQUEST,
    "recipient_encryption_public_key": VECTOR["recipient_encryption_public_key"],
}
SIGNED: dict[str, Any] = {
    "communication_contract": CONTRACT,
    "requestor_signature": VECTOR["requestor_signature_b"],
    "recipient_signature": VECTOR["recipient_signature"],
}
ALICE_SEED, MEDIATOR_SEED = secret("alice", "signing"), secret("mediator", "signing")
KEYS = {
    (ALICE, f"{ALICE}#signing"): signing_key("alice"),
    (MEDIATOR, f"{MEDIATOR}#signing"): signing_key("mediator"),
}
READINGS = [OMITTED_BY_A, OMITTED_BY_B, OMITTED_BY_C]


def resolve_key(did: str, key_id: str) -> bytes | None:
    """Resolve a key as a DID resolver would."""
    return KEYS.get((did, key_id))


def sign_by_both(contract: dict[str, Any], reading: tuple[str, ...]) -> dict[str, Any]:
    """A SignedCommunicationContract whose requestor signed by this reading."""
    return {
        "communication_contract": contract,
        "requestor_signature": sign_json(omit_terms(contract, reading), ALICE_SEED),
        "recipient_signature": sign_contract(contract, MEDIATOR_SEED),
    }


def build_request(**changes: Any) -> bytes:
    """A wrapped request as from mediatord's wallet, with some terms changed."""
    return encoding.dumps(
        {"communication_contract": {**REQUEST, **changes}, "requestor_signature": VECTOR["requestor_signature_b"]}
    )


def test_known_answers() -> None:
    """The requestor by readings (a) and (b), the recipient, and the digest (reference section 16)."""
    assert sign_contract(CONTRACT, ALICE_SEED) == VECTOR["requestor_signature_a"]
    assert sign_contract_request(REQUEST, ALICE_SEED) == VECTOR["requestor_signature_b"]
    assert sign_contract_request(CONTRACT, ALICE_SEED) == VECTOR["requestor_signature_b"]
    assert sign_contract(CONTRACT, MEDIATOR_SEED) == VECTOR["recipient_signature"]
    assert compute_contract_digest(SIGNED).hex() == VECTOR["sha256"]


def test_known_answer_of_registration() -> None:
    """Countersigning Alice's request gives the vectors (reference section 16)."""
    request = parse_registration_request(build_request())
    signed = countersign_contract(
        request,
        mediator_did=MEDIATOR,
        encryption_key=agreement_key("mediator", "ephemeral"),
        seed=MEDIATOR_SEED,
    )
    assert signed == SIGNED
    assert verify_contract_signatures(signed, resolve_key)


def test_readings() -> None:
    """Which members each of the three readings omits; unknown members stay (reference 7.2)."""
    contract = {**CONTRACT, "more": [1]}
    first, second = "recipient_encryption_public_key", "recipient_signing_key_id"
    assert omit_terms(contract, OMITTED_BY_A) == contract
    assert omit_terms(contract, OMITTED_BY_B) == without(contract, first)
    assert omit_terms(contract, OMITTED_BY_C) == without(contract, first, second)
    assert first in contract and second in contract


@pytest.mark.parametrize("reading", READINGS)
def test_verifies_every_reading(reading: tuple[str, ...]) -> None:
    """A requestor may sign by any of the three readings, with unknown members."""
    for contract in (CONTRACT, {**CONTRACT, "more": {"b": 1.5, "a": None}}):
        assert verify_contract_signatures(sign_by_both(contract, reading), resolve_key)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", [*CONTRACT, "more"])
def test_changed_terms_do_not_verify(reading: tuple[str, ...], name: str) -> None:
    """Whatever the reading, no term can be changed, removed or added."""
    signed = sign_by_both(CONTRACT, reading)
    for contract in ({**CONTRACT, name: "changed"}, {**CONTRACT, name: 1}, without(CONTRACT, name)):
        if contract != CONTRACT:
            assert not verify_contract_signatures(
                {**signed, "communication_contract": contract}, resolve_key_leniently
            )


def resolve_key_leniently(did: str, key_id: str) -> bytes | None:
    """Resolve the right keys even if one name is wrong, so that only the signature can fail."""
    return signing_key("mediator" if MEDIATOR in (did, key_id.partition("#")[0]) else "alice")


@pytest.mark.parametrize("reading", READINGS[1:])
def test_recipient_signs_all_terms(reading: tuple[str, ...]) -> None:
    """The recipient may not omit what a requestor may (reference 7.2)."""
    signature = sign_json(omit_terms(CONTRACT, reading), MEDIATOR_SEED)
    assert not verify_contract_signatures({**SIGNED, "recipient_signature": signature}, resolve_key)


def test_signatures_are_not_interchangeable() -> None:
    """Signatures cannot be exchanged, and one cannot replace both."""
    both = {
        "requestor_signature": SIGNED["recipient_signature"],
        "recipient_signature": SIGNED["requestor_signature"],
    }
    assert not verify_contract_signatures({**SIGNED, **both}, resolve_key)
    assert not verify_contract_signatures(
        {**SIGNED, "requestor_signature": SIGNED["recipient_signature"]}, resolve_key
    )
    assert not verify_contract_signatures(
        {**SIGNED, "recipient_signature": VECTOR["requestor_signature_a"]}, resolve_key
    )


@pytest.mark.parametrize("known", [ALICE, MEDIATOR])
def test_both_keys_must_resolve(known: str) -> None:
    """A contract with an unresolvable participant is not verified."""
    assert not verify_contract_signatures(
        SIGNED, lambda did, key_id: resolve_key(did, key_id) if did == known else None
    )


@pytest.mark.parametrize(
    "signed",
    [
        {},
        {**SIGNED, "communication_contract": None},
        {**SIGNED, "communication_contract": []},
        {**SIGNED, "communication_contract": {}},
        {**SIGNED, "communication_contract": {**CONTRACT, "requestor_did": 5}},
        {**SIGNED, "communication_contract": {**CONTRACT, "requestor_did": []}},
        {**SIGNED, "communication_contract": {**CONTRACT, "recipient_signing_key_id": None}},
        {**SIGNED, "communication_contract": {**CONTRACT, "recipient_signing_key_id": {}}},
        {**SIGNED, "communication_contract": {**CONTRACT, "more": float("nan")}},
        {**SIGNED, "communication_contract": {**CONTRACT, "more": b""}},
        {**SIGNED, "communication_contract": {**CONTRACT, "more": "\ud800"}},
        {**SIGNED, "communication_contract": {**CONTRACT, 5: 5}},
        without(SIGNED, "requestor_signature"),
        without(SIGNED, "recipient_signature"),
        {**SIGNED, "requestor_signature": None},
        {**SIGNED, "recipient_signature": 5},
        {**SIGNED, "recipient_signature": "\ud800"},
    ],
)
def test_malformed_contracts(signed: dict[str, Any]) -> None:
    """Malformed contracts do not verify, and raise no error."""
    assert not verify_contract_signatures(signed, resolve_key)


def test_accepts_immutable_mappings() -> None:
    """Contracts may be any mapping, and are not modified."""
    frozen = MappingProxyType({**SIGNED, "communication_contract": MappingProxyType(CONTRACT)})
    assert verify_contract_signatures(frozen, resolve_key)
    assert compute_contract_digest(MappingProxyType(SIGNED)) == compute_contract_digest(SIGNED)


def test_digest_ignores_json_notation() -> None:
    """The digest does not depend on notation or surrounding members."""
    spelled = json.loads(json.dumps(SIGNED, sort_keys=True).replace("1791536000", "1791536e3"))
    signed_otherwise = {**spelled, "requestor_signature": VECTOR["requestor_signature_a"], "more": None}
    assert compute_contract_digest(signed_otherwise) == compute_contract_digest(SIGNED)
    others = [{**CONTRACT, "expires_at": 1791536001}, {**CONTRACT, "more": None}, without(CONTRACT, "timestamp")]
    contracts = [CONTRACT, *others]
    assert (
        len({compute_contract_digest({**SIGNED, "communication_contract": contract}) for contract in contracts}) == 4
    )


def test_no_digest_of_values_outside_json() -> None:
    """Values outside JSON are no contract."""
    with pytest.raises(InvalidCommand):
        compute_contract_digest({**SIGNED, "communication_contract": {**CONTRACT, "more": float("nan")}})


@pytest.mark.parametrize("signature", ["requestor_signature", "signature"])
@pytest.mark.parametrize("wrapper", ["communication_contract", "communication_contract_request", None])
@pytest.mark.parametrize("left_out", [(), ("recipient_signing_key_id",)])
def test_forms_of_request(signature: str, wrapper: str | None, left_out: tuple[str, ...]) -> None:
    """
    Wrapped under either name or flat, the signature under either name, with or without the mediator's key id
    (reference 7.6).
    """
    terms = without(REQUEST, *left_out)
    contract = {wrapper: terms} if wrapper else terms
    plaintext = encoding.dumps({**contract, signature: sign_contract_request(terms, ALICE_SEED)})
    request = parse_registration_request(plaintext)
    assert request == RegistrationRequest(terms, sign_contract_request(terms, ALICE_SEED))
    assert verify_request_signature(request, signing_key("alice"))
    signed = countersign_contract(request, mediator_did=MEDIATOR, encryption_key=b"\5" * 32, seed=MEDIATOR_SEED)
    assert signed["communication_contract"]["recipient_signing_key_id"] == f"{MEDIATOR}#signing"
    assert verify_contract_signatures(signed, resolve_key)


def test_precedence_of_duplicate_members() -> None:
    """The name as in the signed contract takes precedence, and neither signature is a term."""
    terms = {**REQUEST, "timestamp": 1}
    both = {"requestor_signature": "one", "signature": "other"}
    wrapped = {"communication_contract_request": REQUEST, "communication_contract": terms, **both}
    assert parse_registration_request(encoding.dumps(wrapped)) == RegistrationRequest(terms, "one")
    assert parse_registration_request(encoding.dumps({**terms, **both})) == RegistrationRequest(terms, "one")


def test_request_by_reading_c() -> None:
    """A requestor that names the mediator's signing key need not have signed it (reference 7.2)."""
    signature = sign_json(omit_terms(REQUEST, OMITTED_BY_C), ALICE_SEED)
    assert verify_request_signature(RegistrationRequest(REQUEST, signature), signing_key("alice"))


def test_unknown_members_are_signed() -> None:
    """Members that newer clients add are kept and signed."""
    terms = {**REQUEST, "more": [1.5, {"b": 1, "a": "é"}]}
    plaintext = encoding.dumps(
        {"communication_contract": terms, "signature": sign_contract_request(terms, ALICE_SEED)}
    )
    request = parse_registration_request(plaintext)
    assert request.contract == terms
    assert verify_request_signature(request, signing_key("alice"))
    assert not verify_request_signature(
        RegistrationRequest(REQUEST, request.requestor_signature), signing_key("alice")
    )
    signed = countersign_contract(request, mediator_did=MEDIATOR, encryption_key=b"\5" * 32, seed=MEDIATOR_SEED)
    assert signed["communication_contract"]["more"] == terms["more"]


def test_recipient_encryption_key_in_request_is_refused() -> None:
    """A request cannot contain the mediator's encryption key, or a value in its place."""
    for stray in ("", None, 5, "AAAA"):
        terms = {**REQUEST, "recipient_encryption_public_key": stray}
        request = parse_registration_request(
            encoding.dumps({"communication_contract": terms, "signature": VECTOR["requestor_signature_b"]})
        )
        assert verify_request_signature(request, signing_key("alice"))
        signed = countersign_contract(
            request,
            mediator_did=MEDIATOR,
            encryption_key=agreement_key("mediator", "ephemeral"),
            seed=MEDIATOR_SEED,
        )
        assert signed == SIGNED
        everything = RegistrationRequest(terms, sign_json(terms, ALICE_SEED))
        assert not verify_request_signature(everything, signing_key("alice"))


@pytest.mark.parametrize("name", REQUEST)
def test_changed_request_does_not_verify(name: str) -> None:
    """No term can be changed; the name of the mediator's key is not always signed, but checked."""
    request = RegistrationRequest({**REQUEST, name: "changed"}, VECTOR["requestor_signature_b"])
    assert not verify_request_signature(request, signing_key("alice"))
    assert not verify_request_signature(RegistrationRequest(REQUEST, request.requestor_signature), b"")


@pytest.mark.parametrize("name", [name for name in REQUEST if name != "recipient_signing_key_id"])
@pytest.mark.parametrize("value", [None, True, [], {}, ...])
def test_invalid_terms(name: str, value: object) -> None:
    """Every term is required, with the right type (reference 7.1)."""
    terms = without(REQUEST, name) if value is ... else {**REQUEST, name: value}
    for plaintext in (
        encoding.dumps({"communication_contract": terms, "requestor_signature": "x"}),
        encoding.dumps({**terms, "requestor_signature": "x"}),
    ):
        with pytest.raises(InvalidCommand):
            parse_registration_request(plaintext)


@pytest.mark.parametrize(
    "plaintext",
    [
        build_request(requestor_did=""),
        build_request(requestor_did=5),
        build_request(expires_at="1791536000"),
        build_request(recipient_signing_key_id=None),
        build_request(recipient_signing_key_id=5),
        build_request(recipient_signing_key_id=""),
        build_request().replace(b"1791536000", b"1e999"),
        build_request().replace(b"1791536000", b"NaN"),
        build_request().replace(b'"timestamp":1760000000', b'"timestamp":1,"timestamp":1'),
        build_request().replace(b"requestor_signature", b"recipient_signature"),
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"communication_contract":null,"signature":"x"}',
        b'{"communication_contract":[],"signature":"x"}',
        encoding.dumps({"communication_contract": REQUEST}),
        encoding.dumps({"communication_contract": REQUEST, "requestor_signature": None}),
        encoding.dumps({"communication_contract": REQUEST, "requestor_signature": None, "signature": "x"}),
        encoding.dumps({"communication_contract": REQUEST, "requestor_signature": 5}),
        encoding.dumps({"communication_contract": {**REQUEST, "requestor_signature": "x"}}),
    ],
)
def test_invalid_requests(plaintext: bytes) -> None:
    """Any other plaintext is an invalid command (reference 7.6)."""
    with pytest.raises(InvalidCommand):
        parse_registration_request(plaintext)


@settings(deadline=None)
@given(st.binary())
def test_arbitrary_plaintext(plaintext: bytes) -> None:
    """Arbitrary decrypted bytes are parsed or refused."""
    with pytest.raises(InvalidCommand):
        parse_registration_request(plaintext)


def test_request_outside_json() -> None:
    """A request that JSON cannot express is an invalid command."""
    with pytest.raises(InvalidCommand):
        countersign_contract(
            RegistrationRequest({**REQUEST, "more": float("nan")}, "x"),
            mediator_did=MEDIATOR,
            encryption_key=b"\5" * 32,
            seed=MEDIATOR_SEED,
        )


TERMS = st.dictionaries(
    st.text().filter(lambda name: name not in CONTRACT),
    st.none() | st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.lists(st.text()),
    max_size=4,
)


@settings(deadline=None)
@given(TERMS, st.floats(0, 1e12), st.sampled_from([READINGS[1], READINGS[2]]))
def test_round_trip(more: dict[str, Any], expires_at: float, reading: tuple[str, ...]) -> None:
    """From a request in JSON to a contract in JSON that verifies, with any other members."""
    terms = {**REQUEST, "expires_at": expires_at, **more}
    wrapped = {
        "communication_contract": terms,
        "requestor_signature": sign_json(omit_terms(terms, reading), ALICE_SEED),
    }
    request = parse_registration_request(json.dumps(wrapped).encode())
    assert verify_request_signature(request, signing_key("alice"))
    signed = countersign_contract(request, mediator_did=MEDIATOR, encryption_key=b"\5" * 32, seed=MEDIATOR_SEED)
    received = json.loads(json.dumps(signed))
    assert verify_contract_signatures(received, resolve_key)
    assert compute_contract_digest(received) == compute_contract_digest(signed)


def test_repr_hides_terms_and_signature() -> None:
    """Neither terms nor signature are in the representation."""
    assert repr(parse_registration_request(build_request())) == "RegistrationRequest()"
