"""Parsing of lines: all ways accept the same lines, whatever else is in a chunk."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import orjson
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analytics.reading.lines import LINE_SCHEMA, MAX_QUARANTINED_CHARS, QUARANTINE_CAUSES, ParsedLines, parse_lines
from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS

Event = dict[str, Any]
TYPES = {name: kind for name, (kind, _) in {**ENVELOPE, **FIELDS}.items()}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
INT32 = {column.name for column in LINE_SCHEMA if column.type == pa.int32()}
TIME = "2026-11-20T10:00:00.000000Z"


def parse_reference_line(line: bytes) -> Event | None:
    """Fields of a valid line, without nulls and other events' fields; None if it is damaged."""
    try:
        found = orjson.loads(line)
        names = [*ENVELOPE, *(EVENTS[found["event"]].fields if found["event"] in EVENTS else FIELDS)]
        event = {name: found[name] for name in names if found.get(name) is not None}
        for name, value in event.items():
            bits = 43 if name.endswith("_ms") else 33 if name.endswith("_s") else 53
            assert type(value) in PYTHON_TYPES[TYPES[name]]
            assert TYPES[name] not in ("integer", "number") or abs(value) < 2 ** (31 if name in INT32 else bits)
        assert set(ENVELOPE) <= set(event) and len(event["ts"]) == len(TIME) and event["ts"].isascii()
        at = datetime.strptime(event["ts"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
        assert at.strftime("%Y").zfill(4) + at.strftime("-%m-%dT%H:%M:%S.%fZ") == event["ts"]
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError):
        return None
    return {name: float(value) if TYPES[name] == "number" else value for name, value in event.items()} | {"ts": at}


def describe(event: Event) -> str:
    """In the order of columns; a negative zero is a zero."""
    at: datetime = event["ts"]
    values = {name: event[name] for name in LINE_SCHEMA.names if event.get(name) is not None}
    zeros = {name: 0.0 for name, value in values.items() if isinstance(value, float) and not value}
    return repr({**values, **zeros, "ts": at.replace(tzinfo=None)})


def describe_all(parsed: ParsedLines) -> list[str]:
    return sorted(describe(row) for table in parsed.split_by_event().values() for row in table.to_pylist())


def make_line(event: str = "msg.ack", seq: int = 1, **fields: Any) -> bytes:
    envelope = {"v": 1, "ts": TIME, "seq": seq, "node": "a", "boot": "b", "event": event, "level": "info", "epoch": 1}
    return json.dumps({**envelope, **fields}, separators=(",", ":")).encode()


json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=5),
    st.just(TIME),
    st.lists(st.integers(), max_size=1),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)
texts_of_times = st.one_of(
    st.from_regex(r"[0-9]{4}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9]\.[0-9]{6}Z", fullmatch=True),
    st.text(alphabet="0123456789T:.Z -", min_size=27, max_size=27),
)
names = st.sampled_from(["req.done", "msg.ack", "gauge", "log.close", "event.new"])


@st.composite
def changed_lines(draw: st.DrawFn) -> bytes:
    """Lines with changed values, or bytes cut, repeated or inserted."""
    fields = draw(st.dictionaries(st.sampled_from([*ENVELOPE, *FIELDS, "other"]), json_values, max_size=2))
    if draw(st.booleans()):
        fields["ts"] = draw(texts_of_times)
    whole = make_line(**{"event": draw(names), "seq": draw(st.integers(0, 99)), **fields})
    start, end = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
    piece = draw(
        st.sampled_from([whole[start:end], b"\xff", b'{"v":', b"}", b"{", b",", b"\0", b"\x1e", b"\r", b" "])
    )
    damaged = [whole[start:], whole[:start] + piece + whole[end:], whole[:start] + piece + whole[start:]]
    return draw(st.sampled_from([whole] * 6 + damaged))


any_lines = st.one_of(changed_lines(), st.binary(max_size=40), st.integers(0, 99).map(lambda n: make_line(seq=n)))


@settings(max_examples=300, deadline=None)
@given(st.lists(any_lines.map(lambda line: line.replace(b"\n", b"")), max_size=6))
@example([make_line(), make_line() + make_line()])
@example([make_line()[:-1] + b',"other":[{}', b"{}]}", make_line() + make_line()])
@example([make_line("gauge", lag_ms=-0.0), make_line("gauge").replace(b"}", b',"lag_ms":-0}')])
@example([make_line("gauge", lag_ms=2**63), make_line("gauge", lag_ms=float("inf"))])
@example([make_line("msg.ack", latency_ms=2.0**43), make_line("msg.ack", latency_ms=-(2.0**43) + 1)])
@example([make_line("gauge", depth=2**53), make_line("gauge", depth=-(2**53)), make_line("gauge", depth=2**53 - 1)])
@example([make_line("msg.accept", ttl_s=2**33), make_line("msg.accept", ttl_s=2**33 - 1)])
@example([make_line(depth="x"), make_line(other=float("nan"))])
@example([make_line(ts="0000-01-01T00:00:00.000000Z"), make_line(ts="2026-11-20T24:00:00.000000Z")])
@example([make_line()[:-1] + b',"event":"gauge"}'])
def test_agrees_with_reference(content: list[bytes]) -> None:
    """Each line is an event, damaged or blank, as if it were alone, with and without a line feed at the end."""
    stripped = [line.strip(b"\x1e \t\r") for line in content]
    expected = [event for line in stripped if line and (event := parse_reference_line(line)) is not None]
    damaged = sum(bool(line) for line in stripped) - len(expected)
    for end in (b"", b"\n"):
        parsed = parse_lines(b"\n".join(content) + end)
        assert describe_all(parsed) == sorted(map(describe, expected))
        assert [row["seq"] for row in parsed.events.to_pylist()] == [event["seq"] for event in expected]
        assert len(parsed.damaged) == damaged
        assert all(cause in QUARANTINE_CAUSES for cause, _ in parsed.damaged)
        assert all(len(text) <= MAX_QUARANTINED_CHARS for _, text in parsed.damaged)
