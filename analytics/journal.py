"""
Moving what a run has staged to where it is published: all of it or nothing, whenever the process is killed.

A journal is written first, whole or not at all: from then on the moves are decided. Each can be done again from where
it was left, so whoever starts next brings it to its end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from analytics.files import Files

NAME = "_journal.json"
STAGING = "_staging"


@dataclass(frozen=True, slots=True)
class Move:
    """
    A directory to be replaced. Paths are relative to the directory of results.

    :param target: what is replaced.
    :param staged: by what; empty: by nothing.
    :param files: how many files `staged` has.
    """

    target: str
    staged: str = ""
    files: int = 0


def commit(files: Files, out: str, moves: Sequence[Move], manifest_path: str, manifest: bytes) -> None:
    """Do all moves and write the manifest."""
    said = {
        "moves": [asdict(move) for move in moves],
        "manifest_path": manifest_path,
        "manifest": manifest.decode(),
    }
    files.write(f"{out}/{NAME}", json.dumps(said).encode())
    recover(files, out)


def stands(files: Files, out: str) -> bool:
    """Whether there is something decided and not done yet."""
    return files.exists(f"{out}/{NAME}")


def recover(files: Files, out: str) -> bool:
    """
    Bring to its end what was decided and drop what was not. To be called under the lock only.

    :return: whether there was a journal.
    """
    decided = stands(files, out)
    if decided:
        said = json.loads(files.read(f"{out}/{NAME}"))
        for move in said["moves"]:
            _replace(files, out, Move(**move))
        files.write(said["manifest_path"], said["manifest"].encode())
        files.delete(f"{out}/{NAME}")
    files.delete(f"{out}/{STAGING}")
    return decided


def _replace(files: Files, out: str, move: Move) -> None:
    target, staged = f"{out}/{move.target}", f"{out}/{move.staged}"
    if not move.staged:
        files.delete(target)
        return
    left = files.list(staged) if files.exists(staged) else []
    if len(left) == move.files:
        files.delete(target)
        files.move(staged, target)
        return
    # An object store moves file by file: those that are not here any longer have arrived.
    for file in left:
        arrived = target + file.path.partition(move.staged)[2]
        files.delete(arrived)
        files.move(file.path, arrived)
