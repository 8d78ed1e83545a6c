"""Envelopes: emitted forms, accepted forms and refused forms (reference section 1)."""

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
from mediatord.protocol.didcomm import jwe as jwe_module
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
from mediatord.protocol.encoding import dumps, encode_base64url
from tests.protocol.didcomm.foreign_jwe import JWEWriter, b64, compact, unb64

CURVES: tuple[Curve, ...] = ("X25519", "P-256", "P-384", "P-521")
ENCS: tuple[Enc, ...] = ("A256CBC-HS512", "A256GCM", "XC20P")
ALICE, BOB, CAROL = "did:example:alice#key-1", "did:example:bob#key-1", "did:example:bob#key-2"
ALICES = {curve: PrivateKey.generate(curve) for curve in CURVES}
BOBS = {curve: PrivateKey.generate(curve) for curve in CURVES}
CAROLS = {curve: PrivateKey.generate(curve) for curve in CURVES}
TEXT = b'{"id":"1","type":"https://example.org/1.0/hello","body":{}}'

Change = Callable[[dict[str, Any]], object]


def open_as_bob(jwe: dict[str, Any] | bytes, curve: Curve = "X25519", *, draft03: bool = False) -> bytes:
    """Decrypt as Bob, who knows Alice's key."""
    envelope = parse_envelope(jwe if isinstance(jwe, bytes) else compact(jwe))
    sender = ALICES[curve].public if bool(envelope.sender_kid) else None
    return decrypt_envelope(envelope, BOB, BOBS[curve], sender, draft03=draft03)


def write(writing: JWEWriter, curve: Curve = "X25519") -> dict[str, Any]:
    return writing.write(TEXT, (BOB, BOBS[curve].public))


def authcrypt(curve: Curve = "X25519", **options: Any) -> JWEWriter:
    return JWEWriter(sender=(ALICE, ALICES[curve]), **options)


def protected_of(raw: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(unb64(json.loads(raw)["protected"]))
    return header


# Emitted forms


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("enc", ENCS)
def test_anoncrypt_round_trip(curve: Curve, enc: Enc) -> None:
    """Each recipient decrypts an anoncrypt on any curve, with any content encryption (reference 1.2)."""
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
    """Each recipient decrypts an authcrypt on any curve with the sender's key (reference 1.2)."""
    raw = encrypt_authcrypt(TEXT, (ALICE, ALICES[curve]), [(CAROL, CAROLS[curve].public), (BOB, BOBS[curve].public)])
    envelope = parse_envelope(raw)
    assert (bool(envelope.sender_kid), envelope.header["enc"], envelope.curve) == (True, "A256CBC-HS512", curve)
    assert envelope.sender_kid == ALICE
    assert not envelope.lacks_apv
    assert decrypt_envelope(envelope, BOB, BOBS[curve], ALICES[curve].public) == TEXT
    assert decrypt_envelope(envelope, CAROL, CAROLS[curve], ALICES[curve].public) == TEXT


def test_emitted_layout() -> None:
    """General JSON, recipients sorted, only the kid outside the protected header (reference 1.3)."""
    keys = [(CAROL, CAROLS["X25519"].public), (BOB, BOBS["X25519"].public)]
    for raw in (encrypt_anoncrypt(TEXT, keys), encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), keys)):
        jwe = json.loads(raw)
        assert set(jwe) == {"protected", "recipients", "iv", "ciphertext", "tag"}
        assert [entry["header"] for entry in jwe["recipients"]] == [{"kid": BOB}, {"kid": CAROL}]
        assert all(set(entry) == {"header", "encrypted_key"} for entry in jwe["recipients"])
        assert b"=" not in raw
        assert raw == dumps(jwe)
        assert unb64(jwe["protected"]) == dumps(protected_of(raw))


