"""
Opening and sealing envelopes, in this process: ours, jwcrypto on the same bytes, and the bare cryptography.

jwcrypto has no ECDH-1PU, so that our authcrypts stand beside its anoncrypts, which take one key agreement less.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import process_time
from typing import TypeVar

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from jwcrypto.jwe import JWE
from jwcrypto.jwk import JWK
from nacl import bindings

from mediatord.bench.agreement import RATE, KeyAgreement
from mediatord.bench.crowd import Crowd, forwards
from mediatord.bench.figures import Contender, Figures, Rounds, Table, Target, ratio, size_name, take_turns
from mediatord.bench.plan import Plan
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm.forward import read_next, read_payloads
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm.message import parse_message
from mediatord.protocol.didcomm.usual import UsualForwards
from mediatord.protocol.jsontext import b64url_decode
from mediatord.wallet.identity import Identity, Key
from mediatord.wallet.mediator import Mediator

# By the size of the message in bytes: the longer it is, the more of the time is spent in the same ciphers.
OPENING_GOALS = {1024: 3.3}
OPENING_GOAL = 3.0
AGREEMENT_GOAL = 0.40

_OF_JWCRYPTO, _OF_AGREEMENT = "x jwcrypto", "of g"
_OURS, _JWCRYPTO = "mediatord", "jwcrypto"
_USUAL, _READ_BY_JWCRYPTO = "mediatord, usual forward", "jwcrypto and json, forward read"
_SEALED, _SEALED_BY_JWCRYPTO = "mediatord, authcrypt sealed", "jwcrypto, anoncrypt sealed"
# What each is compared with: the same work, as far as jwcrypto does it.
_BESIDE = {
    _USUAL: _READ_BY_JWCRYPTO,
    "mediatord, forward read": _READ_BY_JWCRYPTO,
    _READ_BY_JWCRYPTO: _READ_BY_JWCRYPTO,
    _SEALED: _SEALED_BY_JWCRYPTO,
    _SEALED_BY_JWCRYPTO: _SEALED_BY_JWCRYPTO,
}
# Turns are short here and many, because nothing has to warm up: a neighbour then disturbs all contenders alike.
_MESSAGES_PER_TURN = 60
_TURNS_PER_SECOND = 5
_SMALL = 1024
# Concat KDF (reference 1.4): the counter, the algorithm and an empty apu, the length of the apv that follows, and
# after that the length of the key.
_FIRST_ROUND = b"\0\0\0\1"
_ALG_AND_NO_APU = b"\0\0\0\x0eECDH-ES+A256KW" + b"\0\0\0\0" + b"\0\0\0\x20"
_KEY_BITS = b"\0\0\1\0"

Item = TypeVar("Item")


def measure_opening(plan: Plan) -> Table:
    """One table for all sizes; every figure is messages per second of CPU time of one core."""
    key = Identity.fresh(endpoint="http://127.0.0.1/didcomm")
    mediator = Mediator.of(key.document)
    crowd = Crowd(mediator, tuple(Identity.fresh(endpoint=mediator.did) for _ in range(_MESSAGES_PER_TURN)))
    rows: dict[str, Figures] = {}
    targets = []
    agreement = KeyAgreement()
    for size in plan.sizes:
        floor = agreement.run()[RATE]
        rounds = _one_size(key.agreement, crowd, size, plan)
        name = size_name(size)
        for contender in rounds.found:
            found = rounds.medians(contender)
            found[_OF_JWCRYPTO] = rounds.ratio(contender, _BESIDE.get(contender, _JWCRYPTO), RATE)
            found[_OF_AGREEMENT] = ratio(found[RATE], floor)
            rows[f"{name}  {contender}"] = found
        usual = rows[f"{name}  {_USUAL}"]
        goal = OPENING_GOALS.get(size, OPENING_GOAL)
        targets.append(Target(f"usual forward {name}, x jwcrypto", goal, usual[_OF_JWCRYPTO]))
        if size <= _SMALL:
            targets.append(Target(f"usual forward {name}, of g", AGREEMENT_GOAL, usual[_OF_AGREEMENT]))
    columns, notes = (RATE, _OF_JWCRYPTO, _OF_AGREEMENT), (f"g: {agreement.name}, a second of it for each size.",)
    return Table("Opening an envelope", columns, rows, tuple(targets), notes)


def _one_size(key: Key, crowd: Crowd, size: int, plan: Plan) -> Rounds:
    envelopes = forwards(crowd, size, _MESSAGES_PER_TURN)
    own = JWK(**key.private.jwk())
    parts = [_Parts.of(raw) for raw in envelopes]
    keys = (key.private,)
    usual = UsualForwards(lambda kid: keys if kid == key.kid else ())
    plain = [_opened(raw, key) for raw in envelopes]
    senders = [wallet.agreement for wallet in crowd.wallets]
    authcrypts = [
        (jwe.seal_authcrypt(text, (sender.kid, sender.private), [(key.kid, key.private.public)]), sender)
        for text, sender in zip(plain, senders, strict=True)
    ]
    to_wallets = list(zip(plain, senders, strict=True))
    return take_turns(
        {
            _OURS: _contender(lambda raw: _opened(raw, key), envelopes),
            _JWCRYPTO: _contender(lambda raw: _opened_by_jwcrypto(raw, own), envelopes),
            "bare cryptography": _contender(lambda one: one.opened(key.private.secret), parts),
            _USUAL: _contender(usual.read, envelopes),
            "mediatord, forward read": _contender(lambda raw: _read(raw, key), envelopes),
            _READ_BY_JWCRYPTO: _contender(lambda raw: _read_plainly(raw, own), envelopes),
            "mediatord, authcrypt opened": _contender(lambda one: _opened(one[0], key, one[1]), authcrypts),
            _SEALED: _contender(lambda one: _sealed(one[0], key, one[1]), to_wallets),
            _SEALED_BY_JWCRYPTO: _contender(lambda one: _sealed_by_jwcrypto(one[0], one[1]), to_wallets),
        },
        max(1, round(plan.rounds * plan.seconds * _TURNS_PER_SECOND)),
    )


def _contender(work: Callable[[Item], object], items: Sequence[Item]) -> Contender:
    return lambda: {RATE: _rate(work, items)}


def _rate(work: Callable[[Item], object], items: Sequence[Item]) -> float:
    """Items per second of CPU time."""
    start = process_time()
    for item in items:
        work(item)
    return len(items) / (process_time() - start)


def _opened(raw: bytes, key: Key, sender: Key | None = None) -> bytes:
    return jwe.open_envelope(jwe.parse(raw), key.kid, key.private, sender.private.public if sender else None)


def _sealed(plaintext: bytes, sender: Key, recipient: Key) -> bytes:
    return jwe.seal_authcrypt(plaintext, (sender.kid, sender.private), [(recipient.kid, recipient.private.public)])


def _sealed_by_jwcrypto(plaintext: bytes, recipient: Key) -> str:
    token = JWE(plaintext, json.dumps({"alg": "ECDH-ES+A256KW", "enc": "A256CBC-HS512"}))
    token.add_recipient(JWK(**recipient.private.public.jwk()), json.dumps({"kid": recipient.kid}))
    sealed: str = token.serialize()
    return sealed


def _read(raw: bytes, key: Key) -> tuple[str, bytes]:
    """As far as the daemon reads a forward: where to, and the payload as it is stored."""
    message = parse_message(_opened(raw, key))
    return read_next(message), read_payloads(message)[0][0]


def _opened_by_jwcrypto(raw: bytes, key: JWK) -> bytes:
    token = JWE()
    token.deserialize(raw.decode("ascii"), key)
    payload: bytes = token.payload
    return payload


def _read_plainly(raw: bytes, key: JWK) -> tuple[str, bytes]:
    message = json.loads(_opened_by_jwcrypto(raw, key))
    payload = json.dumps(message["attachments"][0]["data"]["json"], separators=(",", ":"))
    return message["body"]["next"], payload.encode()


@dataclass(frozen=True, slots=True)
class _Parts:
    """An envelope taken apart and decoded beforehand, so that nothing but cryptography is left to do."""

    ephemeral: bytes
    apv: bytes
    wrapped: bytes = field(repr=False)
    iv: bytes
    data: bytes = field(repr=False)
    mac_input: bytes = field(repr=False)
    tag: bytes

    @classmethod
    def of(cls, raw: bytes) -> _Parts:
        value = json.loads(raw)
        header = json.loads(b64url_decode(value["protected"]))
        aad = value["protected"].encode()
        iv, data, tag = (b64url_decode(value[name]) for name in ("iv", "ciphertext", "tag"))
        return cls(
            ephemeral=PublicKey.from_jwk(header["epk"]).raw,
            apv=b64url_decode(header["apv"]),
            wrapped=b64url_decode(value["recipients"][0]["encrypted_key"]),
            iv=iv,
            data=data,
            mac_input=aad + iv + data + (8 * len(aad)).to_bytes(8, "big"),
            tag=tag,
        )

    def opened(self, secret: bytes) -> bytes:
        """ECDH-ES on X25519, AES key wrap, A256CBC-HS512."""
        shared = bindings.crypto_scalarmult(secret, self.ephemeral)
        kek = hashlib.sha256(_FIRST_ROUND + shared + _ALG_AND_NO_APU + self.apv + _KEY_BITS).digest()
        cek = aes_key_unwrap(kek, self.wrapped)
        if not hmac.compare_digest(hmac.digest(cek[:32], self.mac_input, "sha512")[:32], self.tag):
            raise ValueError("not authentic")
        cipher = Cipher(AES(cek[32:]), CBC(self.iv)).decryptor()
        padded = cipher.update(self.data) + cipher.finalize()
        return padded[: -padded[-1]]
