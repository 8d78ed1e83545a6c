"""JSON, its canonical form, and text encodings of bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from mediatord.protocol import encoding
from mediatord.protocol.decentrl import canonical_json
from mediatord.protocol.decentrl.did_decentrl import parse_did
from tests.protocol.decentrl.mutations import ODDITIES
from tests.protocol.decentrl.samples import ALICE

# Callers bound longer ones.
_MAX_BASE58 = 2048


class CanonicalTarget:
    """Modes: `j` JSON, `b` base64 of both kinds, `z` base58, `d` a did:decentrl."""

    words = (
        b"1e400",
        b"-0.0",
        b"9007199254740993",
        b"\\ud800",
        b"\\ud83d\\ude00",
        b'"a":1,"a":2',
        b"NaN",
        b"\xef\xbb\xbf",
    )
    longest = 8_192
    # Python's parser calls a hook for each object, and the general serializer many small functions.
    most_calls = (2_000, 60)
    most_memory = (300_000, 800)

    def close(self) -> None:
        """No-op."""

    def run(self, data: bytes) -> None:
        """Parsed input has one meaning and one spelling."""
        way, rest = data[:1], data[1:]
        if way == b"b":
            self._base64(rest)
        elif way == b"z":
            self._base58(rest)
        elif way == b"d":
            self._did(rest)
        else:
            self._json(rest)

    def _json(self, raw: bytes) -> None:
        loose, unique, single = (
            _or_none(load, raw) for load in (encoding.loads, encoding.loads_unique_members, canonical_json.loads)
        )
        assert unique is None or unique == loose
        assert single is None or single == unique
        if loose is not None:
            written = _or_none(encoding.dumps, loose)
            assert written is None or encoding.loads(written) == loose
        if single is None:
            return
        assert json.loads(raw, object_pairs_hook=_is_unique) is not None
        form = canonical_json.canonicalize(single)
        again = canonical_json.loads(form)
        assert canonical_json.canonicalize(again) == form, "two canonical forms of one value"
        spaced = json.dumps(single, indent=1).encode()
        assert canonical_json.canonicalize(canonical_json.loads(spaced)) == form, "spaces have changed it"

    def _base64(self, raw: bytes) -> None:
        decoded = _or_none(encoding.decode_base64url, raw)
        if decoded is not None:
            text = raw.decode("latin-1")
            assert encoding.decode_base64url(text) == decoded
            assert encoding.encode_base64url(decoded) == text.rstrip("="), "two spellings of the same bytes"
            assert base64.urlsafe_b64decode(raw.rstrip(b"=") + b"==") == decoded
            assert encoding.decode_lenient_base64(text) == decoded
        _or_none(encoding.decode_lenient_base64, raw.decode("utf-8", "surrogateescape"))

    def _base58(self, raw: bytes) -> None:
        text = raw[:_MAX_BASE58].decode("utf-8", "surrogateescape")
        decoded = _or_none(encoding.decode_base58, text)
        if decoded is not None:
            assert encoding.encode_base58(decoded) == text
        assert encoding.decode_base58(encoding.encode_base58(raw[:500])) == raw[:500]

    def _did(self, raw: bytes) -> None:
        did = _or_none(parse_did, raw.decode("utf-8", "surrogateescape"))
        if did is not None:
            assert len(did.signing_key) == len(did.prekey) == 32
            assert did.mediator_did.startswith("did:")

    def seeds(self) -> Iterable[bytes]:
        """Values of every kind, and texts in each alphabet."""
        for oddity in ODDITIES:
            yield b"j" + json.dumps({"a": oddity, "b": [oddity]}).encode()
        yield b'j{"\\u00e9":1.5e-7,"\xf0\x9f\x98\x80":[1E400],"a":{"a":1,"a":2}}'
        yield from (b"j" + b'{"a":' * 64 + b"1" + b"}" * 64, b"j[" + b"0.1," * 100 + b"1]")
        for text in (b"", b"AA", b"AAA=", b"AB==", b"-_-_", b"+/+/", b"A", b"AAAA AAAA\n", b"QUJD=", b"\xff"):
            yield b"b" + text
        yield from (b"z", b"z11111", b"z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX", b"z0OIl", b"z\xff")
        yield b"d" + ALICE.encode()


def _or_none(read: Any, value: Any) -> Any:
    """The parsed input, or None if it is refused with the declared error."""
    try:
        return read(value)
    except ValueError:
        return None


def _is_unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(members)) == len(members), "two members of one name"
    return dict(members)


def make() -> CanonicalTarget:
    """Create the target."""
    return CanonicalTarget()
