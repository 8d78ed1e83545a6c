"""
Opens envelopes as the daemon does.

Usage: ``python open_mediatord.py usual|long``: the short way for usual forwards, or the way for everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from opening import OpenAll, Opened, serve  # type: ignore[import-not-found]  # it lies beside this program

from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.forward import FastForwardParser, read_next, read_payloads
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm.message import parse_message


def usual(kid: str, private: PrivateKey) -> Callable[[bytes], Opened]:
    keys = {kid: (private,)}
    forwards = FastForwardParser(keys)

    def open_one(packed: bytes) -> Opened:
        found = forwards.read(packed)
        if found is None:
            raise ValueError("an envelope that is not usual")
        return found.next, found.payload

    return open_one


def long(kid: str, private: PrivateKey) -> Callable[[bytes], Opened]:
    def open_one(packed: bytes) -> Opened:
        message = parse_message(jwe.decrypt_envelope(jwe.parse_envelope(packed), kid, private, None))
        return read_next(message), read_payloads(message)[0][0]

    return open_one


def prepare(way: str, key: dict[str, Any]) -> OpenAll:
    open_one = {"usual": usual, "long": long}[way](key["kid"], PrivateKey.from_jwk(key["jwk"]))

    def open_all(envelopes: Iterable[Any]) -> list[Opened]:
        return [open_one(packed) for packed in envelopes]

    return open_all


if __name__ == "__main__":
    serve(partial(prepare, sys.argv[1]), ["mediatord", "cryptography", "PyNaCl", "orjson", "pybase64"], str.encode)
