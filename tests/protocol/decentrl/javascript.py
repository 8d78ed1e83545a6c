"""
What a JavaScript engine makes of JSON, asked once for many texts.

Usage, where Node is: ``python -m tests.protocol.decentrl.javascript`` writes
tests/vectors/decentrl-canonical.json anew.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from random import Random

NODE = shutil.which("node")
RECORDED = Path(__file__).parents[2] / "vectors" / "decentrl-canonical.json"

# Object.keys lists integer-like keys first; sort() orders all by UTF-16 units.
_SCRIPT = """
const canonical = value =>
  Array.isArray(value) ? `[${value.map(canonical).join(",")}]`
  : value !== null && typeof value === "object"
    ? `{${Object.keys(value).sort().map(key => `${JSON.stringify(key)}:${canonical(value[key])}`).join(",")}}`
  : JSON.stringify(value);
const texts = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(texts.map(text => canonical(JSON.parse(text)))));
"""
_NODE_SECONDS = 180

_CHARACTERS = [
    *map(chr, range(0x20)),
    *'aZ09"\\/é\x7f\x80\u00ff\u2028\u2029\ud7ff\ue000\uffff\U00010000\U0001f600\U0010ffff',
    "\ud800",
    "\udbff",
    "\udc00",
    "\udfff",
]
_INTEGERS = [0, 1, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**20, 10**21, 10**22 + 1]
_NUMBERS = [
    "-0",
    "0.0",
    "-0.0",
    "1.0",
    "1E2",
    "1e+2",
    "100e-2",
    "5e-324",
    "4e-324",
    "1e-400",
    "1.7976931348623157e308",
]


def canonicalize_with_node(texts: list[str]) -> list[str]:
    """Return the canonical form of each JSON text, using one Node process."""
    assert NODE is not None
    ran = subprocess.run(
        [NODE, "-e", _SCRIPT],
        input=json.dumps(texts).encode(),
        capture_output=True,
        timeout=_NODE_SECONDS,
        check=True,
    )
    answered: list[str] = json.loads(ran.stdout)
    return answered


def edge_cases() -> list[str]:
    """All powers of ten and two that a double can hold, and numbers at which the notation changes."""
    tens = [f"{mantissa}e{power}" for power in range(-325, 309) for mantissa in ("1", "-1.5")]
    twos = [repr(2.0**power) for power in range(-1074, 1024)]
    integers = [str(sign * number) for number in _INTEGERS for sign in (1, -1)]
    return [f"[{number}]" for number in (*tens, *twos, *integers, *_NUMBERS)]


def random_texts(source: Random, count: int) -> list[str]:
    """Random JSON objects and arrays in ASCII, in all notations of JSON."""
    return [_compound(source, 3) for _ in range(count)]


def _compound(source: Random, depth: int) -> str:
    values = [_value(source, depth - 1) for _ in range(source.randrange(5))]
    if source.random() < 0.3:
        return f"[{', '.join(values)}]"
    # As in JavaScript, adjacent surrogate halves are one character.
    names = dict.fromkeys(json.loads(_text(source)) for _ in values)
    return "{" + ",".join(f"{json.dumps(name)} :{value}" for name, value in zip(names, values, strict=False)) + "}"


def _value(source: Random, depth: int) -> str:
    kind = source.randrange(8 if depth else 5)
    if kind == 0:
        return source.choice(["true", "false", "null"])
    if kind == 1:
        return _text(source)
    if kind <= 4:
        return _number(source)
    return _compound(source, depth)


def _text(source: Random) -> str:
    return json.dumps("".join(source.choices(_CHARACTERS, k=source.randrange(6))))


def _number(source: Random) -> str:
    kind = source.randrange(5)
    if kind == 0:
        return str(source.randrange(-(2 ** source.randrange(1, 80)), 2 ** source.randrange(1, 80)))
    if kind == 1:
        return f"{source.randrange(10**6)}.{source.randrange(10**6)}"
    if kind == 2:
        return f"{source.randrange(1, 10**6)}e{source.randrange(-330, 300)}"
    if kind == 3:
        return source.choice(_NUMBERS)
    (double,) = struct.unpack("<d", source.randbytes(8))
    return repr(double) if abs(double) < float("inf") else "1"


def record() -> None:
    """Write Node's results for some hundred texts."""
    source = Random("canonical JSON")
    texts = [*source.sample(edge_cases(), 150), *random_texts(source, 250)]
    pairs = [
        {"json": text, "canonical": spelled}
        for text, spelled in zip(texts, canonicalize_with_node(texts), strict=True)
    ]
    lines = ",\n".join(json.dumps(pair) for pair in pairs)
    RECORDED.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    record()
