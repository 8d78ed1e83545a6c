"""did:key against the vectors published with its method (w3c-ccg/did-method-key, test-vectors)."""

from __future__ import annotations

import pytest

from mediatord.errors import UnresolvableDID
from mediatord.protocol.didcomm.did_document import VerificationMethod
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.keys import PublicKey
from tests.did_factories import make_did_key

# ed25519-x25519.json: key, publicKeyBase58, derived key agreement key, its publicKeyBase58.
ED25519 = [
    (
        "z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp",
        "4zvwRjXUKGfvwnParsHAS3HuSVzV5cA4McphgmoCtajS",
        "z6LShs9GGnqk85isEBzzshkuVWrVKsRp24GnDuHk8QWkARMW",
        "7By6kV2t2d188odEM4ExAve1UithKT6dLva4dwsDT3ak",
    ),
    (
        "z6MkjchhfUsD6mmvni8mCdXHw216Xrm9bQe2mBH1P5RDjVJG",
        "6ASf5EcmmEHTgDJ4X4ZT5vT6iHVJBXPg5AN5YoTCpGWt",
        "z6LSrHyXiPBhUbvPUtyUCdf32sniiMGPTAesgHrtEa4FePtr",
        "FcoNC5NqP9CePWbhfz95iHaEsCjGkZUioK9Ck7Qiw286",
    ),
    (
        "z6MknGc3ocHs3zdPiJbnaaqDi58NGb4pk1Sp9WxWufuXSdxf",
        "8pM1DN3RiT8vbom5u1sNryaNT1nyL8CTTW3b5PwWXRBH",
        "z6LSkkqoZRC34AEpbkhZCqLDcHQVAxuLpQ7kC8XCXMVUfvjE",
        "A5fe37PAxhX5WNKngBpGHhC1KpNE7nwbK9oX2tqwxYxU",
    ),
    (
        "z6MkvqoYXQfDDJRv8L4wKzxYeuKyVZBfi9Qo6Ro8MiLH3kDQ",
        "HPYVwAQmskwT1qEEeRzhoomyfyupJGASQQtCXSNG8XS2",
        "z6LSiUo6AEDat8Ze4nQzDo67SGuHLLwsUGkxndHGUjsywHow",
        "7ocvdvQinfqtyQ3Dh9aA7ggoVCQkmfaoueZazHETDv3B",
    ),
    (
        "z6MkwW6aqMnjgrhJXFUko3NnZPGzVpkNzhYK7yEhnsibmLwL",
        "J3qYF7YJMKCqQke47UQwiHizgFUXapHxRxKmxbkar89x",
        "z6LSrGb3qm4xMCEBjvwkLb2WEcXfTM94Tu1RyGCbT5wbg8i9",
        "FbQtKTG6FjWSeYZyowWYv2KBcCbwmHqH6HUuxdJ4xkwP",
    ),
]
# x25519.json: key, publicKeyBase58.
X25519 = [
    ("z6LSeu9HkTHSfLLeUs2nnzUSNedgDUevfNQgQjQC23ZCit6F", "4Dy8E9UaZscuPUf2GLxV44RCNL7oxmEXXkgWXaug1WKV"),
    ("z6LStiZsmxiK4odS4Sb6JmdRFuJ6e1SYP157gtiCyJKfrYha", "J3PiFeuSyLugy4DKn87TwK5cnruRgPtxouzXUqg99Avp"),
    ("z6LSoMdmJz2Djah2P4L9taDmtqeJ6wwd2HhKZvNToBmvaczQ", "CgTbngDMe7yHHfxPMvhpaFRpFoQWKgXAgwenJj8PsFDe"),
]
# nist-curves.json: key, crv, x, y of publicKeyJwk.
NIST = [
    (
        "zDnaerx9CtbPJ1q36T5Ln5wYt3MQYeGRG5ehnPAmxcf5mDZpv",
        "P-256",
        "igrFmi0whuihKnj9R3Om1SoMph72wUGeFaBbzG2vzns",
        "efsX5b10x8yjyrj4ny3pGfLcY7Xby1KzgqOdqnsrJIM",
    ),
    (
        "zDnaerDaTF5BXEavCrfRZEk316dpbLsfPDZ3WJ5hRTPFU2169",
        "P-256",
        "fyNYMN0976ci7xqiSdag3buk-ZCwgXU4kz9XNkBlNUI",
        "hW2ojTNfH7Jbi8--CJUo3OCbH3y5n91g-IMA9MLMbTU",
    ),
    (
        "z82Lm1MpAkeJcix9K8TMiLd5NMAhnwkjjCBeWHXyu3U4oT2MVJJKXkcVBgjGhnLBn2Kaau9",
        "P-384",
        "lInTxl8fjLKp_UCrxI0WDklahi-7-_6JbtiHjiRvMvhedhKVdHBfi2HCY8t_QJyc",
        "y6N1IC-2mXxHreETBW7K3mBcw0qGr3CWHCs-yl09yCQRLcyfGv7XhqAngHOu51Zv",
    ),
    (
        "z82LkvCwHNreneWpsgPEbV3gu1C6NFJEBg4srfJ5gdxEsMGRJUz2sG9FE42shbn2xkZJh54",
        "P-384",
        "CA-iNoHDg1lL8pvX3d1uvExzVfCz7Rn6tW781Ub8K5MrDf2IMPyL0RTDiaLHC1JT",
        "Kpnrn8DkXUD3ge4mFxi-DKr0DYO2KuJdwNBrhzLRtfMa3WFMZBiPKUPfJj8dYNl_",
    ),
    (
        "z2J9gaYxrKVpdoG9A4gRnmpnRCcxU6agDtFVVBVdn1JedouoZN7SzcyREXXzWgt3gGiwpoHq7K68X4m32D8HgzG8wv3sY5j7",
        "P-521",
        "ASUHPMyichQ0QbHZ9ofNx_l4y7luncn5feKLo3OpJ2nSbZoC7mffolj5uy7s6KSKXFmnNWxGJ42IOrjZ47qqwqyS",
        "AW9ziIC4ZQQVSNmLlp59yYKrjRY0_VqO-GOIYQ9tYpPraBKUloEId6cI_vynCzlZWZtWpgOM3HPhYEgawQ703RjC",
    ),
    (
        "z2J9gcGdb2nEyMDmzQYv2QZQcM1vXktvy1Pw4MduSWxGabLZ9XESSWLQgbuPhwnXN7zP7HpTzWqrMTzaY5zWe6hpzJ2jnw4f",
        "P-521",
        "AQgyFy6EwH3_u_KXPw8aTXTY7WSVytmbuJeFpq4U6LipxtSmBJe_jjRzms9qubnwm_fGoHMQlvQ1vzS2YLusR2V0",
        "Ab06MCcgoG7dM2I-VppdLV1k3lDoeHMvyYqHVfP05Ep2O7Zu0Qwd6IVzfZi9K0KMDud22wdnGUpUtFukZo0EeO15",
    ),
]
# secp256k1.json: key, publicKeyBase58.
SECP256K1 = [
    ("zQ3shokFTS3brHcDQrn82RUDfCZESWL1ZdCEJwekUDPQiYBme", "23o6Sau8NxxzXcgSc3PLcNxrzrZpbLeBn1izfv3jbKhuv"),
    ("zQ3shZc2QzApp2oymGvQbzP8eKheVshBHbU4ZYjeXqwSKEn6N", "oesQ92MLiAkt2pjBcJFbW7H4DvzKJv22cotjYbmC2JEe"),
]


