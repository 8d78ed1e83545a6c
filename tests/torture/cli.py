"""
Injects random faults: ``python -m tests.torture --faults 1000 --seed 7``.

Exit status 1 means that a promise was broken; the output says how to repeat that round.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import SkipTest

from tests.mongod_process import mongod_binary
from tests.torture.connection_storm import run_storm
from tests.torture.faults import KINDS
from tests.torture.round_pool import RoundPool
from tests.torture.rounds import FaultRound, RoundOutcome, failed_round_directory, plan_rounds
from tests.torture.summary import format_summary, summary_rows

KEEP = Path(__file__).parents[2] / "var" / "torture"
# Rounds between progress lines, and lines printed of each error.
_REPORTED = 25
_MESSAGES_PER_SOCKET = 4


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    options = _options(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    if options.kind == ["storm"]:
        return _run_storm(options, seed)
    rounds = _plan(options, seed)
    run = _TortureRun(options, seed, len(rounds))
    print(f"seed {seed}, {len(rounds)} faults")  # noqa: T201  this is a program
    RoundPool(rounds, {"keep": str(options.keep), "syncs": not options.forget_syncs}, run.report).run(options.workers)
    return run.finish()


class _TortureRun:
    """Progress and results of a run."""

    def __init__(self, options: argparse.Namespace, seed: int, faults: int) -> None:
        self._options = options
        self._seed = seed
        self._faults = faults
        self._began = time.monotonic()
        self._outcomes: list[RoundOutcome] = []

    def report(self, outcome: RoundOutcome) -> None:
        """Record and print the outcome of a round."""
        self._outcomes.append(outcome)
        if outcome.complaints:
            _print_progress(f"round {outcome.number}, {outcome.kind} on {outcome.store}, FAILED {outcome.marks}:")
            _print_progress(
                "\n".join(line for error in outcome.complaints for line in error.splitlines()[-_REPORTED:])
            )
            directory = self._options.keep / failed_round_directory(self._seed, outcome.number)
            _print_progress(f"repeat with: {self._repeat_command(outcome)}\nfiles of the round: {directory}")
        elif self._options.verbose:
            _print_progress(json.dumps({name: value for name, value in outcome.values.items() if value}))
        if len(self._outcomes) % _REPORTED == 0:
            failed = sum(bool(error.complaints) for error in self._outcomes)
            _print_progress(
                f"{len(self._outcomes)} of {self._faults}, {failed} failed, {time.monotonic() - self._began:.0f} s"
            )

    def finish(self) -> int:
        """Print the summary; return the exit status."""
        rows = summary_rows(self._outcomes)
        seconds = round(time.monotonic() - self._began, 1)
        print(format_summary(rows))  # noqa: T201
        print(f"seed {self._seed}, {seconds} s with {self._options.workers} workers")  # noqa: T201
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._document(rows, seconds), indent=1), encoding="utf-8")
        return int(any(outcome.complaints for outcome in self._outcomes))

    def _document(self, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        rounds = [
            outcome.values for outcome in sorted(self._outcomes, key=lambda round_outcome: round_outcome.number)
        ]
        return {"seed": self._seed, "seconds": seconds, "summary": rows, "rounds": rounds}

    def _repeat_command(self, outcome: RoundOutcome) -> str:
        parts = [f"--seed {self._seed} --only {outcome.number}"]
        parts += [f"--store {store}" for store in self._options.store]
        parts += [f"--kind {kind}" for kind in self._options.kind]
        return f"python -m tests.torture {' '.join(parts)}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").strip())
    kinds = sorted({kind for store_kinds in KINDS.values() for kind in store_kinds})
    parser.add_argument("--faults", type=int, default=None, metavar="N", help="number of faults (default: 1000)")
    parser.add_argument("--seed", type=int, help="seed of all random choices")
    parser.add_argument(
        "--store", action="append", choices=sorted(KINDS), help="default: sqlite and mongodb; may be repeated"
    )
    parser.add_argument(
        *("--kind", "-k"),
        action="append",
        default=[],
        choices=[*kinds, "storm"],
        help="default: all but storm; may be repeated",
    )
    parser.add_argument("--sockets", type=int, default=5000, help="number of sockets of --kind storm")
    parser.add_argument("--once", action="store_true", help="inject each kind of fault once on each store")
    parser.add_argument("--only", type=int, metavar="ROUND", help="run only this round")
    parser.add_argument("--workers", type=int, default=2, help="rounds to run at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE as JSON")
    parser.add_argument("--keep", type=Path, default=KEEP, help="directory for files of failed rounds")
    parser.add_argument("--verbose", action="store_true", help="print every round")
    parser.add_argument(
        "--forget-syncs", action="store_true", help="ignore syncs of the disk: a power cut must lose messages"
    )
    options = parser.parse_args(arguments)
    options.store = options.store or ["sqlite", *_mongodb_stores()]
    return options


def _mongodb_stores() -> list[str]:
    """The MongoDB store, if there is a server."""
    try:
        mongod_binary()
    except SkipTest as reason:
        _print_progress(f"skipping MongoDB: {reason}")
        return []
    return ["mongodb"]


def _run_storm(options: argparse.Namespace, seed: int) -> int:
    """Run the reconnect storm: one daemon with thousands of sockets."""
    print(f"seed {seed}, {options.sockets} sockets")  # noqa: T201  this is a program
    result = run_storm(options.sockets, _MESSAGES_PER_SOCKET * options.sockets, seed)
    values = {"seed": seed, **asdict(result), "complaints": result.complaints}
    print("\n".join(f"{name:12}{value}" for name, value in values.items()))  # noqa: T201
    if options.json is not None:
        options.json.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return int(bool(result.complaints))


def _plan(options: argparse.Namespace, seed: int) -> list[FaultRound]:
    kind_count = sum(not options.kind or kind in options.kind for store in options.store for kind in KINDS[store])
    faults = kind_count if options.once else options.faults or 1000
    rounds = plan_rounds(seed, options.store, options.kind)
    if options.only is not None:
        return list(islice(rounds, options.only, options.only + 1))
    return list(islice(rounds, faults))


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
