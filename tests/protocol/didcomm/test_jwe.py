"""Envelopes: what is emitted, what is read, and what is refused (reference section 1)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jwcrypto.jwe import JWE
from jwcrypto.jwk import JWK

from mediatord.errors import DecryptionError, EncryptionRequired, InvalidEnvelope, MediatorError
from mediatord.protocol.didcomm.jwe import (
    Enc,
    Envelope,
    EphemeralKey,
    decrypt_envelope,
    encrypt_anoncrypt,
    encrypt_authcrypt,
    parse_envelope,
)
from mediatord.protocol.didcomm.keys import Curve, PrivateKey
from mediatord.protocol.encoding import encode_base64url
from tests.protocol.didcomm.foreign_jwe import Writing, b64, compact, unb64

CURVES: tuple[Curve, ...] = ("X25519", "P-256", "P-384", "P-521")
ENCS: tuple[Enc, ...] = ("A256CBC-HS512", "A256GCM", "XC20P")
ALICE, BOB, CAROL = "did:example:alice#key-1", "did:example:bob#key-1", "did:example:bob#key-2"
ALICES = {curve: PrivateKey.generate(curve) for curve in CURVES}
BOBS = {curve: PrivateKey.generate(curve) for curve in CURVES}
CAROLS = {curve: PrivateKey.generate(curve) for curve in CURVES}
TEXT = b'{"id":"1","type":"https://example.org/1.0/hello","body":{}}'

Change = Callable[[dict[str, Any]], object]


def opened(jwe: dict[str, Any] | bytes, curve: Curve = "X25519", *, draft03: bool = False) -> bytes:
    """What Bob makes of it, who knows Alice's key."""
    envelope = parse_envelope(jwe if isinstance(jwe, bytes) else compact(jwe))
    sender = ALICES[curve].public if bool(envelope.sender_kid) else None
    return decrypt_envelope(envelope, BOB, BOBS[curve], sender, draft03=draft03)


def written(writing: Writing, curve: Curve = "X25519") -> dict[str, Any]:
    return writing.write(TEXT, (BOB, BOBS[curve].public))


def authcrypt(curve: Curve = "X25519", **options: Any) -> Writing:
    return Writing(sender=(ALICE, ALICES[curve]), **options)


def protected_of(raw: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(unb64(json.loads(raw)["protected"]))
    return header


# What we emit


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("enc", ENCS)
def test_anoncrypt_round_trip(curve: Curve, enc: Enc) -> None:
    """Each recipient opens an anoncrypt on any curve and with any content encryption (reference 1.2)."""
    raw = encrypt_anoncrypt(TEXT, [(CAROL, CAROLS[curve].public), (BOB, BOBS[curve].public)], enc=enc)
    envelope = parse_envelope(raw)
    assert (bool(envelope.sender_kid), envelope.header["enc"], envelope.curve, envelope.sender_kid) == (
        False,
        enc,
        curve,
        None,
    )
    assert decrypt_envelope(envelope, BOB, BOBS[curve], None) == TEXT
    assert decrypt_envelope(envelope, CAROL, CAROLS[curve], None) == TEXT


@pytest.mark.parametrize("curve", CURVES)
def test_authcrypt_round_trip(curve: Curve) -> None:
    """Each recipient opens an authcrypt on any curve with the sender's key (reference 1.2)."""
    raw = encrypt_authcrypt(TEXT, (ALICE, ALICES[curve]), [(CAROL, CAROLS[curve].public), (BOB, BOBS[curve].public)])
    envelope = parse_envelope(raw)
    assert (bool(envelope.sender_kid), envelope.header["enc"], envelope.curve) == (True, "A256CBC-HS512", curve)
    assert envelope.sender_kid == ALICE
    assert not envelope.lacks_apv
    assert decrypt_envelope(envelope, BOB, BOBS[curve], ALICES[curve].public) == TEXT
    assert decrypt_envelope(envelope, CAROL, CAROLS[curve], ALICES[curve].public) == TEXT


def test_emitted_layout() -> None:
    """General JSON, recipients sorted, nothing but the kid outside the protected header (reference 1.3)."""
    keys = [(CAROL, CAROLS["X25519"].public), (BOB, BOBS["X25519"].public)]
    for raw in (encrypt_anoncrypt(TEXT, keys), encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), keys)):
        jwe = json.loads(raw)
        assert set(jwe) == {"protected", "recipients", "iv", "ciphertext", "tag"}
        assert [entry["header"] for entry in jwe["recipients"]] == [{"kid": BOB}, {"kid": CAROL}]
        assert all(set(entry) == {"header", "encrypted_key"} for entry in jwe["recipients"])
        assert b"=" not in raw


