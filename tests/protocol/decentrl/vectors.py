"""The vectors of tests/vectors/decentrl.json as keys and documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nacl import bindings

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "vectors" / "decentrl.json").read_bytes())

ALICE: str = VECTORS["alice"]["did"]
MEDIATOR: str = VECTORS["mediator"]["did"]


def secret(owner: str, name: str) -> bytes:
    """A private key of the vectors."""
    return bytes.fromhex(VECTORS["secrets"][owner][name])


def signing_key(owner: str) -> bytes:
    """The public Ed25519 key of `alice` or `mediator`."""
    return bindings.crypto_sign_seed_keypair(secret(owner, "signing"))[0]


def agreement_key(owner: str, name: str) -> bytes:
    """A public X25519 key of `alice` or `mediator`: `prekey` or `ephemeral`."""
    return bindings.crypto_scalarmult_base(secret(owner, name))


def without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    """The document without these members."""
    return {name: value for name, value in document.items() if name not in names}
