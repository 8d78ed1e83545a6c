"""The mediator's keys of DIDComm v1, all derived from one secret that outlasts key rotations."""

from __future__ import annotations

from functools import lru_cache

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mediatord.protocol.didcomm_v1.keys import SigningKey

# Derived keys that are kept: 500 bytes each.
_MAX_CACHED_KEYS = 10_000


class V1Identity:
    """
    Derives the keys.

    The keys of invitation and routing stand in documents of wallets and printed codes for years. Each connection has
    a key of its own, as wallets find a connection by that key; it is the same whenever a wallet connects again.

    :param secret: :attr:`mediatord.identity.mediator_identity.MediatorIdentity.root_secret`.
    :ivar invitation_key: receives requests to connect, and signs the answers.
    :ivar routing_key: receives forwards.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.invitation_key = self._derive("invitation")
        self.routing_key = self._derive("routing")
        self.connection_key = lru_cache(_MAX_CACHED_KEYS)(self._derive_connection_key)

    def find_constant_key(self, did_key: str) -> SigningKey | None:
        """The key of routing or of the invitation, if it is this one."""
        for key in (self.routing_key, self.invitation_key):
            if key.did_key == did_key:
                return key
        return None

    def _derive_connection_key(self, wallet_key: str) -> SigningKey:
        """The key for the connection with a wallet. :param wallet_key: as did:key."""
        return self._derive(f"connection {wallet_key}")

    def _derive(self, purpose: str) -> SigningKey:
        info = f"mediatord DIDComm v1 {purpose}".encode()
        return SigningKey.from_seed(HKDF(SHA256(), 32, None, info).derive(self._secret))
