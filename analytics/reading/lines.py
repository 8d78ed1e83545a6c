"""
Parsing of log lines: bytes to tables of Arrow.

Arrow parses a chunk of whole lines at once. It spends time on every requested column, even without values; so only
the fields of frequent events are requested, and the few lines of other events are parsed again with all fields. If
anything in a chunk is not as declared, its halves are parsed, and finally its lines one by one: damaged ones are
classified, the others become tables as usual. Both ways accept the same lines.

Of an event only its own fields are read; others are ignored. An event that is not declared may have all fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

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
_SMALL_CHUNK_BYTES = 1 << 16

_ARROW_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
LINE_SCHEMA = pa.schema(
    [
        (column.name, _ARROW_TYPES[column.type])
        for column in make_event_columns()
        if column.name in ENVELOPE or column.name in FIELDS
    ]
)
"""A column for each field that a line may have."""

FREQUENT_EVENTS = ("req.done", "msg.accept", "msg.push", "msg.ack")
"""Nearly all lines are of these events."""

_FREQUENT_FIELDS = {*ENVELOPE, *(name for event in FREQUENT_EVENTS for name in EVENTS[event].fields)}
_TIME = LINE_SCHEMA.get_field_index("ts")
_TEXT_SCHEMA = LINE_SCHEMA.set(_TIME, pa.field("ts", pa.string()))
_FREQUENT_TEXT_SCHEMA = pa.schema([column for column in _TEXT_SCHEMA if column.name in _FREQUENT_FIELDS])
_NUMBERS = [name for name, (kind, _) in FIELDS.items() if kind == "number"]


def _get_limit(name: str) -> int:
    """
    What the absolute value of a number is below: integers that JSON has exactly, durations of some 270 years.

    Jobs convert durations to microseconds, and add numbers up, in 64 bits.
    """
    limit = 1 << (43 if name.endswith("_ms") else 33 if name.endswith("_s") else 53)
    return min(limit, 1 << 31) if LINE_SCHEMA.field(name).type == pa.int32() else limit


_LIMITS = {
    name: _get_limit(name) for name, (kind, _) in {**ENVELOPE, **FIELDS}.items() if kind in ("integer", "number")
}
_PYTHON_TYPES = {"string": (str,), "integer": (int,), "number": (float, int), "boolean": (bool,)}
_TIME_LENGTH = len("2026-11-20T00:00:00.000000Z")
_TIME_PATTERN = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]\.[0-9]{6}Z", re.ASCII
)
_GLUED_PATTERN = re.compile(rb'.\{"v":', re.DOTALL)


class _UndeclaredLineError(ValueError):
    """A line that is not as declared, or may not be."""


@dataclass(frozen=True, slots=True)
class ParsedLines:
    """
    Lines of a chunk.

    :param events: valid lines, in order; columns of frequent events.
    :param others: those of them that are not of frequent events; all columns.
    :param damaged: causes and texts of the other lines.
    :param separators: some line began with a record separator.
    """

    events: pa.Table
    others: pa.Table
    damaged: Sequence[tuple[str, str]] = ()
    separators: bool = False

    def select(self, mask: pa.BooleanArray) -> ParsedLines:
        """Only these events."""
        return replace(
            self, events=self.events.filter(mask), others=self.others.filter(mask.filter(_is_other(self.events)))
        )

    def split_by_event(self) -> dict[str, pa.Table]:
        """The envelope and the fields of each event, by its name."""
        found = {}
        for table, names in (
            (self.events, FREQUENT_EVENTS),
            (self.others, pc.unique(self.others["event"]).to_pylist()),
        ):
            for name in names:
                lines = table.select(_list_fields(name)).filter(pc.equal(table["event"], name))
                if len(lines):
                    found[name] = lines
        return found


def parse_lines(chunk: bytes) -> ParsedLines:
    """
    Parse whole lines; blank ones are ignored.

    :param chunk: the last line may lack its line feed.
    """
    try:
        return _parse_at_once(chunk)
    except ValueError:
        middle = chunk.rfind(b"\n", 0, len(chunk) // 2) + 1
        if len(chunk) < _SMALL_CHUNK_BYTES or not middle:
            return _parse_one_by_one(chunk)
    first, second = parse_lines(chunk[:middle]), parse_lines(chunk[middle:])
    return ParsedLines(
        pa.concat_tables([first.events, second.events]),
        pa.concat_tables([first.others, second.others]),
        [*first.damaged, *second.damaged],
        first.separators or second.separators,
    )


def _is_other(events: pa.Table) -> pa.BooleanArray:
    """Whether each line is not of a frequent event."""
    return pc.invert(pc.is_in(events["event"].combine_chunks(), value_set=pa.array(FREQUENT_EVENTS)))


def _parse_at_once(chunk: bytes) -> ParsedLines:
    """:raise ValueError: a line is not as declared, or not obviously so."""
    # Arrow accepts NaN and infinite numbers, and invalid UTF-8.
    if not chunk.isascii() or b"NaN" in chunk or b"Inf" in chunk:
        raise _UndeclaredLineError
    events = _parse_objects(chunk, _FREQUENT_TEXT_SCHEMA)
    is_other = _is_other(events)
    lines = chunk.split(b"\n")
    rest = [lines[number] for number in pc.indices_nonzero(is_other).to_pylist()]
    others = _parse_objects(b"\n".join([*rest, b""]), _TEXT_SCHEMA) if rest else _make_table([])
    # Of an object in which a field occurs twice, each way of parsing may see another event.
    if not others["event"].combine_chunks().equals(events["event"].combine_chunks().filter(is_other)):
        raise _UndeclaredLineError
    return ParsedLines(events, others)


def _parse_objects(chunk: bytes, schema: pa.Schema) -> pa.Table:
    """:raise ValueError: a line is not as declared."""
    lines = chunk.count(b"\n")
    # Arrow ignores line feeds between objects, but each object must be a line.
    if not (chunk.startswith(b"{") and chunk.endswith(b"}\n") and chunk.count(b"}\n{") == lines - 1):
        raise _UndeclaredLineError
    table = pj.read_json(
        pa.BufferReader(chunk),
        pj.ReadOptions(use_threads=False, block_size=len(chunk)),
        pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    if len(table) != lines or any(table[name].null_count for name in ENVELOPE):
        raise _UndeclaredLineError
    return _convert_values(table)


def _convert_values(table: pa.Table) -> pa.Table:
    """
    Convert times, and negative zeros, which are integers for one parser and not for the other.

    :raise ValueError: a time is invalid, or a number is out of range.
    """
    table = table.set_column(_TIME, "ts", _parse_times(table["ts"]))
    for name in _LIMITS.keys() & set(table.column_names):
        ends = pc.min_max(table[name]).as_py()
        if ends["min"] is not None and not -_LIMITS[name] < ends["min"] <= ends["max"] < _LIMITS[name]:
            raise _UndeclaredLineError
    for name in _NUMBERS:
        if name not in table.column_names:
            continue
        table = table.set_column(table.schema.get_field_index(name), name, pc.add(table[name], 0.0))
    return table


def _parse_times(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Arrow accepts other formats, too, but of this length only one with a blank, and the year 0."""
    lengths = pc.min_max(pc.binary_length(texts)).as_py()
    separators = pc.min_max(pc.utf8_slice_codeunits(texts, 10, 11)).as_py()
    if set(lengths.values()) - {_TIME_LENGTH, None} or set(separators.values()) - {"T", None}:
        raise _UndeclaredLineError
    if (pc.min(texts).as_py() or "1") < "0001":
        raise _UndeclaredLineError
    return pc.cast(texts, LINE_SCHEMA.field("ts").type)


