"""JSON and base64 from the wire (reference 1.6 and 10.5)."""

from __future__ import annotations

import base64
import itertools
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.protocol import encoding
from mediatord.protocol.encoding import (
    MAX_VALUES,
    decode_base64url,
    decode_lenient_base64,
    dumps,
    encode_base64url,
    loads,
    loads_object,
    loads_unique_members,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(deadline=None)
@given(JSON)
def test_json_round_trip(value: object) -> None:
    """Written JSON is parsed to the same value, also by the standard library."""
    assert loads(dumps(value)) == value == json.loads(dumps(value))


def test_member_order() -> None:
    """The order of members is kept."""
    assert dumps(loads(b'{"b": 1, "a": {"d": 2, "c": 3}}')) == b'{"b":1,"a":{"d":2,"c":3}}'


@pytest.mark.parametrize(
    "raw",
    [b"", b"NaN", b"[Infinity]", b"[1e999]", b'"\xff"', b'"\\ud800"', b"{}x", b"\xef\xbb\xbf{}", b"[" * 5000, "é{"],
)
def test_invalid_json(raw: bytes | str) -> None:
    """NaN, infinities, invalid UTF-8, a byte order mark, endless nesting: ValueError without the input."""
    for read in (loads, loads_object):
        with pytest.raises(ValueError, match="^not JSON$"):
            read(raw)


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"{}"', b"null"])
def test_non_objects(raw: bytes) -> None:
    """Only an object is accepted as an object."""
    with pytest.raises(ValueError):
        loads_object(raw)
    with pytest.raises(ValueError):
        loads_unique_members(raw)


@pytest.mark.parametrize("value", [float, {1: 2}, 2**64, "\ud800"])
def test_unwritable_values(value: object) -> None:
    """ValueError in place of orjson's TypeError."""
    with pytest.raises(ValueError):
        dumps(value)


def test_depth_limit_of_writing() -> None:
    """JSON that is too deep to be written again is a ValueError."""
    deep = loads(b"[" * 1000 + b"]" * 1000)
    with pytest.raises(ValueError):
        dumps(deep)


@settings(deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from([None, 2]), st.booleans())
def test_unique_names(value: dict[str, object], indent: int | None, escaped: bool) -> None:
    """An object without duplicate names is parsed in any notation."""
    assert loads_unique_members(json.dumps(value, indent=indent, ensure_ascii=escaped).encode()) == value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":1}',
        b'{"b":{"a":1,"a":2}}',
        b'{"b":[[{"a":1,"a":{}}]]}',
        b' {"a":1, "a":2}',
        # Written again it has the same length: the number grows by the length of the lost member.
        b'{"a":1,"a":1,"b":1e6}',
        b'{"a":' + b"[" * 1000 + b"]" * 1000 + b',"a":1}',
    ],
)
def test_duplicate_names(raw: bytes) -> None:
    """The same name twice in one object, on any level and in any spelling (reference 1.6 step 2)."""
    loads_object(raw)
    with pytest.raises(ValueError):
        loads_unique_members(raw)


def test_same_name_on_two_levels() -> None:
    """A name may be repeated in another object."""
    assert loads_unique_members(b'{"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]}')


@settings(deadline=None)
@given(st.binary())
def test_base64url_round_trip(data: bytes) -> None:
    """With or without padding, as text or as bytes."""
    text = encode_base64url(data)
    assert text == base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    padded = text + "=" * (-len(text) % 4)
    assert decode_base64url(text) == decode_base64url(padded) == decode_base64url(text.encode()) == data


