"""
Many rows in one step.

SQLite gives the interpreter's lock back at every step of a statement, and has it again when a busy reactor lets it:
a row at a time would take as long as the reactor has other things to do. So rows are inserted by the statement and
read as one row of JSON, and statements are worded in few ways, because SQLite remembers those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from sqlite3 import Connection
from typing import Any, TypeVar

from mediatord.errors import PayloadTooLarge
from mediatord.protocol.encoding import loads
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, PageRequest, ResultPage

T = TypeVar("T")

ROWS_PER_STATEMENT = 64
VALUES_PER_STATEMENT = 512
BYTES_PER_READ = 4_194_304
# More than SQLite can count, and nothing is ever that far away.
_MAX_INTEGER = (1 << 63) - 1


def insert_rows(connection: Connection, into: str, rows: Sequence[tuple[Any, ...]], then: str = "") -> int:
    """
    Insert rows, given the statement up to `VALUES` and what follows them; the number of rows that were changed.

    `INSERT OR ROLLBACK` spares SQLite from copying every page first, in case a row cannot be inserted.
    """
    changed = 0
    for some in split_chunks(rows, ROWS_PER_STATEMENT):
        statement = f"{into} VALUES {format_values(len(some), len(some[0]))} {then}"
        changed += connection.execute(statement, [value for row in some for value in row]).rowcount
    return changed


def insert_numbered_rows(connection: Connection, into: str, rows: Sequence[tuple[Any, ...]]) -> range:
    """Insert rows into a table that numbers them, and say their numbers: each the next after the last there is."""
    last: int | None = 0
    for some in split_chunks(rows, ROWS_PER_STATEMENT):
        statement = f"{into} VALUES {format_values(len(some), len(some[0]))}"
        last = connection.execute(statement, [value for row in some for value in row]).lastrowid
    assert last is not None
    return range(last - len(rows) + 1, last + 1)


def execute_in(connection: Connection, statement: str, values: Sequence[Any], *others: Any) -> None:
    """Carry out a statement with `{}` for the values of an `IN`, and other parameters before that."""
    for some in split_chunks(values, VALUES_PER_STATEMENT):
        connection.execute(
            statement.format(format_placeholders(_get_padded_length(len(some)))), (*others, *_pad(some))
        )


def select_rows(connection: Connection, columns: str, source: str, parameters: Sequence[Any] = ()) -> list[list[Any]]:
    """
    All rows of a query, given its columns, whole numbers and texts, and what follows those.

    They come in the order of a subquery after `FROM`, if that has one.
    """
    query = f"SELECT CAST(json_group_array(json_array({columns})) AS BLOB) {source}"
    ((text,),) = connection.execute(query, parameters).fetchall()
    rows: list[list[Any]] = loads(text)
    return rows


def select_rows_in(
    connection: Connection, columns: str, source: str, values: Sequence[Any], *others: Any
) -> list[list[Any]]:
    """As :func:`gather`, with `{}` for the values of an `IN`, each of them once, and other parameters before that."""
    rows: list[list[Any]] = []
    for some in split_chunks(values, VALUES_PER_STATEMENT):
        rows += select_rows(
            connection,
            columns,
            source.format(format_placeholders(_get_padded_length(len(some)))),
            (*others, *_pad(some)),
        )
    return rows


def select_exact_in(connection: Connection, query: str, values: Sequence[Any], *others: Any) -> list[tuple[Any, ...]]:
    """A few rows as they are, for numbers that JSON would round; as :func:`select_rows_in`."""
    rows: list[tuple[Any, ...]] = []
    for some in split_chunks(values, VALUES_PER_STATEMENT):
        rows += connection.execute(
            query.format(format_placeholders(_get_padded_length(len(some)))), (*others, *_pad(some))
        )
    return rows


def read_texts(
    connection: Connection, table: str, column: str, sizes: dict[int, int], largest: int = MAX_PAGE_BYTES
) -> dict[int, str]:
    """
    Long texts of rows, by their numbers: one after another, which costs less than JSON.

    :param sizes: bytes of each.
    :param largest: how much they may be.
    :raise PayloadTooLarge: together they are more.
    """
    if sum(sizes.values()) > largest:
        raise PayloadTooLarge()
    texts: dict[int, str] = {}
    for some in _split_by_size(sizes):
        marks = format_placeholders(_get_padded_length(len(some)))
        query = (
            f"SELECT group_concat(seq), CAST(group_concat({column}, '') AS BLOB) FROM {table} WHERE seq IN ({marks})"
        )
        ((seqs, joined),) = connection.execute(query, _pad(some)).fetchall()
        start = 0
        for seq in map(int, seqs.split(",")):
            end = start + sizes[seq]
            texts[seq] = joined[start:end].decode()
            start = end
    return texts


def split_chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """So many at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


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
    """Parameters for `LIMIT ? OFFSET ?`, however large they were asked for."""
    return min(part.limit, _MAX_INTEGER), min(part.offset, _MAX_INTEGER)


def make_empty_page() -> ResultPage[Any]:
    """What is found of somebody who has nothing here."""
    return ResultPage((), 0)


def hash_did(did: str) -> bytes:
    """What stands for a DID in an index."""
    return blake2b(did.encode(), digest_size=16).digest()


def get_utf8_size(*texts: str) -> int:
    """Bytes as UTF-8."""
    return sum([len(text) if text.isascii() else len(text.encode()) for text in texts])


def _get_padded_length(number: int) -> int:
    """The next power of two, so that there are few different statements."""
    return 1 << (number - 1).bit_length()


def _pad(values: Sequence[Any]) -> list[Any]:
    """Values, of which the last is repeated up to the width; in a set it counts once."""
    return [*values, *[values[-1]] * (_get_padded_length(len(values)) - len(values))]


def _split_by_size(sizes: dict[int, int]) -> Iterator[list[int]]:
    """Numbers whose texts are read together: not too many, and not too large unless it is a single one."""
    batch: list[int] = []
    size = 0
    for number, more in sizes.items():
        if batch and (len(batch) == VALUES_PER_STATEMENT or size + more > BYTES_PER_READ):
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += more
    if batch:
        yield batch
