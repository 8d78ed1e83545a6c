"""
Common part of the openers; runs in the environment of each, which may lack mediatord.

A driver reads the path of a job, ``{"key": {"did", "kid", "jwk", "multikey"}, "envelopes": {SIZE: [envelope, …]}}``
and writes ``{"versions": {package: version}}``. It then answers commands, one per line:

* ``check SIZE``: opens each envelope of that size once and writes a list of pairs: `next`, and the tag of the
  forwarded envelope;
* ``run SIZE SECONDS``: opens them repeatedly for that time and writes ``{"opened": count, "cpu_seconds": seconds}``,
  with the CPU time of the whole process.

Opening turns an envelope as posted into what a mediator stores: `next`, and the forwarded envelope as text or bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

Opened = tuple[str, str | bytes]
OpenAll = Callable[[Iterable[Any]], list[Opened]]

# Envelopes between two readings of the clock.
BATCH = 20


def serve(
    prepare: Callable[[dict[str, Any]], OpenAll], packages: Sequence[str], convert: Callable[[str], Any] = str
) -> None:
    """
    Answer commands on standard input until it ends.

    :param prepare: takes the key of the job; returns a function that opens envelopes in order.
    :param packages: packages whose versions are reported.
    :param convert: converts an envelope to what the opener prefers: text, or bytes.
    """
    job = json.loads(Path(sys.stdin.readline().strip()).read_text("utf-8"))
    open_all = prepare(job["key"])
    envelopes = {size: [convert(envelope) for envelope in listed] for size, listed in job["envelopes"].items()}
    _write({"versions": {name: version(name) for name in packages}})
    for line in sys.stdin:
        command, size, *arguments = line.split()
        if command == "check":
            _write([(next_, json.loads(payload)["tag"]) for next_, payload in open_all(envelopes[size])])
        else:
            _write(run(open_all, envelopes[size], float(*arguments)))


def run(open_all: OpenAll, envelopes: Sequence[Any], seconds: float) -> dict[str, float]:
    """Open for this time."""
    remaining, opened = cycle(envelopes), 0
    start, cpu = perf_counter(), process_time()
    while perf_counter() - start < seconds:
        opened += len(open_all(islice(remaining, BATCH)))
    return {"opened": opened, "cpu_seconds": process_time() - cpu}


def _write(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