def test_emitted_protected_header() -> None:
    """The members of reference 1.3, `apu` and `skid` for authcrypt only, no private member in `epk`."""
    keys = [(BOB, BOBS["X25519"].public)]
    header = protected_of(encrypt_anoncrypt(TEXT, keys))
    assert set(header) == {"typ", "alg", "enc", "epk", "apv"}
    assert header["typ"] == "application/didcomm-encrypted+json"
    assert (header["alg"], header["enc"]) == ("ECDH-ES+A256KW", "A256CBC-HS512")
    assert set(header["epk"]) == {"kty", "crv", "x"}
    header = protected_of(encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), keys))
    assert list(header) == ["typ", "alg", "enc", "epk", "apv", "apu", "skid"]
    assert (header["alg"], header["enc"]) == ("ECDH-1PU+A256KW", "A256CBC-HS512")
    assert (header["skid"], unb64(header["apu"])) == (ALICE, ALICE.encode())


def test_parties_are_written_once() -> None:
    """The parts of an envelope that only depend on its parties are kept, unless the names are very long."""
    cached, keys = jwe_module._write_cached_parties, [(BOB, BOBS["X25519"].public)]
    cached.cache_clear()
    for _ in range(3):
        encrypt_anoncrypt(TEXT, keys)
        encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), keys)
    assert (cached.cache_info().hits, cached.cache_info().misses) == (4, 2)
    long_kid = f"did:example:{'x' * jwe_module._MAX_CACHED_NAMES}#key"
    raw = encrypt_anoncrypt(TEXT, [(long_kid, BOBS["X25519"].public)])
    assert json.loads(raw)["recipients"][0]["header"]["kid"] == long_kid
    assert cached.cache_info().currsize == 2


def test_emitted_apv() -> None:
    """The worked value of reference 1.3."""
    key = BOBS["X25519"].public
    raw = encrypt_anoncrypt(TEXT, [(f"did:example:bob#key-x25519-{number}", key) for number in (2, 3, 1)])
    digest = "35cb2e027ad17cf2baf40fab919d0bf575941b88ccbcd0b7660ef804fcf9dcf0"
    assert unb64(protected_of(raw)["apv"]).hex() == digest


def test_keys_and_ivs_are_fresh() -> None:
    """Two envelopes with the same content share neither key, IV nor ciphertext."""
    keys = [(BOB, BOBS["X25519"].public)]
    one, other = json.loads(encrypt_anoncrypt(TEXT, keys)), json.loads(encrypt_anoncrypt(TEXT, keys))
    assert all(one[name] != other[name] for name in ("protected", "iv", "ciphertext", "tag"))


@pytest.mark.parametrize("curve", CURVES)
def test_reused_ephemeral_key(curve: Curve) -> None:
    """Envelopes of one ephemeral key share neither IV nor ciphertext nor wrapped key."""
    key, keys = EphemeralKey.generate(curve), [(BOB, BOBS[curve].public)]
    raw = [encrypt_authcrypt(TEXT, (ALICE, ALICES[curve]), keys, key) for _ in range(2)]
    assert [open_as_bob(item, curve) for item in raw] == [TEXT, TEXT]
    assert [protected_of(element)["epk"] for element in raw] == [key.jwk, key.jwk]
    one, other = map(json.loads, raw)
    assert all(one[name] != other[name] for name in ("recipients", "iv", "ciphertext", "tag"))


def test_refuses_to_encrypt() -> None:
    """No recipient, recipients or a sender on different curves, a key of low order: ValueError."""
    x25519, p256 = (BOB, BOBS["X25519"].public), (CAROL, CAROLS["P-256"].public)
    for seal in (encrypt_anoncrypt, lambda text, keys: encrypt_authcrypt(text, (ALICE, ALICES["X25519"]), keys)):
        for keys in ([], [x25519, p256], [(BOB, type(x25519[1])("X25519", bytes(32)))]):
            with pytest.raises(ValueError):
                seal(TEXT, keys)
    with pytest.raises(ValueError):
        encrypt_authcrypt(TEXT, (ALICE, ALICES["X25519"]), [p256])


