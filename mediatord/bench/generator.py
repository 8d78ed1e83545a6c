"""
The load generator, as a process of its own.

It speaks by lines: it reads a job as JSON, says `ready` when all connections are open, starts at the next line, and
ends with a JSON result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from mediatord.bench.load import Job, Line, Outcome, Posting, connect, requests_of
from mediatord.bench.schedule import Punctual


def run(job: Job) -> Outcome:
    """Open the connections, wait for the word, and post until the job is done."""
    requests = requests_of(job)
    lines = {line.fileno(): line for line in (Line(connect(job.host, job.port)) for _ in range(job.connections))}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    try:
        return (Punctual if job.rate else Posting)(job, lines, requests).run()
    finally:
        for line in lines.values():
            line.close()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(run(Job(**json.loads(sys.stdin.readline()))))) + "\n")
