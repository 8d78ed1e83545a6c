"""Strategies for JSON texts in all notations of a value."""

from __future__ import annotations

import json

from hypothesis import strategies as st

# All are parsed without error; few are unchanged when written again.
NUMBERS = (
    "0 -0 -0.0 1.0 1.50 1e2 1E2 1e+2 1E-2 0.1e1 1e-400 -1e-400 4.9e-324 1.7976931348623157e308 "
    "9007199254740993 9223372036854775808 -9223372036854775809 18446744073709551615 18446744073709551616 "
    f"123456789012345678901234567890 {'9' * 300} -{'7' * 200} 0.{'3' * 400} 1{'0' * 308} 3.141592653589793238462643"
).split()
# Not every client's parser accepts these: lone surrogates, numbers beyond a double.
UNREADABLE = ("1E400", "-1e999", "9" * 400, r'"\ud800"', r'"\udc00\ud800"', r'"x\uDFFFy"')
NO_JSON = (
    "NaN",
    "Infinity",
    "01",
    "+1",
    "1.",
    ".5",
    "'a'",
    '"\n"',
    '"\\x"',
    "[1,]",
    "{,}",
    '{"a"}',
    "tru",
    "",
    "/**/1",
)

_blanks = st.sampled_from(["", "", "", " ", "\n", "\t", "\r\n", "  "])
_numbers = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-(10**40), 10**40).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
_letters = st.one_of(
    st.sampled_from(
        ["a", "é", "€", "𝄞", r"\u0041", r"\u00e9", r"\ud834\udd1e", r"\/", "/", r"\"", r"\\", r"\n", r"\u0000"]
        + ["{", "}", "[", "]", ":", ",", r"\u007b", "\x7f", '\\"}', r"\\", "json", r"\"json\":"]
    ),
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'),
)
_strings = st.lists(_letters, max_size=6).map(lambda letters: f'"{"".join(letters)}"')
_names = st.one_of(st.sampled_from(['"a"', '"b"', '"json"', '"data"', r'"\u0061"', '"ciphertext"', '""']), _strings)


def _joined(entries: list[tuple[str, str, str]], brackets: str) -> str:
    return brackets[0] + ",".join(f"{before}{entry}{after}" for before, entry, after in entries) + brackets[1]


def _entries(entry: st.SearchStrategy[str], most: int = 4) -> st.SearchStrategy[list[tuple[str, str, str]]]:
    return st.lists(st.tuples(_blanks, entry, _blanks), max_size=most)


def _members(value: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(_names, _blanks, _blanks, value).map(lambda parts: f"{parts[0]}{parts[1]}:{parts[2]}{parts[3]}")


values: st.SearchStrategy[str] = st.recursive(
    st.one_of(_numbers, _strings, st.sampled_from(["true", "false", "null", "{}", "[]", "[ ]", "{\n}"])),
    lambda inner: st.one_of(
        _entries(inner).map(lambda entries: _joined(entries, "[]")),
        _entries(_members(inner)).map(lambda entries: _joined(entries, "{}")),
    ),
    max_leaves=12,
)


def _enveloped(parts: tuple[list[tuple[str, str, str]], tuple[str, str], int]) -> str:
    entries, (before, after), place = parts
    member = (before, f'"ciphertext"{after}:{before}"AAAA"', after)
    entries.insert(place % (len(entries) + 1), member)
    return _joined(entries, "{}")


# An object with a `ciphertext`, the only member that a mediator checks.
payloads: st.SearchStrategy[str] = st.tuples(
    _entries(_members(values), 6), st.tuples(_blanks, _blanks), st.integers(0, 6)
).map(_enveloped)


def is_json(text: str) -> bool:
    """Whether Python parses it."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
