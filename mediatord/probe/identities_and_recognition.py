"""Probe DIDs, by which the mediator's processes recognise probes, and the token of probe requests."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_methods import make_did_peer_2
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.probe_markers import PROBE_DID_INFIX, PROBE_SERVICE_TYPE
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey

_TAG_BYTES = 16


class ProbeIdentities:
    """
    Probe DIDs of all nodes of a mediator, one per node name, stable across restarts.

    Each contains a tag that only the mediator's processes can compute.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._tags = _derive_key(seed, "tags", 32)

    def identity(self, node: str) -> WalletIdentity:
        """Probe identity of a node."""
        secret = _derive_key(self._seed, f"keys of {node}", 64)
        agreement = PrivateKey.from_secret("X25519", secret[:32])
        signing = PrivateKey.from_secret("Ed25519", secret[32:])
        did = self._tagged(make_did_peer_2([("E", agreement.public), ("V", signing.public)], []))
        return WalletIdentity(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))

    def is_probe_did(self, did: str) -> bool:
        """Whether a DID is a probe DID; fast for all others."""
        keys, mark, _ = did.partition(PROBE_DID_INFIX)
        return bool(mark) and hmac.compare_digest(_encode_did(did), _encode_did(self._tagged(keys)))

    def _tagged(self, keys: str) -> str:
        tag = hmac.digest(self._tags, _encode_did(keys), "sha256")[:_TAG_BYTES]
        service = encoding.dumps({"t": PROBE_SERVICE_TYPE, "s": encoding.encode_base64url(tag)})
        return f"{keys}.S{encoding.encode_base64url(service)}"


@dataclass(frozen=True, slots=True)
class ProbeCredentials:
    """
    Distinguishes probe requests from others.

    :param token: sent in a header of probe requests; shared by the workers of a daemon.
    """

    identities: ProbeIdentities
    token: bytes = field(repr=False)


def derive_probe_credentials(seed: bytes, shared: bytes | None) -> ProbeCredentials:
    """
    :param seed: a secret of the mediator.
    :param shared: a secret of all workers of a daemon; None for a single process.
    """
    token = secrets.token_bytes(32) if shared is None else _derive_key(shared, "token", 32)
    return ProbeCredentials(ProbeIdentities(seed), token.hex().encode("ascii"))


def _encode_did(did: str) -> bytes:
    """Encode text that need not be a valid DID."""
    return did.encode("utf-8", "surrogatepass")


def _derive_key(secret: bytes, purpose: str, length: int) -> bytes:
    info = f"mediatord readiness, {purpose}".encode()
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret)
