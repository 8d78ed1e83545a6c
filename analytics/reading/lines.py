"""
Parsing of log lines: bytes to columns, one Arrow record batch for each event.

A chunk of whole lines is parsed at once, and each column of each event is checked as a whole. If anything in a chunk
is not as declared, its lines are checked one by one: damaged ones are classified, the others become columns as usual.
So both ways accept the same lines.

An event has the columns of the envelope and of its own fields; other fields are ignored. An event that is not
declared has the columns of all fields.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from analytics.schema import make_event_columns
from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS

Event = dict[str, Any]

INVALID_TYPE, MISSING_FIELD, INVALID_TIME = "type", "missing", "time"
QUARANTINE_CAUSES = {
    "torn": "lines without their beginning or end: a crash or a full disk",
    "glued": "lines that contain the beginning of another one",
    "nul": "lines with zero bytes: a power failure",
    "utf8": "lines that are not UTF-8",
    "separator": "lines with a record separator (0x1E) that are invalid without it too",
    "not_json": "lines that are not JSON objects for another reason",
    INVALID_TYPE: "lines with a value of another type than declared, or out of range",
    MISSING_FIELD: "lines without a field that every line has",
    INVALID_TIME: "lines whose time is not RFC 3339 in UTC with microseconds",
}

MAX_QUARANTINED_CHARS = 4096
_MAX_BYTES_OF_CHAR = 4
_RECORD_SEPARATOR = b"\x1e"
_BLANKS = b" \t\r"

_ARROW_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
TYPES = {column.name: _ARROW_TYPES[column.type] for column in make_event_columns() if column.type != "date"}
"""Arrow types of the columns of `events`, except for its partitions."""

_KINDS = {name: kind for name, (kind, _) in {**ENVELOPE, **FIELDS}.items()}
_PYTHON_TYPES = {
    "string": frozenset({str}),
    "integer": frozenset({int}),
    "number": frozenset({float, int}),
    "boolean": frozenset({bool}),
}
_OPTIONAL_TYPES = {kind: types | {type(None)} for kind, types in _PYTHON_TYPES.items()}
_TIME_LENGTH = len("2026-11-20T00:00:00.000000Z")
_TIME_PATTERN = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]\.[0-9]{6}Z", re.ASCII
)
_GLUED_PATTERN = re.compile(rb'.\{"v":', re.DOTALL)


class _UndeclaredValueError(ValueError):
    """A value that is not as declared."""


# Errors of orjson, of Arrow and of Python for values that are not as declared.
_PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


@dataclass(slots=True)
class ParsedLines:
    """
    Lines of a chunk.

    :ivar events: valid lines, in order.
    :ivar columns: the same, by the name of the event.
    :ivar damaged: causes and texts of the other lines.
    :ivar separators: some line began with a record separator.
    """

    events: list[Event]
    columns: Mapping[str, pa.RecordBatch]
    damaged: list[tuple[str, str]] = field(default_factory=list)
    separators: bool = False


def parse_lines(chunk: bytes) -> ParsedLines:
    """
    Parse whole lines; blank ones are ignored.

    :param chunk: the last line may lack its line feed.
    """
    try:
        events = list(map(orjson.loads, chunk.removesuffix(b"\n").split(b"\n")))
        return ParsedLines(events, make_columns(events))
    except _PARSE_ERRORS:
        return _parse_one_by_one(chunk)


def make_columns(events: Iterable[Event]) -> dict[str, pa.RecordBatch]:
    """
    Columns of events, by the name of the event.

    :raise ValueError: a value is not as declared; so may the other errors of a parser.
    """
    groups: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        groups[event["event"]].append(event)
    return {name: _make_batch(name, group) for name, group in groups.items()}


def _make_batch(event: str, group: Sequence[Event]) -> pa.RecordBatch:
    columns = {}
    for name in ENVELOPE:
        columns[name] = _make_array(name, [line[name] for line in group], _PYTHON_TYPES[_KINDS[name]])
    for name in _list_own_fields(event):
        columns[name] = _make_array(name, [line.get(name) for line in group], _OPTIONAL_TYPES[_KINDS[name]])
    return pa.RecordBatch.from_pydict(columns)


def _make_array(name: str, values: Sequence[Any], types: frozenset[type]) -> pa.Array:
    found = set(map(type, values))
    if not found <= types:
        raise _UndeclaredValueError(name)
    if name == "ts":
        return _make_times(values)
    if int in found and TYPES[name] == pa.float64():
        # Arrow refuses large integers that are not exact.
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, TYPES[name])


def _make_times(values: Sequence[str]) -> pa.Array:
    """Arrow accepts other formats, too, but of this length only one with a blank, and the year 0."""
    texts = pa.array(values, pa.string())
    lengths = pc.min_max(pc.binary_length(texts)).as_py()
    separators = pc.min_max(pc.utf8_slice_codeunits(texts, 10, 11)).as_py()
    if set(lengths.values()) != {_TIME_LENGTH} or set(separators.values()) != {"T"} or min(values) < "0001":
        raise _UndeclaredValueError("ts")
    return pc.cast(texts, TYPES["ts"])


@cache
def _list_own_fields(event: str) -> tuple[str, ...]:
    declared = EVENTS.get(event)
    return tuple(FIELDS) if declared is None else declared.fields


def _parse_one_by_one(chunk: bytes) -> ParsedLines:
    found = ParsedLines([], {})
    for line in chunk.split(b"\n"):
        text = line.strip(_RECORD_SEPARATOR + _BLANKS)
        found.separators |= line.lstrip(_BLANKS).startswith(_RECORD_SEPARATOR)
        if text:
            cause, event = _parse_line(text)
            if cause:
                found.damaged.append((cause, _make_valid_text(text)))
            else:
                found.events.append(event)
    found.columns = make_columns(found.events)
    return found


def _parse_line(text: bytes) -> tuple[str, Event]:
    """:return: cause of its damage, or the event."""
    try:
        event = orjson.loads(text)
    except ValueError:
        return _classify_damage(text), {}
    return (_find_fault(event), event) if isinstance(event, dict) else (_classify_damage(text), {})


def _find_fault(event: Event) -> str:
    """Why an object is not an event; empty if it is one."""
    name = event.get("event")
    fields = (*ENVELOPE, *_list_own_fields(name if isinstance(name, str) else ""))
    if not all(_is_as_declared(field_name, event.get(field_name)) for field_name in fields):
        return INVALID_TYPE
    if any(event.get(field_name) is None for field_name in ENVELOPE):
        return MISSING_FIELD
    return "" if _is_time(event["ts"]) else INVALID_TIME


def _is_as_declared(name: str, value: Any) -> bool:
    if value is None:
        return True
    kind = TYPES[name]
    in_range = not pa.types.is_integer(kind) or type(value) is not int or value.bit_length() < kind.bit_width
    # The lowest integer of each width has one bit more than the others.
    is_lowest = pa.types.is_integer(kind) and type(value) is int and value == -(2 ** (kind.bit_width - 1))
    return type(value) in _PYTHON_TYPES[_KINDS[name]] and (in_range or is_lowest)


def _is_time(text: str) -> bool:
    match = _TIME_PATTERN.fullmatch(text)
    if match is None:
        return False
    try:
        date.fromisoformat(match[1])
    except ValueError:
        return False
    return True


def _classify_damage(line: bytes) -> str:
    """Classify a line that is not a JSON object."""
    if b"\0" in line:
        return "nul"
    if b"\xef\xbf\xbd" in line or not _is_utf8(line):
        return "utf8"
    if _GLUED_PATTERN.search(line):
        return "glued"
    if line.startswith(b"{") != line.endswith(b"}"):
        return "torn"
    if _RECORD_SEPARATOR in line:
        return "separator"
    return INVALID_TYPE if _is_object_for_python(line) else "not_json"


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_object_for_python(line: bytes) -> bool:
    """Python accepts NaN, infinite numbers and lone surrogates, which JSON does not have."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _make_valid_text(line: bytes) -> str:
    start = line[: MAX_QUARANTINED_CHARS * _MAX_BYTES_OF_CHAR]
    return start.decode(errors="replace")[:MAX_QUARANTINED_CHARS]
