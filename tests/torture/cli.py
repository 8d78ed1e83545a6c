"""
Faults without number: ``python -m tests.torture --faults 1000 --seed 7``.

Exit status 1 if anything is owed that was promised, and how to play that round again.
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
# Of how many it is said how far it is, and how many lines of what is wrong.
_TOLD = 25
_LETTERS_PER_SOCKET = 4


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    options = _options(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    if options.kind == ["storm"]:
        return _storm(options, seed)
    chosen = _chosen(options, seed)
    run = _TortureRun(options, seed, len(chosen))
    print(f"seed {seed}, {len(chosen)} faults")  # noqa: T201  this is a program
    RoundPool(chosen, {"keep": str(options.keep), "syncs": not options.forget_syncs}, run.tell).run(options.lanes)
    return run.close()


class _TortureRun:
    """What has come of it so far."""

    def __init__(self, options: argparse.Namespace, seed: int, faults: int) -> None:
        self._options = options
        self._seed = seed
        self._faults = faults
        self._began = time.monotonic()
        self._outcomes: list[RoundOutcome] = []

    def tell(self, outcome: RoundOutcome) -> None:
        """One more."""
        self._outcomes.append(outcome)
        if outcome.complaints:
            _say(f"round {outcome.number}, {outcome.kind} on {outcome.store}, FAILED {outcome.marks}:")
            _say("\n".join(line for one in outcome.complaints for line in one.splitlines()[-_TOLD:]))
            left = self._options.keep / failed_round_directory(self._seed, outcome.number)
            _say(f"again: {self._again(outcome)}\nwhat is left of it: {left}")
        elif self._options.verbose:
            _say(json.dumps({name: value for name, value in outcome.values.items() if value}))
        if len(self._outcomes) % _TOLD == 0:
            failed = sum(bool(one.complaints) for one in self._outcomes)
            _say(f"{len(self._outcomes)} of {self._faults}, {failed} failed, {time.monotonic() - self._began:.0f} s")

    def close(self) -> int:
        """The summary; the exit status."""
        found = summary_rows(self._outcomes)
        seconds = round(time.monotonic() - self._began, 1)
        print(format_summary(found))  # noqa: T201
        print(f"seed {self._seed}, {seconds} s with {self._options.lanes} lanes")  # noqa: T201
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._document(found, seconds), indent=1), encoding="utf-8")
        return int(any(outcome.complaints for outcome in self._outcomes))

    def _document(self, found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        rounds = [outcome.values for outcome in sorted(self._outcomes, key=lambda one: one.number)]
        return {"seed": self._seed, "seconds": seconds, "summary": found, "rounds": rounds}

    def _again(self, outcome: RoundOutcome) -> str:
        parts = [f"--seed {self._seed} --only {outcome.number}"]
        parts += [f"--store {store}" for store in self._options.store]
        parts += [f"--kind {kind}" for kind in self._options.kind]
        return f"python -m tests.torture {' '.join(parts)}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").strip())
    kinds = sorted({kind for some in KINDS.values() for kind in some})
    parser.add_argument("--faults", type=int, default=None, metavar="N", help="1000, unless each kind once is enough")
    parser.add_argument("--seed", type=int, help="decides about everything that chance has a part in")
    parser.add_argument("--store", action="append", choices=sorted(KINDS), help="sqlite and mongodb; may be repeated")
    parser.add_argument(
        *("--kind", "-k"),
        action="append",
        default=[],
        choices=[*kinds, "storm"],
        help="all but storm; may be repeated",
    )
    parser.add_argument("--sockets", type=int, default=5000, help="of --kind storm, which is for itself")
    parser.add_argument("--once", action="store_true", help="each kind on each store once")
    parser.add_argument("--only", type=int, metavar="ROUND", help="play this round alone")
    parser.add_argument("--lanes", type=int, default=2, help="rounds that are played at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument("--keep", type=Path, default=KEEP, help="where the remains of failed rounds go")
    parser.add_argument("--verbose", action="store_true", help="tell of every round")
    parser.add_argument(
        "--forget-syncs", action="store_true", help="disks that promise and forget: a power cut must lose messages"
    )
    options = parser.parse_args(arguments)
    options.store = options.store or ["sqlite", *_mongodb()]
    return options


def _mongodb() -> list[str]:
    """If there is a server to run."""
    try:
        mongod_binary()
    except SkipTest as reason:
        _say(f"nothing on MongoDB: {reason}")
        return []
    return ["mongodb"]


def _storm(options: argparse.Namespace, seed: int) -> int:
    """Another thing altogether: one daemon, and more sockets than it has at other times."""
    print(f"seed {seed}, {options.sockets} sockets")  # noqa: T201  this is a program
    stormed = run_storm(options.sockets, _LETTERS_PER_SOCKET * options.sockets, seed)
    found = {"seed": seed, **asdict(stormed), "complaints": stormed.complaints}
    print("\n".join(f"{name:12}{value}" for name, value in found.items()))  # noqa: T201
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(bool(stormed.complaints))


def _chosen(options: argparse.Namespace, seed: int) -> list[FaultRound]:
    pairs = sum(not options.kind or kind in options.kind for store in options.store for kind in KINDS[store])
    faults = pairs if options.once else options.faults or 1000
    rounds = plan_rounds(seed, options.store, options.kind)
    if options.only is not None:
        return list(islice(rounds, options.only, options.only + 1))
    return list(islice(rounds, faults))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
