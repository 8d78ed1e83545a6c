"""
`make fuzz`: run every target in turn for a while, and report.

Inputs with new coverage are kept in `var/fuzz/TARGET`, and with `--merge` a minimal set of them in
`tests/fuzz/corpus/TARGET`. Failures are in `tests/fuzz/crashes`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz import corpus
from tests.fuzz.targets import NAMES, target

FOUND = Path("var/fuzz")
# Larger inputs of a merged corpus add no coverage and cost time in each run.
MOST_BYTES = 16_384
# Characters of the end of libFuzzer's output.
_TAIL = 6_000
_DONE = re.compile(r"Done (\d+) runs in (\d+) second")
_COVERED = re.compile(r"\b(INITED|DONE)\s+cov: (\d+) ft: (\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """:return: 1 after a failure, 2 if nothing can be fuzzed."""
    options = _options().parse_args(arguments)
    if options.repeat:
        return _repeat(options.target[0], options.repeat)
    if find_spec("atheris") is None:
        _print("there is no atheris here; it has wheels for CPython 3.11 to 3.13: pip install '.[fuzz]'")
        return 2
    failed = 0
    for name in options.target or NAMES:
        failed |= _merge(name) if options.merge else _fuzz(name, options.seconds, options.more)
    return failed


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Look for inputs that something does not bear.")
    parser.add_argument("--target", action="append", choices=NAMES, help="only this one; may be repeated")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--merge", action="store_true", help="keep the least that leads as far as all that was found")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="try one input of --target; needs no atheris")
    parser.add_argument("more", nargs="*", help="options of libFuzzer, after --")
    return parser


def _repeat(name: str, path: Path) -> int:
    tried = target(name)
    try:
        tried.run(path.read_bytes())
    finally:
        tried.close()
    _print(f"{name}: {path} does no harm")
    return 0


def _fuzz(name: str, seconds: int, more: Sequence[str]) -> int:
    new, seeds = FOUND / name, FOUND / f"{name}-seeds"
    tried = target(name)
    corpus.write(seeds, tried.seeds())
    new.mkdir(parents=True, exist_ok=True)
    corpus.CRASHES.mkdir(exist_ok=True)
    before = set(corpus.CRASHES.iterdir())
    places = [str(new), str(seeds), *(str(corpus.CORPUS / name) for _ in corpus.corpus_files(name)[:1])]
    limits = ["-timeout=20", "-rss_limit_mb=2048", f"-max_len={tried.longest}", "-detect_leaks=0"]
    limits += [f"-max_total_time={seconds}", f"-artifact_prefix={corpus.CRASHES}/{name}-"]
    output = _run_libfuzzer([name, *places, *limits, *more])
    covered = dict(
        (word, f"{lines} edges, {features} features") for word, lines, features in _COVERED.findall(output)
    )
    runs = _DONE.search(output)
    count = runs[1] if runs else "an unknown number of"
    _print(f"{name}: {count} runs, {covered.get('INITED')} -> {covered.get('DONE')}")
    found = sorted(set(corpus.CRASHES.iterdir()) - before)
    for path in found:
        _print(f"{name}: see {path}; again: {sys.executable} -m tests.fuzz --target {name} --repeat {path}")
    if found or runs is None:
        _print(output[max(output.rfind("=== Uncaught"), len(output) - _TAIL) :])
        return 1
    return 0


def _merge(name: str) -> int:
    """Merge into an empty directory, which then replaces the corpus."""
    into, seeds = FOUND / f"{name}-merged", FOUND / f"{name}-seeds"
    _empty(into)
    corpus.write(seeds, target(name).seeds())
    sources = [str(path) for path in (corpus.CORPUS / name, seeds, FOUND / name) if path.is_dir()]
    again = FOUND / f"{name}.sh"
    again.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.fuzz.atheris_process {name} "$@"\n', "utf-8"
    )
    again.chmod(0o755)
    options = ["-merge=1", f"-max_len={MOST_BYTES}", "-detect_leaks=0"]
    output = _run_libfuzzer([name, f"--again={again.absolute()}", *options, str(into), *sources])
    inputs = [path.read_bytes() for path in into.iterdir()]
    if not inputs:
        _print(output[-_TAIL:])
        return 1
    _empty(corpus.CORPUS / name)
    corpus.write(corpus.CORPUS / name, inputs)
    _print(f"{name}: {len(inputs)} inputs of {sum(map(len, inputs))} bytes")
    return 0


def _empty(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()


def _run_libfuzzer(arguments: Sequence[str]) -> str:
    """Run libFuzzer and return its output."""
    command = [sys.executable, "-m", "tests.fuzz.atheris_process", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode("utf-8", "replace")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
