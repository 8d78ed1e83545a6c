"""Who the daemon is when it writes to itself, and how its processes know each other's DIDs and requests."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.did_peer import make_did_peer_2
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.synthetic import MARK, SERVICE_TYPE
from mediatord.wallet.identity import Identity, Key

_TAG_BYTES = 16


class Kin:
    """
    The DIDs that processes of one mediator have for this, one for each node name, the same after a restart.

    Each has a tag of itself that only they can make, so that all know all.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._tags = _derived(seed, "tags", 32)

    def identity(self, node: str) -> Identity:
        """That of a node."""
        secret = _derived(self._seed, f"keys of {node}", 64)
        agreement = PrivateKey.from_secret("X25519", secret[:32])
        signing = PrivateKey.from_secret("Ed25519", secret[32:])
        did = self._tagged(make_did_peer_2([("E", agreement.public), ("V", signing.public)], []))
        return Identity(did, Key(f"{did}#key-1", agreement), Key(f"{did}#key-2", signing))

    def knows(self, did: str) -> bool:
        """Whether a DID is one of them; of others that takes no time."""
        keys, mark, _ = did.partition(MARK)
        return bool(mark) and hmac.compare_digest(_bytes(did), _bytes(self._tagged(keys)))

    def _tagged(self, keys: str) -> str:
        tag = hmac.digest(self._tags, _bytes(keys), "sha256")[:_TAG_BYTES]
        service = jsontext.dumps({"t": SERVICE_TYPE, "s": jsontext.b64url_encode(tag)})
        return f"{keys}.S{jsontext.b64url_encode(service)}"


@dataclass(frozen=True, slots=True)
class Own:
    """
    What tells the daemon's own requests, messages and sockets from those of others.

    :param token: what its requests have in their heads; one for all workers of a daemon.
    """

    kin: Kin
    token: bytes = field(repr=False)


def own(seed: bytes, shared: bytes | None) -> Own:
    """
    :param seed: a secret of the mediator.
    :param shared: a secret of all workers of a daemon; None for a process that is alone.
    """
    token = secrets.token_bytes(32) if shared is None else _derived(shared, "token", 32)
    return Own(Kin(seed), token.hex().encode("ascii"))


def _bytes(did: str) -> bytes:
    """Of whatever somebody may have sent as a DID."""
    return did.encode("utf-8", "surrogatepass")


def _derived(secret: bytes, purpose: str, length: int) -> bytes:
    info = f"mediatord readiness, {purpose}".encode()
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret)
