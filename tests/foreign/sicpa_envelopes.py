"""
Opens and seals envelopes with the PyPI package `didcomm` (SICPA).

Usage: ``python sicpa_envelopes.py < jobs.json > results.json``; see test_envelopes.py for both formats.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from didcomm.common.resolvers import ResolversConfig
from didcomm.did_doc.did_resolver_in_memory import DIDResolverInMemory
from didcomm.pack_encrypted import PackEncryptedConfig, pack_encrypted
from didcomm.secrets.secrets_resolver_in_memory import SecretsResolverInMemory
from didcomm.secrets.secrets_util import jwk_to_secret
from didcomm.unpack import unpack
from sicpa_documents import dialect, public
from sicpa_wallet import ENCS


def resolvers(parties: list[dict[str, Any]]) -> ResolversConfig:
    """Documents with the public keys, and a key store with the private ones."""
    documents: dict[str, dict[str, Any]] = {}
    for party in parties:
        did = party["kid"].partition("#")[0]
        document = documents.setdefault(did, {"id": did, "verificationMethod": [], "keyAgreement": []})
        method = {"id": party["kid"], "type": "JsonWebKey2020", "publicKeyJwk": public(party["jwk"])}
        document["verificationMethod"].append(method)
        document["keyAgreement"].append(party["kid"])
    secrets = [jwk_to_secret({**party["jwk"], "kid": party["kid"]}) for party in parties]
    known = DIDResolverInMemory([dialect(document, {}, str) for document in documents.values()])
    return ResolversConfig(SecretsResolverInMemory(secrets), known)


async def main(jobs: dict[str, Any]) -> dict[str, Any]:
    known = resolvers(jobs["parties"])
    opened, sealed = [], []
    for packed in jobs["open"]:
        result = await unpack(known, packed)
        opened.append({"message": result.message.as_dict(), "sender": result.metadata.encrypted_from})
    for job in jobs["seal"]:
        config = PackEncryptedConfig(forward=False, enc_alg_anon=ENCS[job["enc"]])
        result = await pack_encrypted(known, job["message"], job["to"], job["from"], pack_config=config)
        sealed.append(result.packed_msg)
    return {"opened": opened, "sealed": sealed}


if __name__ == "__main__":
    json.dump(asyncio.run(main(json.load(sys.stdin))), sys.stdout)
