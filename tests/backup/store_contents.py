"""Helpers to write stores and to read directories."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from mediatord.store.sqlite.database_file import open_database


def add_account(path: Path, did: str) -> None:
    """Add an account to a store."""
    with closing(open_database(path, None)) as connection:
        connection.execute("INSERT INTO account (did, created_at) VALUES (?, 1.0)", (did,))


def read_tree(path: Path) -> dict[str, bytes]:
    """Contents of all files in a directory tree."""
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}
