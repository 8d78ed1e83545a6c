"""
The floor of cryptography, `g`: X25519 key agreements per second of one core, by OpenSSL's own benchmark.

Opening an envelope takes one of them, and no implementation in any language can leave it out; so figures in units of
g can be compared between machines.
"""

from __future__ import annotations

import shutil
import subprocess
from time import process_time

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from mediatord.bench.figures import Figures

RATE = "msg/CPU-s"
OPENSSL = "openssl speed ecdhx25519"
CRYPTOGRAPHY = "X25519 through cryptography"

_ALGORITHM = "ecdhx25519"
# A line of `openssl speed -mr`: the mark, numbers of the algorithm, operations per second of user time, its inverse.
_MARK, _RATE_AT = "+F5:", 3
_PATIENCE_SECONDS = 20.0
_AT_A_TIME = 200


class KeyAgreement:
    """
    Measures g.

    :ivar name: by what: :data:`OPENSSL`, or :data:`CRYPTOGRAPHY` where the program is not there.
    """

    def __init__(self) -> None:
        self._program = shutil.which("openssl")
        self.name = OPENSSL if self._program else CRYPTOGRAPHY

    def run(self) -> Figures:
        """
        For one second.

        :raise RuntimeError: openssl is there and does not do it.
        """
        return {RATE: _by_openssl(self._program) if self._program else _by_cryptography()}


def read_rate(output: str) -> float:
    """
    What `openssl speed -mr` says.

    :raise RuntimeError: it says something else.
    """
    line = next((line for line in output.splitlines() if line.startswith(_MARK)), "")
    try:
        return float(line.split(":")[_RATE_AT])
    except (IndexError, ValueError):
        raise RuntimeError(f"openssl speed {_ALGORITHM} gave no rate") from None


def _by_openssl(program: str) -> float:
    command = [program, "speed", "-mr", "-seconds", "1", _ALGORITHM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    return read_rate(done.stdout)


def _by_cryptography() -> float:
    key, peer = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
    start, done = process_time(), 0
    while (spent := process_time() - start) < 1.0:
        for _ in range(_AT_A_TIME):
            key.exchange(X25519PublicKey.from_public_bytes(peer))
        done += _AT_A_TIME
    return done / spent
