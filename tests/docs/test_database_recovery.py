"""docs/how-to/back-up-and-restore.md: its commands recover the readable rows of a damaged SQLite database."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.sqlite import v1_connections
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.database_file import check_integrity, open_database
from tests.docs.console_blocks import PROJECT, read_blocks

PAGE = PROJECT / "docs/how-to/back-up-and-restore.md"
ACCOUNTS = 1000
CONNECTION = V1Connection("did:key:z6MkWallet", "did:key:z6MkOwn", "request")
PAGE_BYTES = 4096
INTERIOR_PAGE = 5


def create_damaged_database(path: Path) -> None:
    """A database of accounts, one of whose pages is overwritten."""
    open_database(path, None).close()
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN")
        rows = ((f"did:example:{number:0300}", number.to_bytes(16, "big")) for number in range(ACCOUNTS))
        connection.executemany("INSERT INTO account (did, did_key, created_at) VALUES (?, ?, 1.0)", rows)
        v1_connections.put_connection(connection, 1.0, CONNECTION, 1)
        connection.commit()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'account'").fetchone()
    content = bytearray(path.read_bytes())
    # Each cell of an interior page begins with the number of a page below it.
    interior = content[(root - 1) * PAGE_BYTES : root * PAGE_BYTES]
    assert interior[0] == INTERIOR_PAGE
    cell = int.from_bytes(interior[12:14], "big")
    leaf = int.from_bytes(interior[cell : cell + 4], "big")
    content[(leaf - 1) * PAGE_BYTES : leaf * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    path.write_bytes(content)


def problems(path: Path) -> list[str]:
    """What `mediatord store check --deep` finds."""
    with closing(sqlite3.connect(path)) as connection:
        return check_integrity(connection)


@pytest.mark.system
@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs sqlite3: apt-get install sqlite3")
def test_readable_rows_are_recovered(tmp_path: Path) -> None:
    """All but those on the damaged page, into a database that the daemon accepts."""
    create_damaged_database(tmp_path / "mediator.sqlite3")
    assert problems(tmp_path / "mediator.sqlite3") != []
    (block,) = (block for block in read_blocks(PAGE) if block.why_not_run == "needs a damaged database")

    script = "\n".join(step.command for step in block.steps())
    completed = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert completed.returncode == 0, completed.stderr
    assert ACCOUNTS * 0.9 < int(completed.stdout) < ACCOUNTS
    recovered = tmp_path / "recovered.sqlite3"
    assert problems(recovered) == []
    with closing(open_database(recovered, None, create=False)) as connection:
        # It has a derived column, which the commands must not write.
        found = v1_connections.find_connection(connection, CONNECTION.own_key)
    assert found == replace(CONNECTION, created_at=1.0)
