"""Communication contracts: who signed what (reference section 7 and 16)."""

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


def key_of(did: str, key_id: str) -> bytes | None:
    """As a resolver of DIDs would say."""
    return KEYS.get((did, key_id))


def signed_by_both(contract: dict[str, Any], reading: tuple[str, ...]) -> dict[str, Any]:
    """A SignedCommunicationContract whose requestor signed by this reading."""
    return {
        "communication_contract": contract,
        "requestor_signature": sign_json(omit_terms(contract, reading), ALICE_SEED),
        "recipient_signature": sign_contract(contract, MEDIATOR_SEED),
    }


def a_request(**changes: Any) -> bytes:
    """A wrapped request, as our own wallet sends it, with some terms changed."""
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


def test_known_answer_of_a_registration() -> None:
    """The mediator makes of Alice's request what the vectors say (reference section 16)."""
    request = parse_registration_request(a_request())
    signed = countersign_contract(
        request,
        mediator_did=MEDIATOR,
        encryption_key=agreement_key("mediator", "ephemeral"),
        seed=MEDIATOR_SEED,
    )
    assert signed == SIGNED
    assert verify_contract_signatures(signed, key_of)


def test_readings() -> None:
    """What each of the three leaves out; members that are unknown stay (reference 7.2)."""
    contract = {**CONTRACT, "more": [1]}
    first, second = "recipient_encryption_public_key", "recipient_signing_key_id"
    assert omit_terms(contract, OMITTED_BY_A) == contract
    assert omit_terms(contract, OMITTED_BY_B) == without(contract, first)
    assert omit_terms(contract, OMITTED_BY_C) == without(contract, first, second)
    assert first in contract and second in contract


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_holds(reading: tuple[str, ...]) -> None:
    """A requestor may have signed by any of the three, with members that we do not know as well."""
    for contract in (CONTRACT, {**CONTRACT, "more": {"b": 1.5, "a": None}}):
        assert verify_contract_signatures(signed_by_both(contract, reading), key_of)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", [*CONTRACT, "more"])
def test_tampering_with_the_terms(reading: tuple[str, ...], name: str) -> None:
    """Whatever the reading, no term can be changed, taken away or added afterwards."""
    signed = signed_by_both(CONTRACT, reading)
    for contract in ({**CONTRACT, name: "changed"}, {**CONTRACT, name: 1}, without(CONTRACT, name)):
        if contract != CONTRACT:
            assert not verify_contract_signatures({**signed, "communication_contract": contract}, lenient_key_of)


def lenient_key_of(did: str, key_id: str) -> bytes | None:
    """The right keys even where one of the two names is wrong, so that nothing but a signature can refuse."""
    return signing_key("mediator" if MEDIATOR in (did, key_id.partition("#")[0]) else "alice")


@pytest.mark.parametrize("reading", READINGS[1:])
def test_the_recipient_signs_everything(reading: tuple[str, ...]) -> None:
    """What a requestor may leave out a recipient may not (reference 7.2)."""
    signature = sign_json(omit_terms(CONTRACT, reading), MEDIATOR_SEED)
    assert not verify_contract_signatures({**SIGNED, "recipient_signature": signature}, key_of)


def test_each_signs_for_itself() -> None:
    """The signatures cannot change places, and one cannot stand for both."""
    both = {
        "requestor_signature": SIGNED["recipient_signature"],
        "recipient_signature": SIGNED["requestor_signature"],
    }
    assert not verify_contract_signatures({**SIGNED, **both}, key_of)
    assert not verify_contract_signatures({**SIGNED, "requestor_signature": SIGNED["recipient_signature"]}, key_of)
    assert not verify_contract_signatures({**SIGNED, "recipient_signature": VECTOR["requestor_signature_a"]}, key_of)


@pytest.mark.parametrize("known", [ALICE, MEDIATOR])
def test_a_participant_without_a_key(known: str) -> None:
    """Both keys have to be found."""
    assert not verify_contract_signatures(SIGNED, lambda did, key_id: key_of(did, key_id) if did == known else None)


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
def test_odd_contracts(signed: dict[str, Any]) -> None:
    """What has not even the shape of a contract is not signed, and no error either."""
    assert not verify_contract_signatures(signed, key_of)


def test_any_mapping_will_do() -> None:
    """Contracts are looked at, and never changed."""
    frozen = MappingProxyType({**SIGNED, "communication_contract": MappingProxyType(CONTRACT)})
    assert verify_contract_signatures(frozen, key_of)
    assert compute_contract_digest(MappingProxyType(SIGNED)) == compute_contract_digest(SIGNED)


def test_digest_of_any_spelling() -> None:
    """The same contract has the same digest, however its JSON is written and whatever stands around it."""
    spelled = json.loads(json.dumps(SIGNED, sort_keys=True).replace("1791536000", "1791536e3"))
    signed_otherwise = {**spelled, "requestor_signature": VECTOR["requestor_signature_a"], "more": None}
    assert compute_contract_digest(signed_otherwise) == compute_contract_digest(SIGNED)
    others = [{**CONTRACT, "expires_at": 1791536001}, {**CONTRACT, "more": None}, without(CONTRACT, "timestamp")]
    contracts = [CONTRACT, *others]
    assert (
        len({compute_contract_digest({**SIGNED, "communication_contract": contract}) for contract in contracts}) == 4
    )


