"""The inputs that are kept: a directory a target, a file an input, named after what is in it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha1
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
CRASHES = HERE / "crashes"


def kept(name: str) -> list[Path]:
    """The files of a target, in one order."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())


def write(directory: Path, inputs: Iterable[bytes]) -> None:
    """One file each, with the name that libFuzzer would give it."""
    directory.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (directory / sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