def test_emitted_protected_header() -> None:
    """The members of reference 1.3, `apu` and `skid` for authcrypt only, no private member in `epk`."""
    keys = [(BOB, BOBS["X25519"].public)]
    header = protected_of(encrypt_anoncrypt(TEXT, keys))
    assert set(header) == {"typ", "alg", "enc", "epk", "apv"}
    assert header["typ"] == "application/didcomm-encrypted+json"
    assert (header["alg"], header["enc"]) == ("ECDH-ES+A256KW", "A256CBC-HS512")
    assert set(header["epk"]) == {"kty", "crv", "x"}
    header = protected_of(encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), keys))
    assert set(header) == {"typ", "alg", "enc", "epk", "apv", "apu", "skid"}
    assert (header["alg"], header["enc"]) == ("ECDH-1PU+A256KW", "A256CBC-HS512")
    assert (header["skid"], unb64(header["apu"])) == (ALICE, ALICE.encode())


def test_emitted_apv() -> None:
    """The worked value of reference 1.3."""
    key = BOBS["X25519"].public
    raw = encrypt_anoncrypt(TEXT, [(f"did:example:bob#key-x25519-{number}", key) for number in (2, 3, 1)])
    digest = "35cb2e027ad17cf2baf40fab919d0bf575941b88ccbcd0b7660ef804fcf9dcf0"
    assert unb64(protected_of(raw)["apv"]).hex() == digest


def test_nothing_repeats() -> None:
    """Two envelopes with the same content share neither key, IV nor ciphertext."""
    keys = [(BOB, BOBS["X25519"].public)]
    one, other = json.loads(encrypt_anoncrypt(TEXT, keys)), json.loads(encrypt_anoncrypt(TEXT, keys))
    assert all(one[name] != other[name] for name in ("protected", "iv", "ciphertext", "tag"))


@pytest.mark.parametrize("curve", CURVES)
def test_ephemeral_key_is_used_again(curve: Curve) -> None:
    """Envelopes of one ephemeral key open like others, and share neither IV nor ciphertext nor wrapped key."""
    key, keys = EphemeralKey.generate(curve), [(BOB, BOBS[curve].public)]
    raw = [encrypt_authcrypt(TEXT, (ALICE, ALICES[curve]), keys, key) for _ in range(2)]
    assert [opened(one, curve) for one in raw] == [TEXT, TEXT]
    assert [protected_of(one)["epk"] for one in raw] == [key.jwk, key.jwk]
    one, other = map(json.loads, raw)
    assert all(one[name] != other[name] for name in ("recipients", "iv", "ciphertext", "tag"))


def test_what_cannot_be_sealed() -> None:
    """No recipient, recipients on different curves, a sender on another curve, a key of low order: ValueError."""
    x25519, p256 = (BOB, BOBS["X25519"].public), (CAROL, CAROLS["P-256"].public)
    for seal in (encrypt_anoncrypt, lambda text, keys: encrypt_authcrypt(text, (ALICE, ALICES["X25519"]), keys)):
        for keys in ([], [x25519, p256], [(BOB, type(x25519[1])("X25519", bytes(32)))]):
            with pytest.raises(ValueError):
                seal(TEXT, keys)
    with pytest.raises(ValueError):
        encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), [p256])


