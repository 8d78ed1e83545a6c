"""Forwards through the fast parser, compared with the general path."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tests.protocol.didcomm import foreign_jwe
from tests.protocol.didcomm.foreign_jwe import JWEWriter
from tests.protocol.didcomm.test_fast_forward_parser import INNER, KEY, assert_parsers_agree, encrypt, forward
from tests.protocol.didcomm.test_jwe import BOB, flatten


class FastForwardTarget:
    """
    Modes: `g` a plaintext in General form, `f` flattened, `i` with spaces, `r` an envelope, `w` by the independent
    writer.
    """

    words = (
        b'"ciphertext":',
        b'"attachments"',
        b'"base64"',
        b'"from"',
        b'"delay_milli"',
        b"\\u0022",
        b'"next"',
        b'"to"',
    )
    longest = 16_384
    most_calls = (2_000, 40)
    most_memory = (1_000_000, 200)

    def close(self) -> None:
        """No-op."""

    def run(self, data: bytes) -> None:
        """Both parsers return the same, or only the general path returns a forward."""
        way, rest = data[:1], data[1:]
        if way == b"r":
            assert_parsers_agree(rest.replace(b"@KID@", BOB.encode()))
        elif way == b"w":
            self._write_independently(rest)
        else:
            raw = encrypt(rest)
            if way == b"f":
                raw = json.dumps(flatten(json.loads(raw)), separators=(",", ":")).encode()
            elif way == b"i":
                raw = json.dumps(json.loads(raw), indent=2).encode()
            assert_parsers_agree(raw)

    def _write_independently(self, rest: bytes) -> None:
        try:
            orders = json.loads(rest)
            change, headers = orders.get("change", {}), orders.get("headers", {})
            moved = tuple(orders.get("moved", ()))
            writing = JWEWriter(change=lambda header: header.update(change), headers=headers, moved=moved)
            jwe = writing.write(foreign_jwe.compact(forward()), (BOB, KEY.public))
            jwe.update(orders.get("outer", {}))
            raw = json.dumps(jwe).encode()
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return
        assert_parsers_agree(raw)

    def seeds(self) -> Iterable[bytes]:
        """Common forwards, and some that are nearly common."""
        for more in (
            {},
            {"thid": "t"},
            {"expires_time": 2e9},
            {"note": "x" * 5000},
            {"to": None},
            {"from": "did:a:b"},
            {"payload": "e30"},
        ):
            raw = json.dumps(forward(**more), separators=(",", ":")).encode()
            yield from (b"g" + raw, b"i" + raw)
        yield b"f" + json.dumps(forward()).encode()
        data = {"base64": "eyJjaXBoZXJ0ZXh0IjoiQUFBQSJ9"}
        yield b"g" + json.dumps(forward(attachments=[{"data": data}])).encode()
        long = {**INNER, "ciphertext": "A" * 6000}
        yield b"g" + json.dumps(forward(attachments=[{"data": {"json": long}}]), separators=(",", ":")).encode()
        for orders in (
            {"change": {"apu": "AA"}},
            {"moved": ["enc"]},
            {"headers": {"typ": "x"}},
            {"outer": {"aad": "A"}},
        ):
            yield b"w" + json.dumps(orders).encode()
        yield b'r{"protected":"e30","recipients":[{"header":{"kid":"@KID@"}}],"ciphertext":"AA","iv":"","tag":""}'


def make() -> FastForwardTarget:
    """Create the target."""
    return FastForwardTarget()
