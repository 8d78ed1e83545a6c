"""
What all openers of envelopes have in common; runs in the environment of any of them, which may lack mediatord.

A driver is told the path of a job, ``{"key": {"did", "kid", "jwk", "multikey"}, "envelopes": {SIZE: [envelope, …]}}``
and says ``{"versions": {package: version}}``. It then answers line by line:

* ``check SIZE``: opens each envelope of that size once and says a list of pairs: `next`, and the tag of the envelope
  that is forwarded;
* ``run SIZE SECONDS``: opens them over and over for so long and says ``{"opened": count, "cpu_seconds": seconds}``,
  where CPU time is that of the whole process.

To open is to come from the envelope as it was posted to what a mediator stores: `next`, and the forwarded envelope as
text or bytes.
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

# Between two looks at the clock.
BATCH = 20


def serve(
    prepare: Callable[[dict[str, Any]], OpenAll], packages: Sequence[str], given: Callable[[str], Any] = str
) -> None:
    """
    Do as told on standard input until it ends.

    :param prepare: is given the key of the job, and gives what opens envelopes in order.
    :param packages: whose versions matter.
    :param given: makes of an envelope what the opener likes best: text, or bytes.
    """
    job = json.loads(Path(sys.stdin.readline().strip()).read_text("utf-8"))
    open_all = prepare(job["key"])
    envelopes = {size: [given(one) for one in listed] for size, listed in job["envelopes"].items()}
    _say({"versions": {name: version(name) for name in packages}})
    for line in sys.stdin:
        command, size, *arguments = line.split()
        if command == "check":
            _say([(next_, json.loads(payload)["tag"]) for next_, payload in open_all(envelopes[size])])
        else:
            _say(run(open_all, envelopes[size], float(*arguments)))


def run(open_all: OpenAll, envelopes: Sequence[Any], seconds: float) -> dict[str, float]:
    """Open for so many seconds by the clock."""
    waiting, opened = cycle(envelopes), 0
    begun, cpu = perf_counter(), process_time()
    while perf_counter() - begun < seconds:
        opened += len(open_all(islice(waiting, BATCH)))
    return {"opened": opened, "cpu_seconds": process_time() - cpu}


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
