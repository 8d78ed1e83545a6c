"""Corpora: a directory per target, a file per input, named by its digest."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha1
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
CRASHES = HERE / "crashes"


def corpus_files(name: str) -> list[Path]:
    """The files of a target, sorted."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())


def write(directory: Path, inputs: Iterable[bytes]) -> None:
    """Write one file per input, named as by libFuzzer."""
    directory.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (directory / sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
