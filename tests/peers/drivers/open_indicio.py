# mypy: ignore-errors
"""
Opens envelopes with the PyPI package `didcomm-messaging` (Indicio), in the environment of its wallets.

Usage: ``python open_indicio.py askar|authlib``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from didcomm_messaging.crypto.backend.basic import InMemorySecretsManager
from didcomm_messaging.packaging import PackagingService
from opening import OpenAll, Opened, serve

sys.path.append(str(Path(__file__).parents[2] / "foreign"))
from indicio_envelopes import BACKENDS, IMPORTS, Documents  # noqa: E402


def prepare(backend: str, key: dict[str, Any]) -> OpenAll:
    crypto, secrets, packaging = BACKENDS[backend].crypto(), InMemorySecretsManager(), PackagingService()
    known, loop = Documents([key]), asyncio.new_event_loop()
    loop.run_until_complete(secrets.add_secret(BACKENDS[backend].secret(IMPORTS[backend](key["jwk"]), key["kid"])))

    async def open_each(envelopes: Iterable[str]) -> list[Opened]:
        opened = []
        for packed in envelopes:
            plaintext, _ = await packaging.unpack(crypto, known, secrets, packed)
            message = json.loads(plaintext)
            opened.append((message["body"]["next"], json.dumps(message["attachments"][0]["data"]["json"])))
        return opened

    return lambda envelopes: loop.run_until_complete(open_each(envelopes))


if __name__ == "__main__":
    serve(partial(prepare, sys.argv[1]), ["didcomm-messaging", "authlib", "aries-askar", "cryptography"])
