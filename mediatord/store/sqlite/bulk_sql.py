"""
Statements on many rows.

SQLite releases the interpreter's lock at every step of a statement, and gets it back when a busy reactor lets go of
it: reading one row at a time would take as long as the reactor has other things to do. So many rows are inserted by
one statement, and read as one row of JSON. Statements come in few wordings, because SQLite caches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from sqlite3 import Connection
from typing import Any, TypeVar

from mediatord.errors import PayloadTooLarge
from mediatord.protocol.encoding import loads
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, PageRequest, ResultPage

T = TypeVar("T")

ROWS_PER_STATEMENT = 64
VALUES_PER_STATEMENT = 512
BYTES_PER_READ = 4_194_304
# The greatest number that SQLite takes.
_MAX_INTEGER = (1 << 63) - 1


def insert_rows(connection: Connection, into: str, rows: Sequence[tuple[Any, ...]], then: str = "") -> int:
    """
    Insert rows, given the statement up to `VALUES` and what follows them; the number of rows that were changed.

    `INSERT OR ROLLBACK` spares SQLite from copying every page first, in case a row cannot be inserted.
    """
    changed = 0
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        some = rows[start : start + ROWS_PER_STATEMENT]
        statement = f"{into} VALUES {format_values(len(some), len(some[0]))} {then}"
        changed += connection.execute(statement, list(chain.from_iterable(some))).rowcount
    return changed


def insert_numbered_rows(connection: Connection, into: str, rows: Sequence[tuple[Any, ...]]) -> range:
    """Insert rows into a table that numbers them; returns their numbers, which follow one another."""
    last: int | None = 0
    for some in split_chunks(rows, ROWS_PER_STATEMENT):
        statement = f"{into} VALUES {format_values(len(some), len(some[0]))}"
        last = connection.execute(statement, list(chain.from_iterable(some))).lastrowid
    assert last is not None
    return range(last - len(rows) + 1, last + 1)


def execute_in(connection: Connection, statement: str, values: Sequence[Any], *others: Any) -> None:
    """Execute a statement with `{}` for the values of an `IN`, and other parameters before those."""
    for start in range(0, len(values), VALUES_PER_STATEMENT):
        marks, padded = _bind_in(values[start : start + VALUES_PER_STATEMENT])
        connection.execute(statement.format(marks), (*others, *padded))


def select_rows(connection: Connection, columns: str, source: str, parameters: Sequence[Any] = ()) -> list[list[Any]]:
    """
    Rows of a query, given its columns, which are integers and texts, and everything from `FROM` on.

    They come in the order of a subquery after `FROM`, if that has one.
    """
    query = f"SELECT CAST(json_group_array(json_array({columns})) AS BLOB) {source}"
    ((text,),) = connection.execute(query, parameters).fetchall()
    rows: list[list[Any]] = loads(text)
    return rows


def select_rows_in(
    connection: Connection, columns: str, source: str, values: Sequence[Any], *others: Any
) -> list[list[Any]]:
    """As :func:`select_rows`, with `{}` for the distinct values of an `IN`, and other parameters before those."""
    rows: list[list[Any]] = []
    for start in range(0, len(values), VALUES_PER_STATEMENT):
        marks, padded = _bind_in(values[start : start + VALUES_PER_STATEMENT])
        rows += select_rows(connection, columns, source.format(marks), (*others, *padded))
    return rows


def select_exact_in(connection: Connection, query: str, values: Sequence[Any], *others: Any) -> list[tuple[Any, ...]]:
    """As :func:`select_rows_in`, a row at a time, for a few rows with numbers that JSON would round."""
    rows: list[tuple[Any, ...]] = []
    for some in split_chunks(values, VALUES_PER_STATEMENT):
        marks, padded = _bind_in(some)
        rows += connection.execute(query.format(marks), (*others, *padded))
    return rows


def read_texts(
    connection: Connection, table: str, column: str, sizes: dict[int, int], largest: int = MAX_PAGE_BYTES
) -> dict[int, str]:
    """
    Long texts of rows, by the numbers of those, concatenated, which costs less than JSON.

    :param sizes: bytes of each.
    :param largest: bytes that all may have.
    :raise PayloadTooLarge: together they have more.
    """
    if sum(sizes.values()) > largest:
        raise PayloadTooLarge()
    texts: dict[int, str] = {}
    for some in _split_by_size(sizes):
        marks, padded = _bind_in(some)
        query = (
            f"SELECT group_concat(seq), CAST(group_concat({column}, '') AS BLOB) FROM {table} WHERE seq IN ({marks})"
        )
        ((seqs, joined),) = connection.execute(query, padded).fetchall()
        start = 0
        for seq in map(int, seqs.split(",")):
            end = start + sizes[seq]
            texts[seq] = joined[start:end].decode()
            start = end
    return texts


def split_chunks(items: Sequence[T], size: int) -> Sequence[Sequence[T]]:
    """Slices of at most `size` items."""
    if len(items) <= size:
        return (items,) if items else ()
    return [items[start : start + size] for start in range(0, len(items), size)]


@lru_cache(maxsize=1024)
def format_placeholders(number: int) -> str:
    """Question marks for an `IN`."""
    return ",".join("?" * number)


@lru_cache(maxsize=1024)
def format_values(number: int, columns: int) -> str:
    """Rows of a `VALUES`."""
    return ",".join([f"({format_placeholders(columns)})"] * number)


@lru_cache(maxsize=1024)
def format_numbered_values(number: int, columns: int) -> str:
    """Rows of a `VALUES` whose first column is their number, followed by parameters."""
    return ",".join(f"({row},{format_placeholders(columns)})" for row in range(number))


def get_limit_parameters(part: PageRequest) -> tuple[int, int]:
    """Parameters for `LIMIT ? OFFSET ?`, reduced to what SQLite takes."""
    return min(part.limit, _MAX_INTEGER), min(part.offset, _MAX_INTEGER)


def make_empty_page() -> ResultPage[Any]:
    """The page of a DID for which nothing is kept."""
    return ResultPage((), 0)


def hash_did(did: str) -> bytes:
    """Hash that stands for a DID in indexes."""
    return blake2b(did.encode(), digest_size=16).digest()


def get_digest_head(digest: bytes) -> int:
    """Integer that stands for the digest of a message in an index."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _bind_in(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """
    Placeholders and parameters for an `IN`, of which the last is repeated up to a power of two: in a set it counts
    once, and there are few different statements.
    """
    width = 1 << (len(values) - 1).bit_length()
    return format_placeholders(width), [*values, *[values[-1]] * (width - len(values))]


def _split_by_size(sizes: dict[int, int]) -> list[list[int]]:
    """Numbers of texts that are read together: within the limits, or a single one."""
    batches: list[list[int]] = []
    room = 0
    for number, size in sizes.items():
        if not batches or size > room or len(batches[-1]) == VALUES_PER_STATEMENT:
            batches.append([])
            room = BYTES_PER_READ
        batches[-1].append(number)
        room -= size
    return batches
