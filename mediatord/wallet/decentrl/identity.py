"""Throw-away identities: a did:decentrl and the three keys behind it (reference sections 1 and 2)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from nacl.bindings import crypto_scalarmult_base, crypto_sign_seed_keypair

from mediatord.protocol.decentrl import sealing, signing
from mediatord.protocol.decentrl.did import make_did

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """
    A DID whose private keys we hold.

    :param mediator_did: of the mediator that the DID names.
    :param seed: Ed25519, signs.
    :param prekey: X25519 private key that requests for a contract are encrypted to.
    :param storage_key: AES-256, for what only its owner is to read.
    """

    did: str
    mediator_did: str
    seed: bytes = field(repr=False)
    prekey: bytes = field(repr=False)
    storage_key: bytes = field(repr=False)

    @classmethod
    def fresh(cls, alias: str, mediator_did: str) -> Identity:
        """A new identity with new keys."""
        seed, prekey, storage_key = (secrets.token_bytes(_KEY_BYTES) for _ in range(3))
        return cls.of_keys(alias, mediator_did, seed=seed, prekey=prekey, storage_key=storage_key)

    @classmethod
    def of_keys(
        cls, alias: str, mediator_did: str, *, seed: bytes, prekey: bytes, storage_key: bytes, raw: bool = False
    ) -> Identity:
        """
        The identity of given keys.

        :param raw: write keys without their multicodec prefix, as some texts read (reference section 2).
        """
        did = make_did(alias, crypto_sign_seed_keypair(seed)[0], public_half(prekey), mediator_did, raw=raw)
        return cls(did, mediator_did, seed, prekey, storage_key)

    @property
    def signing_key_id(self) -> str:
        """What the signing key is called in the DID document."""
        return f"{self.did}#signing"

    @property
    def signing_key(self) -> bytes:
        """Ed25519 public key."""
        public: bytes = crypto_sign_seed_keypair(self.seed)[0]
        return public

    def sign(self, value: Any) -> str:
        """Sign JSON."""
        return signing.sign_json(value, self.seed)

    def tag(self, text: str) -> str:
        """What stands for a tag at the mediator: always the same, and nothing to anybody else (reference 5.3)."""
        return signing.encrypted_tag(text, self.seed)

    def seal(self, text: str) -> str:
        """Encrypt for ourselves."""
        return sealing.seal(text.encode(), self.storage_key)

    def unseal(self, text: str) -> str:
        """
        The reverse of :meth:`seal`.

        :raise ValueError: it was not encrypted by us, or not for us.
        """
        return sealing.open_sealed(text, self.storage_key).decode()


def public_half(private: bytes) -> bytes:
    """The X25519 public key of a private one."""
    public: bytes = crypto_scalarmult_base(private)
    return public
