"""
`make mutation`: queue, limits and envelopes are changed in a thousand ways, one at a time, and the tests that come by
the change have to fail.

It is done by mutmut, to a copy in var/mutation. A change that no test notices survives; the score is the part of all
changes that did not. Changes that make no difference are counted like all others; the texts of errors are left alone.
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

_UNNOTICED = (0, 5, 33, None)
_SKIPPED = 34


@dataclass(frozen=True, slots=True)
class MutationGroup:
    """
    What is changed, and what has to notice.

    :param sources: modules, from `mediatord/`.
    :param tests: files or directories, from `tests/`.
    :param without: tests that are left out, as pytest wants it said: those that count calls, as they would fail of
        what makes the changes, and those that take seconds.
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

# What is remembered from before a change would hide it: each is tried by a process that has run no test. And no line
# is changed that raises: texts of errors are for people, or for nobody where they would tell a stranger something.
# What runs while modules are imported ran before the change: of that, survivors say nothing until each was tried by a
# process of its own, begun in the copy with MUTANT_UNDER_TEST. What does not end is cut off after three times what
# its tests took before, and some seconds.
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
    """How many changes there were, by module, and which of them nobody noticed."""

    changes: Counter[str]
    survivors: dict[str, list[str]]

    def part(self, module: str | None = None) -> float:
        """That was noticed of the changes to a module, or to all."""
        changes = self.changes.total() if module is None else self.changes[module]
        survivors = sum(map(len, self.survivors.values())) if module is None else len(self.survivors[module])
        return 1 - survivors / changes if changes else 0.0


def measure(name: str, processes: int, only: str) -> MutationScore:
    """
    :param only: changes whose names are like this, as a shell has it.
    :raise RuntimeError: the tests fail before anything is changed, or mutmut does.
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
    if ended.returncode or not score.changes:
        raise RuntimeError(f"mutmut could not be run; {log.name} says why")
    return score


def _copy(copy: Path) -> None:
    """What belongs to the project, also what is not committed yet."""
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
            survivors[module] = [key for key, code in counted.items() if code in _UNNOTICED]
    return MutationScore(changes, survivors)


def report(name: str, score: MutationScore, out: TextIO) -> None:
    """A line for each module, and one for all of them."""
    for module in score.changes:
        out.write(f"{name:<9} {module:<34} {score.changes[module]:5} changes  {score.part(module):7.1%}\n")
    out.write(f"{name:<9} {'all':<34} {score.changes.total():5} changes  {score.part():7.1%}\n")


def main(arguments: Sequence[str]) -> int:
    """:return: 1 if a group has less than the goal."""
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
        enough = enough and score.part() >= GOAL
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
