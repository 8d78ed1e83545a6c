"""
Pseudonyms and k-anonymity of tables.

`private` tables hold identifiers as in the logs, for the jobs alone. For all others:

* Identifiers are replaced by pseudonyms: keyed BLAKE2b-128, as the daemon makes them (`log.dids: keyed`); existing
  pseudonyms stay. The keys are in a local file of the driver and change with the analysed day: see
  :class:`PseudonymKeyFile`. Neither keys nor identifiers are part of a query.
* k-anonymity (`k_anonymity`, default 5; 1 shows everything):

  - A table of individuals with fewer than k of them on a day has one row, `fewer than 5`, with their sums.
  - In `top_senders` and `top_recipients` those with fewer than k partners are merged into a last row, `others`:
    each of a handful of partners would recognise them.
  - Elsewhere a count of individuals from 1 to k - 1 is null, and so are figures that reveal it
    (:func:`analytics.sql_functions.suppress_small_group`). What an operator acts on stays: codes, limits, and how
    often they occurred.
  - Daily counts of all members, active and dormant recipients are not groups and stay.
* Merged rows have sums of counts and bytes, and the earliest of days to a loss; other values are null unless all
  merged rows agree.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from analytics.database import Row
from analytics.errors import AnalyticsError
from analytics.schema import Table
from analytics.settings import Settings
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.runtime.secret_files import SecretFileError, create_secret_file, read_secret_file

FORGOTTEN_PSEUDONYM = "forgotten"
OTHERS_LABEL = "others"

_SECRET_SIZE = 32
_PSEUDONYM_PATTERN = re.compile("[0-9a-f]{32}")
# Written by the daemon for a party without an address.
_UNKNOWN_PARTY = "unknown"

_SUMMED_COLUMNS = {"n", "bytes", "hits", "bursts", "waiting", "per_day", "at_risk"}
_MINIMUM_COLUMNS = {"days_to_cap", "days_to_ttl"}

PseudonymFunction = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class KeyEpoch:
    """
    Days whose pseudonyms are made with one key.

    :param last: included.
    :param secret: None once it was destroyed.
    """

    number: int
    first: date
    last: date
    secret: bytes | None = field(repr=False)


class PseudonymKeyFile:
    """
    The key file: JSON, mode 0600, created at first use.

    Epochs start at multiples of their length, counted from the first day of the calendar, so the epoch of a day does
    not depend on the order of runs; existing epochs stay when the setting changes. Concurrent runs may share the
    file.

    :param days: length of a new epoch.
    """

    def __init__(self, path: Path, days: int) -> None:
        self._path = path
        self._days = days

    def make_pseudonym_function(self, day: date) -> PseudonymFunction:
        """
        Return the function that makes pseudonyms for a day; they are all `forgotten` if the key was destroyed.

        :raise AnalyticsError: the key file is unusable.
        """
        epoch = _find_epoch(self.list_epochs(), day) or self._begin_epoch(day)
        if epoch.secret is None:
            return _skip_pseudonyms(lambda identifier: FORGOTTEN_PSEUDONYM)
        return _skip_pseudonyms(Pseudonymizer("keyed", PseudonymKey(epoch.number, epoch.secret)).did)

    def list_epochs(self) -> list[KeyEpoch]:
        """
        All epochs, by their days.

        :raise AnalyticsError: the key file is unusable.
        """
        if not self._path.exists():
            return []
        try:
            return _parse_epochs(read_secret_file(self._path))
        except SecretFileError as error:
            raise AnalyticsError(str(error)) from None
        except (ValueError, TypeError, KeyError):
            raise AnalyticsError(f"{self._path} is not a file of pseudonym keys: expected JSON with epochs") from None

    def destroy_key(self, number: int) -> None:
        """
        Destroy the key of an epoch; its pseudonyms can no longer be linked to identifiers.

        Copies of the file, in backups or snapshots, must be destroyed as well.

        :raise AnalyticsError: there is no such epoch, or the key file is unusable.
        """
        with self._lock():
            epochs = self.list_epochs()
            if number not in {epoch.number for epoch in epochs}:
                raise AnalyticsError(f"{self._path} has no key epoch {number}")
            with _open_descriptor(self._path) as old:
                self._write([replace(epoch, secret=None) if epoch.number == number else epoch for epoch in epochs])
                _overwrite_with_zeros(old)

    def _begin_epoch(self, day: date) -> KeyEpoch:
        """Begin the epoch of a day."""
        with self._lock():
            epochs = self.list_epochs()
            # Another run may have begun it meanwhile.
            epoch = _find_epoch(epochs, day)
            if epoch is None:
                epoch = self._make_epoch(epochs, day)
                self._write([*epochs, epoch])
            return epoch

    def _make_epoch(self, epochs: Sequence[KeyEpoch], day: date) -> KeyEpoch:
        """An epoch from one multiple to the next, shortened by existing epochs."""
        start = date.fromordinal(day.toordinal() - day.toordinal() % self._days)
        end = start + timedelta(self._days - 1)
        first = max([start, *(epoch.last + timedelta(1) for epoch in epochs if epoch.last < day)])
        last = min([end, *(epoch.first - timedelta(1) for epoch in epochs if epoch.first > day)])
        number = max((epoch.number for epoch in epochs), default=0) + 1
        return KeyEpoch(number, first, last, secrets.token_bytes(_SECRET_SIZE))

    def _write(self, epochs: Iterable[KeyEpoch]) -> None:
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.new")
        create_secret_file(draft, _render_epochs(epochs))
        os.replace(draft, self._path)
        with _open_descriptor(self._path.parent, os.O_RDONLY) as folder:
            os.fsync(folder)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the file against other writers."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _open_descriptor(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except SecretFileError as error:
            raise AnalyticsError(str(error)) from None
        except OSError as error:
            raise AnalyticsError(f"{self._path} is not writable: {error.strerror}") from None


def pseudonymize_table(
    table: Table, rows: Sequence[Row], settings: Settings, pseudonyms: PseudonymKeyFile
) -> list[Row]:
    """
    Replace identifiers and merge small groups, as described above.

    :param rows: of all days; those of a table with pseudonyms have a `rank`.
    :raise AnalyticsError: the key file is unusable.
    """
    if not table.pseudonyms:
        return list(rows)
    (column,) = table.pseudonyms
    return [
        row
        for day, of_day in groupby(sorted(rows, key=_rank_key), lambda row: row["dt"])
        for row in _pseudonymize_day(
            list(of_day), column, settings.k_anonymity, pseudonyms.make_pseudonym_function(day)
        )
    ]


def _pseudonymize_day(rows: Sequence[Row], column: str, k: int, name: PseudonymFunction) -> list[Row]:
    """
    Rows of one day with pseudonyms and new ranks.

    :param rows: at least one, in order of `rank`.
    :param column: holds the individuals.
    """
    if len({row[column] for row in rows}) < k:
        visible_rows = [_merge_rows(rows, column, f"fewer than {k}")]
    else:
        hidden = [row for row in rows if row.get("partners", k) < k and k > 1]
        visible_rows = [row | {column: name(row[column])} for row in rows if row not in hidden]
        visible_rows += [_merge_rows(hidden, column, OTHERS_LABEL)] if hidden else []
    return [row | {"rank": rank} for rank, row in enumerate(visible_rows, 1)]


def _merge_rows(rows: Sequence[Row], column: str, title: str) -> Row:
    merged = {name: _merge_values(name, [row[name] for row in rows]) for name in rows[0]}
    return merged | {column: title, "dt": rows[0]["dt"]}


def _merge_values(name: str, values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if name in _SUMMED_COLUMNS:
        return sum(there) if there else None
    if name in _MINIMUM_COLUMNS:
        return min(there, default=None)
    return values[0] if isinstance(values[0], str) and set(values) == {values[0]} else None


def _rank_key(row: Row) -> tuple[date, int]:
    return row["dt"], row["rank"]


def _skip_pseudonyms(make_pseudonym: PseudonymFunction) -> PseudonymFunction:
    def name(identifier: str) -> str:
        return (
            identifier
            if identifier == _UNKNOWN_PARTY or _PSEUDONYM_PATTERN.fullmatch(identifier)
            else make_pseudonym(identifier)
        )

    return name


def _find_epoch(epochs: Iterable[KeyEpoch], day: date) -> KeyEpoch | None:
    return next((epoch for epoch in epochs if epoch.first <= day <= epoch.last), None)


def _parse_epochs(content: bytes) -> list[KeyEpoch]:
    """:raise ValueError: the content is invalid; TypeError and KeyError likewise."""
    epochs = [
        KeyEpoch(
            int(value["epoch"]),
            date.fromisoformat(value["first_day"]),
            date.fromisoformat(value["last_day"]),
            None if value["secret"] is None else bytes.fromhex(value["secret"]),
        )
        for value in json.loads(content)["epochs"]
    ]
    if any(epoch.secret is not None and not 16 <= len(epoch.secret) <= 64 for epoch in epochs):
        raise ValueError("a key of the wrong size")
    return sorted(epochs, key=lambda epoch: epoch.first)


def _render_epochs(epochs: Iterable[KeyEpoch]) -> bytes:
    values = [
        {
            "epoch": epoch.number,
            "first_day": epoch.first.isoformat(),
            "last_day": epoch.last.isoformat(),
            "secret": None if epoch.secret is None else epoch.secret.hex(),
        }
        for epoch in sorted(epochs, key=lambda epoch: epoch.first)
    ]
    return json.dumps({"epochs": values}, indent=2).encode() + b"\n"


@contextmanager
def _open_descriptor(path: Path, flags: int = os.O_WRONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _overwrite_with_zeros(descriptor: int) -> None:
    """Overwrite the content of an unlinked file."""
    os.write(descriptor, bytes(os.fstat(descriptor).st_size))
    os.fsync(descriptor)