# jwcrypto and the second writer agree with us


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("enc", ENCS[:2])
def test_jwcrypto_reads_ours(curve: Curve, enc: Enc) -> None:
    """An independent implementation opens our anoncrypt (reference 1.9)."""
    token = JWE()
    token.deserialize(
        encrypt_anoncrypt(TEXT, [(BOB, BOBS[curve].public)], enc=enc).decode(), JWK(**BOBS[curve].jwk())
    )
    assert token.payload == TEXT


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("enc", ENCS[:2])
@pytest.mark.parametrize("others", [0, 1])
def test_we_read_jwcrypto(curve: Curve, enc: Enc, others: int) -> None:
    """We open what it writes: flattened for one recipient, epk in the recipient header, no apv (reference D3)."""
    token = JWE(TEXT, json.dumps({"alg": "ECDH-ES+A256KW", "enc": enc}))
    token.add_recipient(JWK(**BOBS[curve].public.jwk()), json.dumps({"kid": BOB}))
    for number in range(others):
        token.add_recipient(JWK(**CAROLS[curve].public.jwk()), json.dumps({"kid": f"{CAROL}{number}"}))
    raw = token.serialize().encode()
    assert ("encrypted_key" in json.loads(raw)) == (others == 0)
    envelope = parse_envelope(raw)
    assert envelope.lacks_apv
    assert opened(raw, curve) == TEXT


@pytest.mark.parametrize("curve", CURVES)
def test_second_writer(curve: Curve) -> None:
    """Independently written anoncrypt and authcrypt open on every curve."""
    assert opened(written(Writing(), curve), curve) == TEXT
    assert opened(written(Writing(enc="A256GCM"), curve), curve) == TEXT
    assert opened(written(authcrypt(curve), curve), curve) == TEXT


# What we tolerate (reference D3)


def changed(**members: Any) -> Change:
    """Set members of a header; None takes one out."""

    def change(header: dict[str, Any]) -> None:
        for name, value in members.items():
            header.pop(name, None)
            if value is not None:
                header[name] = value

    return change


