"""
Scenario of opening and sealing envelopes in this process, and the baseline `g` of forwards.

The baseline is the rate of X25519 key agreements of one core, by OpenSSL's own benchmark. Opening an envelope takes
one, in any implementation, so figures in units of g can be compared between machines.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from jwcrypto.jwe import JWE
from jwcrypto.jwk import JWK

from mediatord.bench.plan import BenchmarkPlan
from mediatord.bench.results import PER_CPU_SECOND, Contender, Figures, ResultTable, format_size, safe_ratio, scenario
from mediatord.bench.wallet_group import WalletGroup
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.forward import FastForwardParser, read_next, read_payloads
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm.message import parse_message
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey

_OPENSSL_ALGORITHM = "ecdhx25519"
OF_G = "of g"


class KeyAgreementBaseline:
    """Measures g, by `openssl speed`, or through `cryptography` where that program is missing."""

    def __init__(self) -> None:
        self._program = shutil.which("openssl")
        self.name = f"openssl speed {_OPENSSL_ALGORITHM}" if self._program else "X25519 through cryptography"

    def run(self) -> Figures:
        """
        Measure for one second.

        :raise RuntimeError: openssl failed.
        """
        if self._program is None:
            return {PER_CPU_SECOND: _measure_cryptography_rate()}
        command = [self._program, "speed", "-mr", "-seconds", "1", _OPENSSL_ALGORITHM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
        return {PER_CPU_SECOND: parse_openssl_rate(done.stdout)}


def parse_openssl_rate(output: str) -> float:
    """
    Operations per second in the output of `openssl speed -mr`.

    :raise RuntimeError: there is no such line.
    """
    line = next((line for line in output.splitlines() if line.startswith("+F5:")), "")
    try:
        return float(line.split(":")[3])
    except (IndexError, ValueError):
        raise RuntimeError(f"openssl speed {_OPENSSL_ALGORITHM} gave no rate") from None


def _measure_cryptography_rate() -> float:
    key, peer = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
    start, done = process_time(), 0
    while (spent := process_time() - start) < 1.0:
        for _ in range(200):
            key.exchange(X25519PublicKey.from_public_bytes(peer))
        done += 200
    return done / spent


# Goals by size in bytes: the longer a message is, the larger the share of time in the same ciphers.
_JWCRYPTO_GOALS_BY_SIZE = {1024: 3.3}
_SMALL_MESSAGE_BYTES = 1024
_OF_JWCRYPTO = "x jwcrypto"
_FAST_FORWARD_ROW = "mediatord, fast path"
# Rounds are short and many because nothing has to warm up: other load then disturbs all contenders alike.
_MESSAGES_PER_ROUND = 60
_ROUNDS_PER_SECOND = 5


@scenario("Opening an envelope", (PER_CPU_SECOND, _OF_JWCRYPTO, OF_G))
def measure_envelopes(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Opening and sealing in this process: mediatord, jwcrypto, and the bare cryptography, per second of CPU time."""
    identity = WalletIdentity.generate(endpoint="http://127.0.0.1/didcomm")
    group = WalletGroup.generate(DIDCommMediator.from_document(identity.document), _MESSAGES_PER_ROUND, short=False)
    agreement = KeyAgreementBaseline()
    table.notes = [f"g: {agreement.name}, measured for a second before each size."]
    rounds = max(1, round(plan.rounds * plan.seconds * _ROUNDS_PER_SECOND))
    for size in plan.sizes:
        name, baseline = format_size(size), agreement.run()[PER_CPU_SECOND]
        for other, contenders in _make_contenders(identity.agreement, group, size).items():
            table.compare(contenders, rounds, f"{name}  ", {_OF_JWCRYPTO: (other, PER_CPU_SECOND)})
        for row in table.rows.values():
            row.setdefault(OF_G, safe_ratio(row[PER_CPU_SECOND], baseline))
        fast = table.rows[f"{name}  {_FAST_FORWARD_ROW}"]
        goal = _JWCRYPTO_GOALS_BY_SIZE.get(size, 3.0)
        table.add_target(f"fast path {name}, x jwcrypto", goal, fast[_OF_JWCRYPTO])
        if size <= _SMALL_MESSAGE_BYTES:
            table.add_target(f"fast path {name}, of g", 0.40, fast[OF_G])