@pytest.mark.parametrize(("name", "raw", "derived_name", "derived_raw"), ED25519)
def test_ed25519(name: str, raw: str, derived_name: str, derived_raw: str) -> None:
    """The key signs; the X25519 key derived from it is for key agreement (reference 8.2)."""
    did = f"did:key:{name}"
    document = resolve_local(did)
    key = PublicKey.from_base58("Ed25519", raw)
    derived = PublicKey.from_base58("X25519", derived_raw)
    assert document.did == did
    assert document.authentication == (VerificationMethod(f"{did}#{name}", key),)
    assert document.key_agreement == (VerificationMethod(f"{did}#{derived_name}", derived),)
    assert make_did_key(key) == did


@pytest.mark.parametrize(("name", "raw"), X25519)
def test_x25519(name: str, raw: str) -> None:
    """The key is for key agreement only (reference 8.2)."""
    did = f"did:key:{name}"
    document = resolve_local(did)
    key = PublicKey.from_base58("X25519", raw)
    assert document.key_agreement == (VerificationMethod(f"{did}#{name}", key),)
    assert document.authentication == ()
    assert make_did_key(key) == did


@pytest.mark.parametrize(("name", "crv", "x", "y"), NIST)
def test_nist_curves(name: str, crv: str, x: str, y: str) -> None:
    """The same key signs and agrees (reference 8.2)."""
    did = f"did:key:{name}"
    document = resolve_local(did)
    key = PublicKey.from_jwk({"kty": "EC", "crv": crv, "x": x, "y": y})
    assert document.key_agreement == document.authentication == (VerificationMethod(f"{did}#{name}", key),)
    assert make_did_key(key) == did


@pytest.mark.parametrize(("name", "raw"), SECP256K1)
def test_secp256k1(name: str, raw: str) -> None:
    """The key signs only: DIDComm has no key agreement on this curve (reference 1.2)."""
    did = f"did:key:{name}"
    document = resolve_local(did)
    key = PublicKey.from_base58("secp256k1", raw)
    assert document.authentication == (VerificationMethod(f"{did}#{name}", key),)
    assert document.key_agreement == ()
    assert make_did_key(key) == did


@pytest.mark.parametrize(
    "name",
    [
        "z",
        "x",
        "z6Mk",
        "6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp",
        "z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooW0",
        "zUC7K4ndUaGZgV7Cp2yJy6JtMoUHY6u7tkcSYUvPrEidqBmLCTLmi6d5WvwnUqejscAkERJ3bfjEiSYtdPkRSE8kSa11hFBr4sTgnbZ95SJj1"
        "9PN2jdvJjyzpSZgxkyyxNnBNnY",
        "1.1:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp",
    ],
)
def test_unresolvable_keys(name: str) -> None:
    """Malformed keys and unsupported types (the last but one is BLS 12-381) do not resolve."""
    with pytest.raises(UnresolvableDID):
        resolve_local(f"did:key:{name}")
