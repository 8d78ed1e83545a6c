"""
Opens and seals envelopes with the PyPI package `didcomm-messaging` (Indicio).

Usage: ``python indicio_envelopes.py askar|authlib < jobs.json > results.json``; see test_envelopes.py for both
formats.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aries_askar import Key
from authlib.jose import OKPKey
from didcomm_messaging.crypto.backend.basic import InMemorySecretsManager
from didcomm_messaging.packaging import PackagingService
from didcomm_messaging.resolver import DIDResolver
from indicio_wallet import BACKENDS

IMPORTS = {"askar": Key.from_jwk, "authlib": OKPKey.import_key}


class Documents(DIDResolver):
    """Documents with the public keys of the parties."""

    def __init__(self, parties: list[dict[str, Any]]) -> None:
        self._documents: dict[str, dict[str, Any]] = {}
        for party in parties:
            did = party["kid"].partition("#")[0]
            document = self._documents.setdefault(did, {"id": did, "verificationMethod": [], "keyAgreement": []})
            key = {"type": "Multikey", "controller": did, "publicKeyMultibase": party["multikey"]}
            document["verificationMethod"].append({"id": party["kid"], **key})
            document["keyAgreement"].append(party["kid"])

    async def resolve(self, did: str) -> dict[str, Any]:
        return self._documents[did]

    async def is_resolvable(self, did: str) -> bool:
        return did in self._documents


async def main(backend: str, jobs: dict[str, Any]) -> dict[str, Any]:
    crypto, secrets, packaging = BACKENDS[backend].crypto(), InMemorySecretsManager(), PackagingService()
    for party in jobs["parties"]:
        await secrets.add_secret(BACKENDS[backend].secret(IMPORTS[backend](party["jwk"]), party["kid"]))
    known = Documents(jobs["parties"])
    opened, sealed = [], []
    for packed in jobs["open"]:
        plaintext, metadata = await packaging.unpack(crypto, known, secrets, packed)
        opened.append({"message": json.loads(plaintext), "sender": metadata.sender_kid})
    for job in jobs["seal"]:
        message = json.dumps(job["message"]).encode()
        packed = await packaging.pack(crypto, known, secrets, message, job["kids"], job["from"])
        sealed.append(packed.decode())
    return {"opened": opened, "sealed": sealed}


if __name__ == "__main__":
    json.dump(asyncio.run(main(sys.argv[1], json.load(sys.stdin))), sys.stdout)
