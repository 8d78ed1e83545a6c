# mypy: ignore-errors
"""Opens envelopes with the PyPI package `didcomm` (SICPA), in the environment of its wallets."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from didcomm.common.resolvers import ResolversConfig
from didcomm.did_doc.did_resolver_in_memory import DIDResolverInMemory
from didcomm.secrets.secrets_resolver_in_memory import SecretsResolverInMemory
from didcomm.secrets.secrets_util import jwk_to_secret
from didcomm.unpack import unpack
from opening import OpenAll, Opened, serve

sys.path.append(str(Path(__file__).parents[2] / "foreign"))
from sicpa_documents import dialect, public  # noqa: E402


def resolvers(key: dict[str, Any]) -> ResolversConfig:
    """The mediator's document, with the given key."""
    method = {"id": key["kid"], "type": "JsonWebKey2020", "publicKeyJwk": public(key["jwk"])}
    document = {"id": key["did"], "verificationMethod": [method], "keyAgreement": [key["kid"]]}
    secrets = SecretsResolverInMemory([jwk_to_secret({**key["jwk"], "kid": key["kid"]})])
    return ResolversConfig(secrets, DIDResolverInMemory([dialect(document, {}, str)]))


def prepare(key: dict[str, Any]) -> OpenAll:
    known, loop = resolvers(key), asyncio.new_event_loop()

    async def open_each(envelopes: Iterable[str]) -> list[Opened]:
        opened = []
        for packed in envelopes:
            message = (await unpack(known, packed)).message
            opened.append((message.body["next"], json.dumps(message.attachments[0].data.json)))
        # The library leaves generators behind, which the event loop closes later.
        await asyncio.sleep(0)
        return opened

    return lambda envelopes: loop.run_until_complete(open_each(envelopes))


if __name__ == "__main__":
    serve(prepare, ["didcomm", "authlib", "cryptography"])
