"""Bringing an archive into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mediatord.transfer.archive import Archive, Tell, silent
from mediatord.transfer.errors import TransferError
from mediatord.transfer.records import KINDS, Counts
from mediatord.transfer.stores import Target

T = TypeVar("T")

# What is written at a time.
_RECORDS, _BYTES = 500, 4_194_304


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    :param archive: records by kind.
    :param store: the same, counted in the store.
    """

    archive: Counts
    store: Counts

    @property
    def is_equal(self) -> bool:
        return self.archive == self.store


class CountsDiffer(TransferError):
    """A store does not have what was in the archive."""

    def __init__(self, comparison: Comparison) -> None:
        wrong = [
            f"{number} {KINDS[kind]} instead of {comparison.archive[kind]}"
            for kind, number in comparison.store.items()
            if number != comparison.archive[kind]
        ]
        super().__init__(f"the store has {', '.join(wrong)}; it was left unfinished, and no daemon will use it")
        self.comparison = comparison


def import_archive(
    archive: Archive, target: Target, tell: Tell = silent, prepared: Callable[[], None] = lambda: None
) -> Comparison:
    """
    Write all records of an archive, or those that an interrupted import of it has not written, and count.

    :param tell: told how many of its records are there.
    :param prepared: called when all are, before daemons may use the store.
    :raise CountsDiffer: what is there then is not what was in the archive.
    :raise TransferError: it cannot be imported; said before anything is written, unless the archive contradicts
        itself or the store fails.
    """
    done = target.begin(archive.id)
    if done > archive.total:
        raise TransferError(f"{done} records of {archive.total} were imported: it is not the same archive")
    tell(done)
    for some in _batches(archive.records(done)):
        target.write(done + 1, some)
        done += len(some)
        tell(done)
    comparison = Comparison(dict(archive.counts), target.counts())
    if not comparison.is_equal:
        raise CountsDiffer(comparison)
    prepared()
    target.finish()
    return comparison


def _batches(items: Iterable[tuple[T, int]]) -> Iterator[list[T]]:
    """Items with their bytes: not too many at a time, nor too large unless it is a single one."""
    batch: list[T] = []
    size = 0
    for item, more in items:
        if batch and (len(batch) == _RECORDS or size + more > _BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch
