"""Log lines as bytes: the constant part of an event is made once, its fields each time."""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson

from mediatord.eventlog.events import SCHEMA_VERSION, Level

LONGEST_LINE = 4096


def line_head(event: str, level: Level, *, node: str, boot: str, epoch: int) -> bytes:
    """The beginning of every line of this event, with places (`%`) for the time and the number."""
    fixed = {"node": node, "boot": boot, "event": event, "level": level, "epoch": epoch}
    tail = json.dumps(fixed, separators=(",", ":"))[1:-1].replace("%", "%%")
    return b'{"v":%d,"ts":"%%b","seq":%%d,%b' % (SCHEMA_VERSION, tail.encode())


def log_line(head: bytes, fields: Mapping[str, object]) -> bytes:
    """A line of at most 4096 bytes, in ASCII; texts are cut where that is needed."""
    if not fields:
        return head + b"}\n"
    try:
        whole = b"%b,%b" % (head, orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)[1:])
        if len(whole) <= LONGEST_LINE and whole.isascii():
            return whole
    except orjson.JSONEncodeError:  # half of a surrogate pair, or a number beyond 64 bits
        pass
    return _careful_line(head, fields)


def _careful_line(head: bytes, fields: Mapping[str, object]) -> bytes:
    """As :func:`log_line`, in ASCII, with texts cut until the line is short enough."""
    whole = b""
    for longest in (1000, 200, 20):
        cut = {
            name: value.encode("utf-8", "replace").decode()[:longest] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        whole = head + b"," + json.dumps(cut, separators=(",", ":")).encode()[1:] + b"\n"
        if len(whole) <= LONGEST_LINE:
            break
    return whole