TOLERATED = {
    "no apv": Writing(change=changed(apv=None)),
    "no typ": Writing(change=changed(typ=None)),
    "odd typ": Writing(change=changed(typ="application/didcomm+encrypted")),
    "typ that is no string": Writing(change=changed(typ=7)),
    "epk in the recipient header": Writing(moved=("epk",)),
    "all but enc in the recipient header": Writing(moved=("epk", "alg", "apv")),
    "apu in an anoncrypt": Writing(change=changed(apu=b64(ALICE.encode()))),
    "skid in an anoncrypt": Writing(change=changed(skid=ALICE)),
    "members nobody knows": Writing(headers={"foo": [1, {"a": None}]}, change=changed(bar={})),
    "pretty-printed header": Writing(encode=lambda header: json.dumps(header, indent=2).encode()),
    "escaped header": Writing(encode=lambda header: compact(header).replace(b"/", b"\\/")),
    "sender in skid only": authcrypt(change=changed(apu=None)),
    "sender in apu only": authcrypt(change=changed(skid=None)),
    "authcrypt without apv": authcrypt(change=changed(apv=None)),
    "authcrypt with all in the recipient header": authcrypt(moved=("epk", "alg", "apv", "apu", "skid", "enc")),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_tolerated_writing(name: str) -> None:
    """Released clients write envelopes in these ways, in General and in flattened form."""
    jwe = written(TOLERATED[name])
    assert opened(jwe) == TEXT
    assert opened(flattened(jwe)) == TEXT


def flattened(jwe: dict[str, Any]) -> dict[str, Any]:
    (entry,) = jwe["recipients"]
    return {**{name: value for name, value in jwe.items() if name != "recipients"}, **entry}


def test_apu_is_no_sender_in_an_anoncrypt() -> None:
    """An anoncrypt never has a sender, whatever its headers say (reference 1.6 step 8)."""
    writing = Writing(change=changed(apu=b64(ALICE.encode()), skid=ALICE))
    envelope = parse_envelope(compact(written(writing)))
    assert envelope.sender_kid is None
    assert not bool(envelope.sender_kid)


def test_fingerprint() -> None:
    """It is that of the content: a recipient more or other padding changes nothing, other content does."""
    one, other = (written(authcrypt()) for _ in range(2))
    padded = {**one, "tag": one["tag"] + "=" * (-len(one["tag"]) % 4)}
    first, again, more = (parse_envelope(compact(jwe)).compute_digest() for jwe in (one, padded, flattened(one)))
    assert first == again == more != parse_envelope(compact(other)).compute_digest()
    for name in ("protected", "tag"):
        assert parse_envelope(compact({**one, name: other[name]})).compute_digest() != first
    assert len(first) == 32


def test_shared_unprotected_header() -> None:
    """Members may stand in the header that is shared and unprotected (RFC 7516 section 7.2.1)."""
    jwe = written(Writing(moved=("alg",)))
    del jwe["recipients"][0]["header"]["alg"]
    jwe["unprotected"] = {"alg": "ECDH-ES+A256KW"}
    assert opened(jwe) == TEXT


def test_padded_members() -> None:
    """Base64url with padding is read like base64url without."""
    jwe = written(Writing())
    for name in ("iv", "tag", "ciphertext"):
        jwe[name] += "=" * (-len(jwe[name]) % 4)
    assert opened(jwe) == TEXT


def test_a_hundred_recipients() -> None:
    """A hundred recipients are read, one more is not (reference 1.6 step 6)."""
    keys = [(f"did:example:bob#k{number}", CAROLS["X25519"].public) for number in range(100)]
    assert opened(Writing().write(TEXT, (BOB, BOBS["X25519"].public), *keys[:99])) == TEXT
    with pytest.raises(DecryptionError):
        parse_envelope(compact(Writing().write(TEXT, (BOB, BOBS["X25519"].public), *keys)))


# What we refuse (reference 1.2 and 1.6)


def twice(name: str) -> Callable[[dict[str, Any]], bytes]:
    """A protected header that has a member of this name two times over, with the same value."""
    return lambda header: b"{" + compact({name: header[name]})[1:-1] + b"," + compact(header)[1:]


def off_curve(header: dict[str, Any]) -> None:
    header["epk"] = {**header["epk"], "y": header["epk"]["x"]}


ALL_ALGS = (
    "dir",
    "A256KW",
    "RSA-OAEP",
    "PBES2-HS512+A256KW",
    "ECDH-ES",
    "ECDH-1PU",
    "ECDH-ES+A128KW",
    "none",
    5,
    None,
)
ALL_ENCS: tuple[Any, ...] = ("A128GCM", "A128CBC-HS256", "A192CBC-HS384", "", [], None)

REFUSED = {
    **{f"alg {alg}": Writing(change=changed(alg=alg)) for alg in ALL_ALGS},
    **{f"enc {enc}": Writing(change=changed(enc=enc)) for enc in ALL_ENCS},
    "zip": Writing(change=changed(zip="DEF")),
    "zip of one recipient": Writing(headers={"zip": "DEF"}),
    "crit": Writing(change=changed(crit=["exp"], exp=1)),
    "crit of one recipient": Writing(headers={"crit": ["exp"], "exp": 1}),
    "doubled enc": Writing(encode=twice("enc")),
    "doubled epk member": Writing(encode=lambda header: compact(header).replace(b'"kty"', b'"kty":"OKP","kty"')),
    "a name in two headers": Writing(headers={"enc": "A256CBC-HS512"}),
    "kid in two headers": Writing(change=changed(kid=BOB)),
    "apv of other recipients": Writing(change=changed(apv=b64(bytes(32)))),
    "apv in hexadecimal": Writing(change=lambda header: header.update(apv=unb64(header["apv"]).hex())),
    "apv that is no string": Writing(moved=("apv",), headers={"apv": 1}),
    "no epk": Writing(change=changed(epk=None)),
    "epk that is no object": Writing(change=changed(epk="x")),
    "epk of another curve": Writing(change=lambda header: header.update(epk=CAROLS["P-256"].public.jwk())),
    "epk on a curve for signatures": Writing(change=lambda header: header["epk"].update(crv="Ed25519")),
    "epk of another kind": Writing(change=lambda header: header["epk"].update(kty="EC")),
    "epk too short": Writing(change=lambda header: header["epk"].update(x=b64(bytes(31)))),
    "epk of low order": Writing(change=lambda header: header["epk"].update(x=b64(bytes(32)))),
    "a content key that is too short": Writing(enc="A256CBC-HS512", cek=bytes(48)),
    "authcrypt with A256GCM": authcrypt(enc="A256GCM"),
    "authcrypt with A256GCM, no apv": authcrypt(enc="A256GCM", change=changed(apv=None)),
    "authcrypt said to be XC20P": authcrypt(change=changed(enc="XC20P")),
    "authcrypt with neither skid nor apu": authcrypt(change=changed(skid=None, apu=None)),
    "skid that differs from apu": authcrypt(change=changed(skid=ALICE + "0")),
    "skid that is empty": authcrypt(change=changed(skid="", apu=None)),
    "skid that is relative": authcrypt(change=changed(skid="#key-1", apu=b64(b"#key-1"))),
    "skid without fragment": authcrypt(change=changed(skid="did:example:alice", apu=None)),
    "skid that is no DID": authcrypt(change=changed(skid="https://example.org/#key-1", apu=None)),
    "skid with a line break": authcrypt(change=changed(skid=ALICE + "\n", apu=None)),
    "apu that is not UTF-8": authcrypt(change=changed(skid=None, apu=b64(b"did:example:\xff#1"))),
    "draft 03": authcrypt(draft03=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_writing(name: str) -> None:
    """Sealed correctly, and refused for its form; the untouched writing opens (test_second_writer)."""
    with pytest.raises(DecryptionError):
        opened(written(REFUSED[name]))


@pytest.mark.parametrize("curve", CURVES[1:])
def test_refused_epk_off_its_curve(curve: Curve) -> None:
    """A point that is not on the curve is refused before anything is derived from it."""
    with pytest.raises(DecryptionError):
        opened(written(Writing(change=off_curve), curve), curve)


def with_members(**members: Any) -> Change:
    return lambda jwe: jwe.update(members)


def longer(name: str, by: int) -> Change:
    """Append to a part, or take from its end when `by` is negative."""

    def change(jwe: dict[str, Any]) -> None:
        data = unb64(jwe[name])
        jwe[name] = b64(data + bytes(by) if by > 0 else data[:by])

    return change


DAMAGED: dict[str, Change] = {
    "aad": with_members(aad=""),
    "no recipients": lambda jwe: jwe.pop("recipients"),
    "an empty list of recipients": with_members(recipients=[]),
    "recipients that are no list": with_members(recipients={"0": {}}),
    "a recipient that is no object": lambda jwe: jwe["recipients"].append(1),
    "a recipient without kid": lambda jwe: jwe["recipients"][0].update(header={}),
    "a recipient without header": lambda jwe: jwe["recipients"][0].pop("header"),
    "a header that is no object": lambda jwe: jwe["recipients"][0].update(header=[]),
    "the same recipient twice": lambda jwe: jwe["recipients"].append(jwe["recipients"][0]),
    "a recipient more than apv knows": lambda jwe: jwe["recipients"].append(
        {"header": {"kid": CAROL}, "encrypted_key": jwe["recipients"][0]["encrypted_key"]}
    ),
    "another kid than apv knows": lambda jwe: jwe["recipients"][0].update(header={"kid": CAROL}),
    "general and flattened at once": with_members(encrypted_key="AAAA"),
    "unprotected that is no object": with_members(unprotected=1),
    "unprotected repeating a name": with_members(unprotected={"typ": "x"}),
    "protected that is no text": with_members(protected={}),
    "protected that is empty": with_members(protected=""),
    "protected that is no JSON": with_members(protected=b64(b"x")),
    "protected that is a list": with_members(protected=b64(b"[]")),
    "protected with NaN": lambda jwe: jwe.update(protected=b64(unb64(jwe["protected"])[:-1] + b',"a":NaN}')),
    "an encrypted key that is no text": lambda jwe: jwe["recipients"][0].update(encrypted_key=None),
    "an encrypted key that is too short": lambda jwe: longer("encrypted_key", -8)(jwe["recipients"][0]),
    "an encrypted key that is too long": lambda jwe: longer("encrypted_key", 8)(jwe["recipients"][0]),
    "an encrypted key of others": lambda jwe: jwe["recipients"][0].update(encrypted_key=b64(bytes(72))),
    "an IV that is too short": longer("iv", -1),
    "an IV that is too long": longer("iv", 1),
    "an IV that is missing": lambda jwe: jwe.pop("iv"),
    "a tag that is too short": longer("tag", -1),
    "a tag that is too long": longer("tag", 1),
    "a tag of others": with_members(tag=b64(bytes(32))),
    "a ciphertext that is too short": longer("ciphertext", -16),
    "a ciphertext that is empty": with_members(ciphertext=""),
    "a ciphertext that is no text": with_members(ciphertext=5),
    "a ciphertext with a line break": lambda jwe: jwe.update(ciphertext=jwe["ciphertext"] + "\n"),
    "a ciphertext with a foreign character": lambda jwe: jwe.update(ciphertext="*" + jwe["ciphertext"]),
    "a ciphertext with stray padding": lambda jwe: jwe.update(ciphertext=jwe["ciphertext"] + "===="),
    "a ciphertext with letters of others": lambda jwe: jwe.update(ciphertext="é" + jwe["ciphertext"]),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("writing", [Writing(), authcrypt()], ids=["anoncrypt", "authcrypt"])
def test_refused_damage(name: str, writing: Writing) -> None:
    """A JWE that breaks a rule, or whose parts were touched after sealing."""
    jwe = written(writing)
    DAMAGED[name](jwe)
    with pytest.raises(DecryptionError):
        opened(jwe)


@pytest.mark.parametrize(("ours", "theirs"), [("-", "+"), ("_", "/")])
def test_refused_alphabet(ours: str, theirs: str) -> None:
    """The standard alphabet is refused, though a lenient decoder would read the same bytes (reference 10.5)."""
    jwe = written(Writing())
    while ours not in jwe["ciphertext"]:
        jwe = written(Writing())
    assert opened(jwe) == TEXT
    jwe["ciphertext"] = jwe["ciphertext"].replace(ours, theirs, 1)
    with pytest.raises(DecryptionError):
        opened(jwe)


def test_refused_mixed_recipients() -> None:
    """Recipients that do not share alg and curve are refused: one envelope is for one key type (reference 1.3)."""
    for name, value in (("alg", "ECDH-1PU+A256KW"), ("epk", CAROLS["P-256"].public.jwk())):
        writing = Writing(moved=("alg", "epk"), change=changed(apv=None))
        jwe = writing.write(TEXT, (BOB, BOBS["X25519"].public), (CAROL, CAROLS["X25519"].public))
        assert opened(jwe) == TEXT
        jwe["recipients"][1]["header"][name] = value
        with pytest.raises(DecryptionError):
            parse_envelope(compact(jwe))


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("part", ["protected", "iv", "ciphertext", "tag", "encrypted_key"])
def test_every_bit_counts(enc: Enc, part: str) -> None:
    """Flipping any one bit of any part, or writing it in another way, makes an envelope undecryptable."""
    jwe = flattened(json.loads(encrypt_anoncrypt(b"hello", [(BOB, BOBS["X25519"].public)], enc=enc)))
    assert opened(jwe) == b"hello"
    data = unb64(jwe[part])
    for position in range(0, len(data) * 8, 5):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(DecryptionError):
            opened({**jwe, part: b64(bytes(flipped))})


# Who opens it


def test_wrong_keys() -> None:
    """Another recipient key, another sender key, a key on another curve, a kid that is not addressed."""
    bob, alice = BOBS["X25519"], ALICES["X25519"].public
    envelope = parse_envelope(compact(written(authcrypt())))
    assert decrypt_envelope(envelope, BOB, bob, alice) == TEXT
    attempts: list[tuple[str, PrivateKey, Any]] = [
        (BOB, CAROLS["X25519"], alice),
        (BOB, bob, CAROLS["X25519"].public),
        (BOB, BOBS["P-256"], alice),
        (BOB, bob, ALICES["P-256"].public),
        (BOB, PrivateKey.generate("Ed25519"), alice),
        (CAROL, bob, alice),
        (BOB, bob, None),
    ]
    for kid, key, sender in attempts:
        with pytest.raises(DecryptionError):
            decrypt_envelope(envelope, kid, key, sender)


def test_an_anoncrypt_opens_without_a_sender_only() -> None:
    """A sender's key for an anoncrypt is a mistake that must not look like authentication."""
    envelope = parse_envelope(compact(written(Writing())))
    with pytest.raises(DecryptionError):
        decrypt_envelope(envelope, BOB, BOBS["X25519"], ALICES["X25519"].public)


# ECDH-1PU draft 03 (reference 1.10)


@pytest.mark.parametrize("enc", ENCS[:2])
def test_draft03(enc: str) -> None:
    """Authcrypt without apv and without the tag in its key derivation opens on demand, also with A256GCM."""
    jwe = written(authcrypt(enc=enc, draft03=True))
    assert parse_envelope(compact(jwe)).lacks_apv
    assert opened(jwe, draft03=True) == TEXT
    with pytest.raises(DecryptionError):
        opened(jwe)


def test_draft03_leaves_the_rest_alone() -> None:
    """With draft 03 allowed, spec authcrypt and anoncrypt open as before."""
    assert opened(written(authcrypt()), draft03=True) == TEXT
    assert opened(written(Writing()), draft03=True) == TEXT
    assert opened(written(Writing(change=changed(apv=None))), draft03=True) == TEXT


def test_draft03_is_recognised_by_its_missing_apv() -> None:
    """Draft 03 with an apv is refused even when draft 03 is allowed."""

    def with_apv(header: dict[str, Any]) -> None:
        header["apv"] = protected_of(encrypt_anoncrypt(TEXT, [(BOB, BOBS["X25519"].public)]))["apv"]

    for enc in ENCS[:2]:
        with pytest.raises(DecryptionError):
            opened(written(authcrypt(enc=enc, draft03=True, change=with_apv)), draft03=True)


def test_draft03_authenticates_its_sender() -> None:
    """A message in draft 03 form does not open with another sender's key."""
    envelope = parse_envelope(compact(written(authcrypt(draft03=True))))
    with pytest.raises(DecryptionError):
        decrypt_envelope(envelope, BOB, BOBS["X25519"], CAROLS["X25519"].public, draft03=True)


# What is no envelope


@pytest.mark.parametrize("raw", [b"", b"x", b"\xff", b"[]", b"1", b"{}", b'{"type":"x"}', b'{"a":NaN}', b"[" * 9999])
def test_not_an_envelope(raw: bytes) -> None:
    """Neither JSON nor a JSON object that DIDComm knows (reference 1.1)."""
    with pytest.raises(InvalidEnvelope):
        parse_envelope(raw)


@pytest.mark.parametrize("raw", [b'{"payload":"","signatures":[]}', b'{"type":"x","id":"1"}'])
def test_not_encrypted(raw: bytes) -> None:
    """A JWS or a plaintext message (reference 1.1)."""
    with pytest.raises(EncryptionRequired):
        parse_envelope(raw)


# Nothing else escapes, and nothing leaks

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    "protected unprotected recipients header encrypted_key iv ciphertext tag aad "
    "alg enc epk apu apv skid kid crit zip kty crv x y".split()
)
VALUES = JSON | st.sampled_from(["AAAA", "X25519", "P-256", "ECDH-1PU+A256KW", "A256GCM", b64(bytes(32)), BOB])


def attempted(raw: bytes) -> Envelope | None:
    """Parse and open; the only exceptions that may come out are the ones that have a wire form."""
    try:
        envelope = parse_envelope(raw)
    except (InvalidEnvelope, EncryptionRequired, DecryptionError) as error:
        assert str(error) == ""
        return None
    for draft03 in (False, True):
        for kid in (*envelope.encrypted_keys, BOB):
            for key in BOBS.values():
                try:
                    decrypt_envelope(envelope, kid, key, ALICES[key.curve].public, draft03=draft03)
                except DecryptionError as error:
                    assert str(error) == ""
    return envelope


@settings(deadline=None)
@given(st.binary(max_size=200) | JSON.map(compact))
def test_any_bytes(raw: bytes) -> None:
    """Whatever comes in, an error of ours comes out."""
    attempted(raw)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change(data: st.DataObject) -> None:
    """Whatever is done to an envelope, on all levels and before it is sealed, an error of ours comes out."""
    changes = data.draw(st.lists(st.tuples(st.sampled_from(["header", "epk", "entry", "own", "jwe"]), NAMES, VALUES)))
    writing = data.draw(st.sampled_from([Writing(), authcrypt(), authcrypt(draft03=True), Writing(moved=("epk",))]))
    jwe = written(writing)
    header = json.loads(unb64(jwe["protected"]))
    entry = jwe["recipients"][0]
    epk = header.get("epk") or entry["header"]["epk"]
    places = {"header": header, "epk": epk, "entry": entry, "own": entry["header"], "jwe": jwe}
    for place, name, value in changes:
        places[place][name] = value
    if not any(place == "jwe" and name == "protected" for place, name, _ in changes):
        jwe["protected"] = b64(compact(header))
    attempted(compact(jwe))
    attempted(compact({**{name: value for name, value in jwe.items() if name != "recipients"}, **entry}))


@settings(deadline=None)
@given(st.sampled_from(CURVES), st.sampled_from(ENCS), st.binary(max_size=100))
def test_any_content(curve: Curve, enc: Enc, content: bytes) -> None:
    """Content of any length comes back as it was, also across block boundaries."""
    assert opened(encrypt_anoncrypt(content, [(BOB, BOBS[curve].public)], enc=enc), curve) == content
    sealed = encrypt_authcrypt(content, (ALICE, ALICES[curve]), [(BOB, BOBS[curve].public)])
    assert opened(sealed, curve) == content


def test_nothing_opaque_in_repr() -> None:
    """Neither ciphertext nor keys are in the repr of an envelope, and no input is in that of an error."""
    jwe = written(authcrypt())
    shown = repr(parse_envelope(compact(jwe)))
    for secret in (jwe["ciphertext"], jwe["protected"], jwe["recipients"][0]["encrypted_key"]):
        assert secret not in shown
    with pytest.raises(MediatorError) as caught:
        opened({**jwe, "tag": encode_base64url(b"marked" * 6)[:43]})
    assert repr(caught.value) == "DecryptionError()"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