def test_no_digest() -> None:
    """What JSON cannot express is no contract."""
    with pytest.raises(InvalidCommand):
        compute_contract_digest({**SIGNED, "communication_contract": {**CONTRACT, "more": float("nan")}})


@pytest.mark.parametrize("signature", ["requestor_signature", "signature"])
@pytest.mark.parametrize("wrapper", ["communication_contract", "communication_contract_request", None])
@pytest.mark.parametrize("left_out", [(), ("recipient_signing_key_id",)])
def test_forms_of_a_request(signature: str, wrapper: str | None, left_out: tuple[str, ...]) -> None:
    """Wrapped under either name or flat, the signature under either name, our key id given or not (reference 7.6)."""
    terms = without(REQUEST, *left_out)
    contract = {wrapper: terms} if wrapper else terms
    plaintext = encoding.dumps({**contract, signature: sign_contract_request(terms, ALICE_SEED)})
    request = parse_registration_request(plaintext)
    assert request == RegistrationRequest(terms, sign_contract_request(terms, ALICE_SEED))
    assert verify_request_signature(request, signing_key("alice"))
    signed = countersign_contract(request, mediator_did=MEDIATOR, encryption_key=b"\5" * 32, seed=MEDIATOR_SEED)
    assert signed["communication_contract"]["recipient_signing_key_id"] == f"{MEDIATOR}#signing"
    assert verify_contract_signatures(signed, key_of)


def test_what_is_preferred() -> None:
    """Of two names for one thing, that of the signed contract counts, and neither signature is a term."""
    terms = {**REQUEST, "timestamp": 1}
    both = {"requestor_signature": "one", "signature": "other"}
    wrapped = {"communication_contract_request": REQUEST, "communication_contract": terms, **both}
    assert parse_registration_request(encoding.dumps(wrapped)) == RegistrationRequest(terms, "one")
    assert parse_registration_request(encoding.dumps({**terms, **both})) == RegistrationRequest(terms, "one")


def test_a_request_by_reading_c() -> None:
    """A requestor that names our signing key need not have signed that (reference 7.2)."""
    signature = sign_json(omit_terms(REQUEST, OMITTED_BY_C), ALICE_SEED)
    assert verify_request_signature(RegistrationRequest(REQUEST, signature), signing_key("alice"))


def test_members_that_are_unknown_are_signed() -> None:
    """What a newer client adds is kept, and was signed."""
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


def test_a_key_that_is_not_the_requestors_to_give() -> None:
    """An encryption key of ours in a request, or something in its place, is not what was signed, nor what we sign."""
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
def test_tampering_with_a_request(name: str) -> None:
    """No term of a request can be changed, except the name of our key, which is not always signed but is checked."""
    request = RegistrationRequest({**REQUEST, name: "changed"}, VECTOR["requestor_signature_b"])
    assert not verify_request_signature(request, signing_key("alice"))
    assert not verify_request_signature(RegistrationRequest(REQUEST, request.requestor_signature), b"")


@pytest.mark.parametrize("name", [name for name in REQUEST if name != "recipient_signing_key_id"])
@pytest.mark.parametrize("value", [None, True, [], {}, ...])
def test_terms_of_the_wrong_shape(name: str, value: object) -> None:
    """Every term has to be there, a text or a number as it should be (reference 7.1)."""
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
        a_request(requestor_did=""),
        a_request(requestor_did=5),
        a_request(expires_at="1791536000"),
        a_request(recipient_signing_key_id=None),
        a_request(recipient_signing_key_id=5),
        a_request(recipient_signing_key_id=""),
        a_request().replace(b"1791536000", b"1e999"),
        a_request().replace(b"1791536000", b"NaN"),
        a_request().replace(b'"timestamp":1760000000', b'"timestamp":1,"timestamp":1'),
        a_request().replace(b"requestor_signature", b"recipient_signature"),
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
def test_what_is_no_request(plaintext: bytes) -> None:
    """Anything else is an invalid command, whatever is wrong with it (reference 7.6)."""
    with pytest.raises(InvalidCommand):
        parse_registration_request(plaintext)


@settings(deadline=None)
@given(st.binary())
def test_whatever_was_encrypted(plaintext: bytes) -> None:
    """Strangers decide what a request decrypts to; it is read or refused."""
    with pytest.raises(InvalidCommand):
        parse_registration_request(plaintext)


def test_nothing_to_countersign() -> None:
    """A request that JSON cannot express is an invalid command here too."""
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
    """From a request in JSON to a contract in JSON that verifies, whatever else is in it."""
    terms = {**REQUEST, "expires_at": expires_at, **more}
    wrapped = {
        "communication_contract": terms,
        "requestor_signature": sign_json(omit_terms(terms, reading), ALICE_SEED),
    }
    request = parse_registration_request(json.dumps(wrapped).encode())
    assert verify_request_signature(request, signing_key("alice"))
    signed = countersign_contract(request, mediator_did=MEDIATOR, encryption_key=b"\5" * 32, seed=MEDIATOR_SEED)
    received = json.loads(json.dumps(signed))
    assert verify_contract_signatures(received, key_of)
    assert compute_contract_digest(received) == compute_contract_digest(signed)


def test_nothing_is_shown() -> None:
    """Neither terms nor signature are in the representation."""
    assert repr(parse_registration_request(a_request())) == "RegistrationRequest()"