# Agreement with jwcrypto and the independent writer


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("enc", ENCS[:2])
def test_jwcrypto_decrypts_ours(curve: Curve, enc: Enc) -> None:
    """An independent implementation decrypts mediatord's anoncrypt (reference 1.9)."""
    token = JWE()
    token.deserialize(
        encrypt_anoncrypt(TEXT, [(BOB, BOBS[curve].public)], enc=enc).decode(), JWK(**BOBS[curve].jwk())
    )
    assert token.payload == TEXT


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("enc", ENCS[:2])
@pytest.mark.parametrize("others", [0, 1])
def test_decrypts_jwcrypto(curve: Curve, enc: Enc, others: int) -> None:
    """
    mediatord decrypts jwcrypto's: flattened for one recipient, epk in the recipient header, no apv (reference D3).
    """
    token = JWE(TEXT, json.dumps({"alg": "ECDH-ES+A256KW", "enc": enc}))
    token.add_recipient(JWK(**BOBS[curve].public.jwk()), json.dumps({"kid": BOB}))
    for number in range(others):
        token.add_recipient(JWK(**CAROLS[curve].public.jwk()), json.dumps({"kid": f"{CAROL}{number}"}))
    raw = token.serialize().encode()
    assert ("encrypted_key" in json.loads(raw)) == (others == 0)
    envelope = parse_envelope(raw)
    assert envelope.lacks_apv
    assert open_as_bob(raw, curve) == TEXT


@pytest.mark.parametrize("curve", CURVES)
def test_independent_writer(curve: Curve) -> None:
    """Independently written anoncrypts and authcrypts decrypt on every curve."""
    assert open_as_bob(write(JWEWriter(), curve), curve) == TEXT
    assert open_as_bob(write(JWEWriter(enc="A256GCM"), curve), curve) == TEXT
    assert open_as_bob(write(authcrypt(curve), curve), curve) == TEXT


# Tolerated forms (reference D3)


def change_header(**members: Any) -> Change:
    """Return a change that sets members of a header; None removes one."""

    def change(header: dict[str, Any]) -> None:
        for name, value in members.items():
            header.pop(name, None)
            if value is not None:
                header[name] = value

    return change


