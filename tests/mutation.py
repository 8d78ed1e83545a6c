"""
`make mutation`: mutation tests of queues, limits and envelopes with mutmut, on a copy in var/mutation.

A mutant that no test detects survives; the score is the share of detected mutants. Equivalent mutants are counted
like all others; error texts are not mutated.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
WORK = ROOT / "var" / "mutation"
GOAL = 0.85

_SURVIVED = (0, 5, 33, None)
_SKIPPED = 34


@dataclass(frozen=True, slots=True)
class MutationGroup:
    """
    Modules to mutate, and the tests that must detect it.

    :param sources: modules, from `mediatord/`.
    :param tests: files or directories, from `tests/`.
    :param without: pytest expression of tests to leave out: those that count calls, as mutmut adds calls, and slow
        ones.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    without: str = "calls"


GROUPS = {
    "envelope": MutationGroup(
        tuple(f"protocol/didcomm/{name}.py" for name in ("jwe", "jwe_algorithms", "forward")),
        (
            "protocol/didcomm/test_key_agreement.py",
            "protocol/didcomm/test_jwe.py",
            "protocol/didcomm/test_fast_forward_parser.py",
            "protocol/didcomm/test_published_vectors.py",
        ),
        "calls or test_any",
    ),
    "limits": MutationGroup(
        (
            "ratelimit/rate_limiter.py",
            "ratelimit/distributed_limiter.py",
            "store/disk_space.py",
        ),
        (
            "ratelimit/test_sliding_window.py",
            "ratelimit/test_sliding_window_full.py",
            "ratelimit/test_rate_limiter.py",
            "ratelimit/test_rate_limiter_charges.py",
            "ratelimit/test_distributed_limiter.py",
            "ratelimit/test_trusted_peers.py",
            "store/test_disk_space.py",
        ),
        "calls or bytes or storm or Flood or percent",
    ),
    "queue": MutationGroup(
        (
            "store/caches.py",
            "store/fair_share.py",
            "store/sqlite/message_queries.py",
            "store/sqlite/arrival_queries.py",
            "store/sqlite/message_writes.py",
            "store/sqlite/queue_statistics.py",
        ),
        (
            "store/sqlite/test_contract.py",
            "store/sqlite/test_costs.py",
            "store/sqlite/test_ledger.py",
            "store/test_queue_capacity.py",
        ),
        "calls or SQLiteDecentrl or ClusterTests or NonceTests or QuotaTests or KillTests",
    ),
}

# Each mutant runs in a process that has run no test, as caches would hide it. Lines that raise are not mutated:
# error texts are for people, or must not exist where they would inform an attacker.
_SECTION = """
[mutmut]
source_paths = mediatord
process_isolation = forkserver
track_dependencies = false
timeout_constant = 4
timeout_multiplier = 3
do_not_mutate_patterns =
    raise \\w+\\(
only_mutate =
    {sources}
also_copy =
    analytics
    docs
    etc
    twisted
pytest_add_cli_args =
    -p
    no:cacheprovider
    -k
    not ({without})
pytest_add_cli_args_test_selection =
    {tests}
"""


@dataclass(frozen=True, slots=True)
class MutationScore:
    """Number of mutants and the surviving ones, by module."""

    mutants: Counter[str]
    survivors: dict[str, list[str]]

    def score(self, module: str | None = None) -> float:
        """Share of detected mutants of a module, or of all."""
        changes = self.mutants.total() if module is None else self.mutants[module]
        survivors = sum(map(len, self.survivors.values())) if module is None else len(self.survivors[module])
        return 1 - survivors / changes if changes else 0.0


def measure(name: str, processes: int, only: str) -> MutationScore:
    """
    Run mutmut on a group.

    :param only: glob pattern of mutant names.
    :raise RuntimeError: the tests fail without mutation, or mutmut fails.
    """
    group, copy = GROUPS[name], WORK / name
    shutil.rmtree(copy, ignore_errors=True)
    _copy(copy)
    sources = "\n    ".join(f"mediatord/{source}" for source in group.sources)
    tests = "\n    ".join(f"tests/{test}" for test in group.tests)
    with (copy / "setup.cfg").open("a", encoding="utf-8") as file:
        file.write(_SECTION.format(sources=sources, tests=tests, without=group.without))
    with (copy / "mutmut.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(processes), only]
        ended = subprocess.run(command, cwd=copy, stdout=log, stderr=subprocess.STDOUT, check=False)
    score = _read(copy / "mutants" / "mediatord", only)
    if ended.returncode or not score.mutants:
        raise RuntimeError(f"mutmut could not be run; {log.name} says why")
    return score


def _copy(copy: Path) -> None:
    """Copy the project, including uncommitted files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _read(directory: Path, only: str) -> MutationScore:
    changes: Counter[str] = Counter()
    survivors: dict[str, list[str]] = {}
    for path in sorted(directory.rglob("*.py.meta")):
        module = str(path.relative_to(directory)).removesuffix(".meta")
        codes: dict[str, int | None] = json.loads(path.read_text("utf-8"))["exit_code_by_key"]
        if codes:
            counted = {key: code for key, code in codes.items() if code != _SKIPPED and fnmatchcase(key, only)}
            changes[module] = len(counted)
            survivors[module] = [key for key, code in counted.items() if code in _SURVIVED]
    return MutationScore(changes, survivors)


def report(name: str, score: MutationScore, out: TextIO) -> None:
    """Print a line for each module, and one for the total."""
    for module in score.mutants:
        out.write(f"{name:<9} {module:<34} {score.mutants[module]:5} changes  {score.score(module):7.1%}\n")
    out.write(f"{name:<9} {'all':<34} {score.mutants.total():5} changes  {score.score():7.1%}\n")


def main(arguments: Sequence[str]) -> int:
    """Run the groups; return 1 if one misses the goal."""
    parser = ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--group", action="append", choices=sorted(GROUPS), help="may be repeated; all by default")
    parser.add_argument("--processes", type=int, default=2, help="changes that are tried at a time")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="a part of the changes: '*7' is a tenth")
    parser.add_argument("--survivors", action="store_true", help="name the changes that nobody noticed")
    options = parser.parse_args(arguments)
    enough = True
    for name in options.group or GROUPS:
        score = measure(name, options.processes, options.only)
        report(name, score, sys.stdout)
        if options.survivors:
            sys.stdout.writelines(f"  {one}\n" for ones in score.survivors.values() for one in ones)
        enough = enough and score.score() >= GOAL
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
