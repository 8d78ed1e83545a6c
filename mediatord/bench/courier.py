"""
What a wallet and its mediator say to each other, packed and read as cheaply as can be.

A load generator competes with what it measures, so everything that may be is computed once: the secret of the two
static keys, and one ephemeral key with all that follows from it. A sender with nothing to hide may use that again;
the mediator sees ordinary authcrypts and has the usual work with each. What the mediator says in another shape than
the usual is read by the wallet's own, slower code.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from mediatord.protocol.canonical_did import canonical_did
from mediatord.protocol.didcomm.content import CIPHERS
from mediatord.protocol.didcomm.kdf import AUTHCRYPT, apv_of, kek, other_info
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE
from mediatord.protocol.jsontext import b64url_decode, b64url_encode, dumps, loads_object
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.packing import AddressBook, Unreadable, compose, unpack

PICKUP = "https://didcomm.org/messagepickup/3.0"

_CIPHER = CIPHERS["A256CBC-HS512"]


class Courier:
    """
    Goes between one wallet and its mediator.

    :raise Unreadable: the mediator has no X25519 key.
    """

    def __init__(self, wallet: Identity, mediator: Mediator) -> None:
        self.wallet = wallet
        self.mediator = mediator
        self._book = AddressBook()
        self._book.learn(mediator.document)
        private = wallet.agreement.private
        methods = [one for one in mediator.document.key_agreement if one.key.curve == private.curve]
        if not methods:
            raise Unreadable("the mediator has no X25519 key")
        self._statics = {one.id: private.exchange(one.key) for one in methods}
        kid, key = methods[0].id, methods[0].key
        ephemeral = PrivateKey.generate(private.curve)
        self._secret = ephemeral.exchange(key) + self._statics[kid]
        skid, apv = wallet.agreement.kid, apv_of([kid])
        self._info = other_info(AUTHCRYPT, skid.encode(), apv)
        header = {
            "typ": ENCRYPTED_TYPE,
            "alg": AUTHCRYPT,
            "enc": "A256CBC-HS512",
            "epk": ephemeral.public.jwk(),
            "apv": b64url_encode(apv),
            "apu": b64url_encode(skid.encode()),
            "skid": skid,
        }
        self._protected = b64url_encode(dumps(header)).encode()
        self._frame = f'{{"protected":"{self._protected.decode()}","recipients":[{{"header":{{"kid":"{kid}"}},'

    def request(self, type_: str, body: Mapping[str, Any], *, route: str = "all") -> bytes:
        """
        A packed request of the wallet.

        :param route: `return_route`: `all` for an answer on the same connection, `none` for none.
        """
        headers = {"from": self.wallet.did, "to": [self.mediator.did], "return_route": route}
        return self.seal(dumps(compose(type_, body, **headers)))

    def acknowledgement(self, ids: list[str], *, route: str = "none") -> bytes:
        """A packed `messages-received`."""
        return self.request(f"{PICKUP}/messages-received", {"message_id_list": ids}, route=route)

    def seal(self, plaintext: bytes) -> bytes:
        """An authcrypt from the wallet to the mediator."""
        key = secrets.token_bytes(_CIPHER.key_size)
        iv, data, tag = _CIPHER.seal(key, plaintext, self._protected)
        wrapped = aes_key_wrap(kek(self._secret, self._info, tag), key)
        return (
            f'{self._frame}"encrypted_key":"{b64url_encode(wrapped)}"}}],"iv":"{b64url_encode(iv)}",'
            f'"ciphertext":"{b64url_encode(data)}","tag":"{b64url_encode(tag)}"}}'
        ).encode()

    def open(self, raw: bytes) -> dict[str, Any]:
        """
        The plaintext of an authcrypt from the mediator.

        :raise Unreadable: it is not authentic, or not from the mediator.
        """
        try:
            return self._opened(raw)
        except (KeyError, TypeError, ValueError, InvalidUnwrap):
            opened = unpack(raw, self.wallet, self._book.resolve)
        if opened.sender is None or canonical_did(opened.sender) != canonical_did(self.mediator.did):
            raise Unreadable("not authenticated as the mediator")
        return loads_object(opened.plaintext)

    def _opened(self, raw: bytes) -> dict[str, Any]:
        value = loads_object(raw)
        protected = value["protected"]
        header = loads_object(b64url_decode(protected))
        if header["alg"] != AUTHCRYPT:
            raise ValueError("another algorithm")
        secret = self.wallet.agreement.private.exchange(PublicKey.from_jwk(header["epk"]))
        info = other_info(AUTHCRYPT, b64url_decode(header["apu"]), b64url_decode(header["apv"]))
        tag = b64url_decode(value["tag"])
        wrapped = b64url_decode(value["recipients"][0]["encrypted_key"])
        key = aes_key_unwrap(kek(secret + self._statics[header["skid"]], info, tag), wrapped)
        data = b64url_decode(value["ciphertext"])
        return loads_object(_CIPHER.open(key, b64url_decode(value["iv"]), data, tag, protected.encode()))


def ids_and_tags(delivery: Mapping[str, Any]) -> list[tuple[str, str]]:
    """
    Of each message in a `delivery`: what it is acknowledged by, and the tag of its envelope, by which it is known.

    :raise Unreadable: it is no delivery.
    """
    found = []
    try:
        for attachment in delivery["attachments"]:
            data = attachment["data"]
            inner = data["json"] if "json" in data else loads_object(b64url_decode(data["base64"]))
            found.append((attachment["id"], inner["tag"]))
    except (KeyError, TypeError, ValueError):
        raise Unreadable("not a delivery") from None
    return found
