"""
Opens envelopes as the daemon does.

Usage: ``python open_mediatord.py fast|general``: the fast path for common forwards, or the general path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from opening import OpenAll, Opened, serve  # type: ignore[import-not-found]  # in the directory of this program

from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.forward import FastForwardParser, read_next, read_payloads
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm.message import parse_message


def make_fast_opener(kid: str, private: PrivateKey) -> Callable[[bytes], Opened]:
    keys = {kid: (private,)}
    forwards = FastForwardParser(keys)

    def open_one(packed: bytes) -> Opened:
        forward = forwards.read(packed)
        if forward is None:
            raise ValueError("an envelope that the fast path does not read")
        return forward.next, forward.payload

    return open_one


def make_general_opener(kid: str, private: PrivateKey) -> Callable[[bytes], Opened]:
    def open_one(packed: bytes) -> Opened:
        message = parse_message(jwe.decrypt_envelope(jwe.parse_envelope(packed), kid, private, None))
        return read_next(message), read_payloads(message)[0][0]

    return open_one


def prepare(path: str, key: dict[str, Any]) -> OpenAll:
    open_one = {"fast": make_fast_opener, "general": make_general_opener}[path](
        key["kid"], PrivateKey.from_jwk(key["jwk"])
    )

    def open_all(envelopes: Iterable[Any]) -> list[Opened]:
        return [open_one(packed) for packed in envelopes]

    return open_all


if __name__ == "__main__":
    serve(partial(prepare, sys.argv[1]), ["mediatord", "cryptography", "PyNaCl", "orjson", "pybase64"], str.encode)
