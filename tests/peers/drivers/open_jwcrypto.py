"""Opens envelopes with jwcrypto and the standard library's json, as its documentation has it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jwcrypto.jwe import JWE
from jwcrypto.jwk import JWK
from opening import OpenAll, Opened, serve  # type: ignore[import-not-found]  # in the directory of this program


def prepare(key: dict[str, Any]) -> OpenAll:
    own = JWK(**key["jwk"])

    def open_one(packed: str) -> Opened:
        token = JWE()
        token.deserialize(packed, own)
        message = json.loads(token.payload)
        return message["body"]["next"], json.dumps(message["attachments"][0]["data"]["json"])

    def open_all(envelopes: Iterable[str]) -> list[Opened]:
        return [open_one(packed) for packed in envelopes]

    return open_all


if __name__ == "__main__":
    serve(prepare, ["jwcrypto", "cryptography"])