def _make_contenders(key: WalletKey, group: WalletGroup, size: int) -> dict[str, dict[str, Contender]]:
    """Contenders by the one of jwcrypto that they are compared with."""
    envelopes = [(body,) for body, _ in group.forwards(size, _MESSAGES_PER_ROUND)]
    recipient = key.kid, key.private
    public, senders = (key.kid, key.private.public), [wallet.identity.agreement for wallet in group.wallets]
    jwk, public_jwk = JWK(**key.private.jwk()), JWK(**key.private.public.jwk())
    parser = FastForwardParser({key.kid: (key.private,)})
    parsed = [(jwe.parse_envelope(raw), *recipient, None) for (raw,) in envelopes]
    plaintexts = [(jwe.decrypt_envelope(*one),) for one in parsed]
    to_senders = [
        (text, recipient, [(sender.kid, sender.private.public)])
        for (text,), sender in zip(plaintexts, senders, strict=True)
    ]
    authcrypts = [
        (jwe.encrypt_authcrypt(text, (sender.kid, sender.private), [public]), sender.private.public)
        for (text,), sender in zip(plaintexts, senders, strict=True)
    ]

    def open_envelope(raw: bytes, sender: PublicKey | None = None) -> bytes:
        return jwe.decrypt_envelope(jwe.parse_envelope(raw), *recipient, sender)

    def read_forward(raw: bytes) -> tuple[str, bytes]:
        message = parse_message(open_envelope(raw))
        return read_next(message), read_payloads(message)[0][0]

    def open_by_jwcrypto(raw: bytes) -> bytes:
        token = JWE()
        token.deserialize(raw.decode("ascii"), jwk)
        payload: bytes = token.payload
        return payload

    def read_by_jwcrypto(raw: bytes) -> tuple[str, bytes]:
        message = json.loads(open_by_jwcrypto(raw))
        payload = json.dumps(message["attachments"][0]["data"]["json"], separators=(",", ":"))
        return message["body"]["next"], payload.encode()

    def seal_by_jwcrypto(plaintext: bytes) -> object:
        token = JWE(plaintext, json.dumps({"alg": "ECDH-ES+A256KW", "enc": "A256CBC-HS512"}))
        token.add_recipient(public_jwk, json.dumps({"kid": key.kid}))
        return token.serialize()

    return {
        "jwcrypto": {
            "mediatord": partial(_measure_cpu_rate, open_envelope, envelopes),
            "jwcrypto": partial(_measure_cpu_rate, open_by_jwcrypto, envelopes),
            "bare cryptography": partial(_measure_cpu_rate, jwe.decrypt_envelope, parsed),
            "mediatord, authcrypt opened": partial(_measure_cpu_rate, open_envelope, authcrypts),
        },
        "jwcrypto and json, forward read": {
            _FAST_FORWARD_ROW: partial(_measure_cpu_rate, parser.read, envelopes),
            "mediatord, general path": partial(_measure_cpu_rate, read_forward, envelopes),
            "jwcrypto and json, forward read": partial(_measure_cpu_rate, read_by_jwcrypto, envelopes),
        },
        # jwcrypto has no ECDH-1PU: an authcrypt is compared with its anoncrypt, which takes one key agreement less.
        "jwcrypto, anoncrypt sealed": {
            "mediatord, authcrypt sealed": partial(_measure_cpu_rate, jwe.encrypt_authcrypt, to_senders),
            "jwcrypto, anoncrypt sealed": partial(_measure_cpu_rate, seal_by_jwcrypto, plaintexts),
        },
    }


def _measure_cpu_rate(work: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> Figures:
    start = process_time()
    for one in arguments:
        work(*one)
    return {PER_CPU_SECOND: len(arguments) / (process_time() - start)}