TOLERATED = {
    "no apv": JWEWriter(change=change_header(apv=None)),
    "no typ": JWEWriter(change=change_header(typ=None)),
    "odd typ": JWEWriter(change=change_header(typ="application/didcomm+encrypted")),
    "typ that is no string": JWEWriter(change=change_header(typ=7)),
    "epk in the recipient header": JWEWriter(moved=("epk",)),
    "all but enc in the recipient header": JWEWriter(moved=("epk", "alg", "apv")),
    "apu in an anoncrypt": JWEWriter(change=change_header(apu=b64(ALICE.encode()))),
    "skid in an anoncrypt": JWEWriter(change=change_header(skid=ALICE)),
    "members nobody knows": JWEWriter(headers={"foo": [1, {"a": None}]}, change=change_header(bar={})),
    "pretty-printed header": JWEWriter(encode=lambda header: json.dumps(header, indent=2).encode()),
    "escaped header": JWEWriter(encode=lambda header: compact(header).replace(b"/", b"\\/")),
    "sender in skid only": authcrypt(change=change_header(apu=None)),
    "sender in apu only": authcrypt(change=change_header(skid=None)),
    "authcrypt without apv": authcrypt(change=change_header(apv=None)),
    "authcrypt with all in the recipient header": authcrypt(moved=("epk", "alg", "apv", "apu", "skid", "enc")),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_tolerated_forms(name: str) -> None:
    """Forms that released clients write, General and flattened."""
    jwe = write(TOLERATED[name])
    assert open_as_bob(jwe) == TEXT
    assert open_as_bob(flatten(jwe)) == TEXT


def flatten(jwe: dict[str, Any]) -> dict[str, Any]:
    (entry,) = jwe["recipients"]
    return {**{name: value for name, value in jwe.items() if name != "recipients"}, **entry}


def test_apu_is_no_sender_in_anoncrypt() -> None:
    """An anoncrypt has no sender, whatever its headers say (reference 1.6 step 8)."""
    writing = JWEWriter(change=change_header(apu=b64(ALICE.encode()), skid=ALICE))
    envelope = parse_envelope(compact(write(writing)))
    assert envelope.sender_kid is None
    assert not bool(envelope.sender_kid)


def test_fingerprint() -> None:
    """The fingerprint is of the content: other recipients and padding do not change it, other content does."""
    one, other = (write(authcrypt()) for _ in range(2))
    padded = {**one, "tag": one["tag"] + "=" * (-len(one["tag"]) % 4)}
    first, again, more = (parse_envelope(compact(jwe)).compute_digest() for jwe in (one, padded, flatten(one)))
    assert first == again == more != parse_envelope(compact(other)).compute_digest()
    for name in ("protected", "tag"):
        assert parse_envelope(compact({**one, name: other[name]})).compute_digest() != first
    assert len(first) == 32


def test_shared_unprotected_header() -> None:
    """Members may be in the shared unprotected header (RFC 7516 section 7.2.1)."""
    jwe = write(JWEWriter(moved=("alg",)))
    del jwe["recipients"][0]["header"]["alg"]
    jwe["unprotected"] = {"alg": "ECDH-ES+A256KW"}
    assert open_as_bob(jwe) == TEXT


def test_padded_members() -> None:
    """Base64url may be padded."""
    jwe = write(JWEWriter())
    for name in ("iv", "tag", "ciphertext"):
        jwe[name] += "=" * (-len(jwe[name]) % 4)
    assert open_as_bob(jwe) == TEXT


def test_recipient_limit() -> None:
    """A hundred recipients are accepted, one more is not (reference 1.6 step 6)."""
    keys = [(f"did:example:bob#k{number}", CAROLS["X25519"].public) for number in range(100)]
    assert open_as_bob(JWEWriter().write(TEXT, (BOB, BOBS["X25519"].public), *keys[:99])) == TEXT
    with pytest.raises(DecryptionError):
        parse_envelope(compact(JWEWriter().write(TEXT, (BOB, BOBS["X25519"].public), *keys)))


# Refused forms (reference 1.2 and 1.6)


def duplicate(name: str) -> Callable[[dict[str, Any]], bytes]:
    """Encode a protected header that has a member of this name twice, with the same value."""
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
    **{f"alg {alg}": JWEWriter(change=change_header(alg=alg)) for alg in ALL_ALGS},
    **{f"enc {enc}": JWEWriter(change=change_header(enc=enc)) for enc in ALL_ENCS},
    "zip": JWEWriter(change=change_header(zip="DEF")),
    "zip of one recipient": JWEWriter(headers={"zip": "DEF"}),
    "crit": JWEWriter(change=change_header(crit=["exp"], exp=1)),
    "crit of one recipient": JWEWriter(headers={"crit": ["exp"], "exp": 1}),
    "doubled enc": JWEWriter(encode=duplicate("enc")),
    "doubled epk member": JWEWriter(encode=lambda header: compact(header).replace(b'"kty"', b'"kty":"OKP","kty"')),
    "a name in two headers": JWEWriter(headers={"enc": "A256CBC-HS512"}),
    "kid in two headers": JWEWriter(change=change_header(kid=BOB)),
    "apv of other recipients": JWEWriter(change=change_header(apv=b64(bytes(32)))),
    "apv in hexadecimal": JWEWriter(change=lambda header: header.update(apv=unb64(header["apv"]).hex())),
    "apv that is no string": JWEWriter(moved=("apv",), headers={"apv": 1}),
    "no epk": JWEWriter(change=change_header(epk=None)),
    "epk that is no object": JWEWriter(change=change_header(epk="x")),
    "epk of another curve": JWEWriter(change=lambda header: header.update(epk=CAROLS["P-256"].public.jwk())),
    "epk on a curve for signatures": JWEWriter(change=lambda header: header["epk"].update(crv="Ed25519")),
    "epk of another kind": JWEWriter(change=lambda header: header["epk"].update(kty="EC")),
    "epk too short": JWEWriter(change=lambda header: header["epk"].update(x=b64(bytes(31)))),
    "epk of low order": JWEWriter(change=lambda header: header["epk"].update(x=b64(bytes(32)))),
    "a content key that is too short": JWEWriter(enc="A256CBC-HS512", cek=bytes(48)),
    "authcrypt with A256GCM": authcrypt(enc="A256GCM"),
    "authcrypt with A256GCM, no apv": authcrypt(enc="A256GCM", change=change_header(apv=None)),
    "authcrypt said to be XC20P": authcrypt(change=change_header(enc="XC20P")),
    "authcrypt with neither skid nor apu": authcrypt(change=change_header(skid=None, apu=None)),
    "skid that differs from apu": authcrypt(change=change_header(skid=ALICE + "0")),
    "skid that is empty": authcrypt(change=change_header(skid="", apu=None)),
    "skid that is relative": authcrypt(change=change_header(skid="#key-1", apu=b64(b"#key-1"))),
    "skid without fragment": authcrypt(change=change_header(skid="did:example:alice", apu=None)),
    "skid that is no DID": authcrypt(change=change_header(skid="https://example.org/#key-1", apu=None)),
    "skid with a line break": authcrypt(change=change_header(skid=ALICE + "\n", apu=None)),
    "apu that is not UTF-8": authcrypt(change=change_header(skid=None, apu=b64(b"did:example:\xff#1"))),
    "draft 03": authcrypt(draft03=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_forms(name: str) -> None:
    """Correctly encrypted, refused for its form; the unchanged form decrypts (test_independent_writer)."""
    with pytest.raises(DecryptionError):
        open_as_bob(write(REFUSED[name]))


@pytest.mark.parametrize("curve", CURVES[1:])
def test_refuses_epk_off_its_curve(curve: Curve) -> None:
    """A point off the curve is refused before key derivation."""
    with pytest.raises(DecryptionError):
        open_as_bob(write(JWEWriter(change=off_curve), curve), curve)


def with_members(**members: Any) -> Change:
    return lambda jwe: jwe.update(members)


def resize(name: str, by: int) -> Change:
    """Append to a part, or truncate it if `by` is negative."""

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
    "an encrypted key that is too short": lambda jwe: resize("encrypted_key", -8)(jwe["recipients"][0]),
    "an encrypted key that is too long": lambda jwe: resize("encrypted_key", 8)(jwe["recipients"][0]),
    "an encrypted key of others": lambda jwe: jwe["recipients"][0].update(encrypted_key=b64(bytes(72))),
    "an IV that is too short": resize("iv", -1),
    "an IV that is too long": resize("iv", 1),
    "an IV that is missing": lambda jwe: jwe.pop("iv"),
    "a tag that is too short": resize("tag", -1),
    "a tag that is too long": resize("tag", 1),
    "a tag of others": with_members(tag=b64(bytes(32))),
    "a ciphertext that is too short": resize("ciphertext", -16),
    "a ciphertext that is empty": with_members(ciphertext=""),
    "a ciphertext that is no text": with_members(ciphertext=5),
    "a ciphertext with a line break": lambda jwe: jwe.update(ciphertext=jwe["ciphertext"] + "\n"),
    "a ciphertext with a foreign character": lambda jwe: jwe.update(ciphertext="*" + jwe["ciphertext"]),
    "a ciphertext with stray padding": lambda jwe: jwe.update(ciphertext=jwe["ciphertext"] + "===="),
    "a ciphertext with letters of others": lambda jwe: jwe.update(ciphertext="é" + jwe["ciphertext"]),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("writing", [JWEWriter(), authcrypt()], ids=["anoncrypt", "authcrypt"])
def test_damaged_envelopes(name: str, writing: JWEWriter) -> None:
    """A JWE that violates a rule, or was changed after encryption."""
    jwe = write(writing)
    DAMAGED[name](jwe)
    with pytest.raises(DecryptionError):
        open_as_bob(jwe)


@pytest.mark.parametrize(("ours", "theirs"), [("-", "+"), ("_", "/")])
def test_refuses_standard_base64_alphabet(ours: str, theirs: str) -> None:
    """The standard alphabet is refused, although a lenient decoder reads the same bytes (reference 10.5)."""
    jwe = write(JWEWriter())
    while ours not in jwe["ciphertext"]:
        jwe = write(JWEWriter())
    assert open_as_bob(jwe) == TEXT
    jwe["ciphertext"] = jwe["ciphertext"].replace(ours, theirs, 1)
    with pytest.raises(DecryptionError):
        open_as_bob(jwe)


def test_refuses_mixed_recipients() -> None:
    """Recipients must share alg and curve: an envelope has one key type (reference 1.3)."""
    for name, value in (("alg", "ECDH-1PU+A256KW"), ("epk", CAROLS["P-256"].public.jwk())):
        writing = JWEWriter(moved=("alg", "epk"), change=change_header(apv=None))
        jwe = writing.write(TEXT, (BOB, BOBS["X25519"].public), (CAROL, CAROLS["X25519"].public))
        assert open_as_bob(jwe) == TEXT
        jwe["recipients"][1]["header"][name] = value
        with pytest.raises(DecryptionError):
            parse_envelope(compact(jwe))


@pytest.mark.parametrize("enc", ENCS)
@pytest.mark.parametrize("part", ["protected", "iv", "ciphertext", "tag", "encrypted_key"])
def test_every_bit_counts(enc: Enc, part: str) -> None:
    """A flipped bit or another spelling of any part makes an envelope undecryptable."""
    jwe = flatten(json.loads(encrypt_anoncrypt(b"hello", [(BOB, BOBS["X25519"].public)], enc=enc)))
    assert open_as_bob(jwe) == b"hello"
    data = unb64(jwe[part])
    for position in range(0, len(data) * 8, 5):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(DecryptionError):
            open_as_bob({**jwe, part: b64(bytes(flipped))})


# Keys


def test_wrong_keys() -> None:
    """Another recipient key, another sender key, a key on another curve, an unaddressed kid."""
    bob, alice = BOBS["X25519"], ALICES["X25519"].public
    envelope = parse_envelope(compact(write(authcrypt())))
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


def test_anoncrypt_with_sender_key() -> None:
    """Passing a sender's key for an anoncrypt is an error, not an authentication."""
    envelope = parse_envelope(compact(write(JWEWriter())))
    with pytest.raises(DecryptionError):
        decrypt_envelope(envelope, BOB, BOBS["X25519"], ALICES["X25519"].public)


# ECDH-1PU draft 03 (reference 1.10)


@pytest.mark.parametrize("enc", ENCS[:2])
def test_draft03(enc: str) -> None:
    """Authcrypt without apv and without the tag in its key derivation decrypts if enabled, also with A256GCM."""
    jwe = write(authcrypt(enc=enc, draft03=True))
    assert parse_envelope(compact(jwe)).lacks_apv
    assert open_as_bob(jwe, draft03=True) == TEXT
    with pytest.raises(DecryptionError):
        open_as_bob(jwe)


def test_draft03_keeps_other_envelopes() -> None:
    """With draft 03 enabled, standard authcrypt and anoncrypt decrypt as before."""
    assert open_as_bob(write(authcrypt()), draft03=True) == TEXT
    assert open_as_bob(write(JWEWriter()), draft03=True) == TEXT
    assert open_as_bob(write(JWEWriter(change=change_header(apv=None))), draft03=True) == TEXT


def test_draft03_is_recognised_by_missing_apv() -> None:
    """Draft 03 with an apv is refused even if enabled."""

    def with_apv(header: dict[str, Any]) -> None:
        header["apv"] = protected_of(encrypt_anoncrypt(TEXT, [(BOB, BOBS["X25519"].public)]))["apv"]

    for enc in ENCS[:2]:
        with pytest.raises(DecryptionError):
            open_as_bob(write(authcrypt(enc=enc, draft03=True, change=with_apv)), draft03=True)


def test_draft03_authenticates_sender() -> None:
    """A draft 03 message does not decrypt with another sender's key."""
    envelope = parse_envelope(compact(write(authcrypt(draft03=True))))
    with pytest.raises(DecryptionError):
        decrypt_envelope(envelope, BOB, BOBS["X25519"], CAROLS["X25519"].public, draft03=True)


# Other input


@pytest.mark.parametrize("raw", [b"", b"x", b"\xff", b"[]", b"1", b"{}", b'{"type":"x"}', b'{"a":NaN}', b"[" * 9999])
def test_not_an_envelope(raw: bytes) -> None:
    """Neither JSON nor a JSON object of DIDComm (reference 1.1)."""
    with pytest.raises(InvalidEnvelope):
        parse_envelope(raw)


@pytest.mark.parametrize("raw", [b'{"payload":"","signatures":[]}', b'{"type":"x","id":"1"}'])
def test_not_encrypted(raw: bytes) -> None:
    """A JWS or a plaintext message (reference 1.1)."""
    with pytest.raises(EncryptionRequired):
        parse_envelope(raw)


# Arbitrary input, and representations

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


def try_to_open(raw: bytes) -> Envelope | None:
    """Parse and decrypt; only errors with a wire form may be raised."""
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
def test_arbitrary_bytes(raw: bytes) -> None:
    """Arbitrary bytes give a defined error."""
    try_to_open(raw)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_arbitrary_changes(data: st.DataObject) -> None:
    """Any change on any level, before or after encryption, gives a defined error."""
    changes = data.draw(st.lists(st.tuples(st.sampled_from(["header", "epk", "entry", "own", "jwe"]), NAMES, VALUES)))
    writing = data.draw(
        st.sampled_from([JWEWriter(), authcrypt(), authcrypt(draft03=True), JWEWriter(moved=("epk",))])
    )
    jwe = write(writing)
    header = json.loads(unb64(jwe["protected"]))
    entry = jwe["recipients"][0]
    epk = header.get("epk") or entry["header"]["epk"]
    places = {"header": header, "epk": epk, "entry": entry, "own": entry["header"], "jwe": jwe}
    for place, name, value in changes:
        places[place][name] = value
    if not any(place == "jwe" and name == "protected" for place, name, _ in changes):
        jwe["protected"] = b64(compact(header))
    try_to_open(compact(jwe))
    try_to_open(compact({**{name: value for name, value in jwe.items() if name != "recipients"}, **entry}))


@settings(deadline=None)
@given(st.sampled_from(CURVES), st.sampled_from(ENCS), st.binary(max_size=100))
def test_arbitrary_content(curve: Curve, enc: Enc, content: bytes) -> None:
    """Content of any length is restored, also at block boundaries."""
    assert open_as_bob(encrypt_anoncrypt(content, [(BOB, BOBS[curve].public)], enc=enc), curve) == content
    sealed = encrypt_authcrypt(content, (ALICE, ALICES[curve]), [(BOB, BOBS[curve].public)])
    assert open_as_bob(sealed, curve) == content


def test_repr_hides_secrets() -> None:
    """Neither ciphertext nor keys are in a representation, and no input is in an error."""
    jwe = write(authcrypt())
    shown = repr(parse_envelope(compact(jwe)))
    for secret in (jwe["ciphertext"], jwe["protected"], jwe["recipients"][0]["encrypted_key"]):
        assert secret not in shown
    with pytest.raises(MediatorError) as caught:
        open_as_bob({**jwe, "tag": encode_base64url(b"marked" * 6)[:43]})
    assert repr(caught.value) == "DecryptionError()"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