@cache
def _list_fields(event: str) -> list[str]:
    """Names of the envelope and of the fields of an event."""
    declared = EVENTS.get(event)
    return [*ENVELOPE, *(FIELDS if declared is None else declared.fields)]


@cache
def _get_field_types(event: str) -> Mapping[str, tuple[tuple[type, ...], int]]:
    """Types of the fields of an event, and the limits of numbers."""
    kinds = {name: kind for name, (kind, _) in {**ENVELOPE, **FIELDS}.items()}
    return {name: (_PYTHON_TYPES[kinds[name]], _LIMITS.get(name, 0)) for name in _list_fields(event)}


def _parse_one_by_one(chunk: bytes) -> ParsedLines:
    events, damaged, separators = [], [], False
    for line in chunk.split(b"\n"):
        text = line.strip(_RECORD_SEPARATOR + _BLANKS)
        separators |= line.lstrip(_BLANKS).startswith(_RECORD_SEPARATOR)
        if text:
            cause, event = _parse_line(text)
            if cause:
                damaged.append((cause, _make_valid_text(text)))
            else:
                events.append(event)
    table = _make_table(events)
    return ParsedLines(table.select(_FREQUENT_TEXT_SCHEMA.names), table.filter(_is_other(table)), damaged, separators)


def _make_table(events: Sequence[Event]) -> pa.Table:
    arrays = []
    for name, kind in zip(_TEXT_SCHEMA.names, _TEXT_SCHEMA.types, strict=True):
        values = [event.get(name) for event in events]
        if kind == pa.float64():
            # Arrow refuses large integers that are not exact.
            values = [None if value is None else float(value) for value in values]
        arrays.append(pa.array(values, kind))
    return _convert_values(pa.table(arrays, schema=_TEXT_SCHEMA))


def _parse_line(text: bytes) -> tuple[str, Event]:
    """:return: cause of its damage, or the event with its own fields."""
    try:
        event = orjson.loads(text)
    except ValueError:
        return _classify_damage(text), {}
    if not isinstance(event, dict):
        return _classify_damage(text), {}
    name = event.get("event")
    types = _get_field_types(name if isinstance(name, str) else "")
    own = {field_name: event[field_name] for field_name in types.keys() & event.keys()}
    return _find_fault(own, types), own


def _find_fault(event: Event, types: Mapping[str, tuple[tuple[type, ...], int]]) -> str:
    """Why an object is not an event; empty if it is one."""
    for name, value in event.items():
        allowed, limit = types[name]
        if value is not None and (type(value) not in allowed or (limit and not -limit < value < limit)):
            return INVALID_TYPE
    if any(event.get(name) is None for name in ENVELOPE):
        return MISSING_FIELD
    return "" if _is_time(event["ts"]) else INVALID_TIME


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