def test_base64url_is_unambiguous() -> None:
    """
    Over all short texts: only what the encoder writes is decoded, with or without padding.

    The decoders of the standard library skip characters, and pybase64 accepts `+` and `/` (reference 10.5).
    """
    written = {
        encode_base64url(bytes(data))
        for size in range(4)
        for data in itertools.product(b"\0\x01\xfb\xff", repeat=size)
    }
    accepted = written | {text + "=" * (-len(text) % 4) for text in written}
    alphabet = sorted({character for text in accepted for character in text} | set("+/ \n.*é"))
    for size in range(5):
        for characters in itertools.product(alphabet, repeat=size):
            text = "".join(characters)
            if text in accepted:
                decode_base64url(text)
                continue
            try:
                data = decode_base64url(text)
            except ValueError:
                continue
            assert encode_base64url(data) == text.rstrip("=")
            assert len(text) % 4 == 0 or "=" not in text


@pytest.mark.parametrize(
    "value", [None, 5, ["QQ"], {}, "QQ=", "Q", "QR", "====", "QQ==QQ==", "QUJD\n", "+/+/", b"\xff" * 4, "٣" * 4]
)
def test_invalid_base64url(value: object) -> None:
    """ValueError without the input."""
    with pytest.raises(ValueError, match="^not (base64url|a text)$"):
        decode_base64url(value)


@pytest.mark.parametrize("text", ["-_8=", "-_8", "+/8=", "+/8", "+_8", " +/\r\n8 =\t"])
def test_lenient_base64(text: str) -> None:
    """Attachments: both alphabets, padded or not, white space anywhere (reference 2.2)."""
    assert decode_lenient_base64(text) == b"\xfb\xff"


@pytest.mark.parametrize("text", ["A", "A*==", "QUé", "QQ=Q", "\0\0\0\0"])
def test_invalid_base64(text: str) -> None:
    """Other characters, impossible lengths, padding in the middle."""
    with pytest.raises(ValueError):
        decode_lenient_base64(text)


@settings(deadline=None)
@given(st.binary())
def test_base58_round_trip(data: bytes) -> None:
    """Leading zeros included."""
    assert encoding.decode_base58(encoding.encode_base58(data)) == data


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", b""),
        ("2NEpo7TZRRrLZSi2U", b"Hello World!"),
        (
            "USm3fpXnKG5EUBx2ndxBDMPVciP5hGey2Jh4NDv6gmeo1LkMeiKrLJUUBk6Z",
            b"The quick brown fox jumps over the lazy dog.",
        ),
        ("11233QC4", bytes.fromhex("0000287fb4cd")),
    ],
)
def test_base58_known_answers(text: str, data: bytes) -> None:
    """The examples of draft-msporny-base58."""
    assert encoding.encode_base58(data) == text
    assert encoding.decode_base58(text) == data


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "z z", "é"])
def test_invalid_base58(text: str) -> None:
    """Characters that are not in the alphabet."""
    with pytest.raises(ValueError):
        encoding.decode_base58(text)


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0", b'""', b'"\\\\"', b'{"a":[]}', b'"a,\\",b"'])
def test_limits_number_of_values(value: bytes) -> None:
    """A text of too many small values is not parsed, in any notation."""
    loads(b"[" + b",".join([value] * (MAX_VALUES // 3)) + b"]")
    many = b"[" + b",".join([value] * (MAX_VALUES + 1)) + b"]"
    for read in (loads, loads_object, loads_unique_members):
        with pytest.raises(ValueError, match="^too many values$"):
            read(many)
    with pytest.raises(ValueError, match="^too many values$"):
        loads(many.decode())


@pytest.mark.parametrize("text", [b",[{" * 50_000, b'\\",' * 50_000, b'\\\\\\",' * 50_000])
def test_brackets_in_strings_do_not_count(text: bytes) -> None:
    """Strings of any length do not count, closed or not."""
    assert loads_object(b'{"a":"' + text + b'"}')
    with pytest.raises(ValueError, match="^not JSON$"):
        loads(b'{"a":"' + text)


def test_serialised_json_has_no_spare_memory() -> None:
    """A kept message takes its length, not what the encoder reserved for escapes."""
    values = [{"ciphertext": "x" * 5_000}] * 50
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [dumps(value) for value in values]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1.1 * sum(map(len, kept))
