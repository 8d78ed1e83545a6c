"""Counters computed from the lines of the event log, independently of the daemon."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

NAMES = (
    "forwarded",
    "stored",
    "delivered",
    "expired",
    "evicted",
    "requests_accepted",
    "requests_rejected",
    "requests_failed",
    "connections",
)


def read_segments(directory: Path) -> dict[str, list[bytes]]:
    """
    Read the lines of every segment by file name, the open one included; compressed ones are decompressed.

    Segments may be closed or compressed meanwhile, compressed also after the daemon has stopped.
    """
    while True:
        listed = _list_segments(directory)
        with contextlib.suppress(FileNotFoundError):
            found = _read_files(listed)
            if _list_segments(directory) == listed:
                return found


def _list_segments(directory: Path) -> list[Path]:
    """Complete files; if a segment exists twice, the compressed one."""
    names = {path.name for path in directory.glob("events*.jsonl*")}
    return [directory / name for name in sorted(names) if not name.endswith(".tmp") and f"{name}.gz" not in names]


def _read_files(paths: Iterable[Path]) -> dict[str, list[bytes]]:
    found = {}
    for path in paths:
        content = path.read_bytes()
        found[path.name] = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines(keepends=True)
    return found


def read_lines(directory: Path) -> list[Line]:
    """All lines by boot and sequence number; each must be whole."""
    lines = [json.loads(line) for lines in read_segments(directory).values() for line in lines]
    return sorted(lines, key=lambda line: (line["boot"], line["seq"]))


def expected_counters(lines: Iterable[Line]) -> dict[str, int]:
    """Counters of a process after these lines."""
    counts = Counter(name for line in lines for name in _counts(line))
    counts["connections"] -= counts.pop("closed", 0)
    return {name: counts[name] for name in NAMES}


def _counts(line: Line) -> list[str]:
    event = line["event"]
    if event == "req.done":
        if line["status"] >= 500:
            return ["requests_failed"]
        return ["requests_rejected" if "code" in line else "requests_accepted"]
    if event == "msg.accept":
        return ["forwarded", "stored"] if line["method"] == "queue" else ["forwarded"]
    if event == "msg.push":
        return [] if line["ok"] else ["stored"]
    named = {
        "msg.ack": "delivered",
        "msg.expire": "expired",
        "msg.evict": "evicted",
        "conn.open": "connections",
        "conn.close": "closed",
    }
    return [named[event]] if event in named else []


def wrong_counter_lines(lines: Iterable[Line]) -> list[tuple[int, dict[str, int], dict[str, int]]]:
    """
    The `counters` lines that do not match the lines of their boot before them: number, logged value, computed value.

    :param lines: of one or several boots, each from its first line on, in order.
    """
    wrong = []
    before: dict[str, list[Line]] = {}
    for line in lines:
        mine = before.setdefault(line["boot"], [])
        if line["event"] == "counters":
            logged, computed = {name: line[name] for name in NAMES}, expected_counters(mine)
            if logged != computed:
                wrong.append((line["seq"], logged, computed))
        mine.append(line)
    return wrong
