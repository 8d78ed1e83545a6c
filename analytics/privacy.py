"""
What tables may say about single DIDs.

Tables that are `private` hold identifiers as they stand in the logs, for the jobs alone. Of all others:

* An identifier becomes a pseudonym: keyed BLAKE2b-128, made as the daemon makes its own (`log.dids: keyed`); what is
  one already stays as it is. The keys are in a file beside the driver and change with the day analysed: see
  :class:`Pseudonyms`. Neither keys nor identifiers are ever part of a query.
* k-anonymity (`k_anonymity`, 5 unless set; 1 shows everything):

  - A table of individuals with fewer than k of them on a day has one row for it, `fewer than 5`, with their sums.
  - In `top_senders` and `top_recipients` those with fewer than k partners are merged into a last row, `others`:
    who talks to a handful of people would be known to each of them.
  - Elsewhere a count of individuals is null when it is at least 1 and less than k, and so is what would tell it:
    :func:`unless_few`. What an operator acts on stays: which code or limit it was, and how often.
  - Counts of everybody on a day (members, active, dormant) are no groups and stay.
* In merged rows counts and bytes are sums, days to a loss those of the first; what cannot be added up is null unless
  all have it in common.
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
from typing import TYPE_CHECKING, Any

from analytics.errors import AnalyticsError
from analytics.settings import Settings
from analytics.tables import Table
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.runtime.secret_files import SecretFileError, create_secret_file, read_secret_file

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FORGOTTEN = "forgotten"
OTHERS = "others"

_SECRET_SIZE = 32
_PSEUDONYM = re.compile("[0-9a-f]{32}")
# What the daemon writes of a party that has no address.
_NOBODY = "unknown"

_SUMS = {"n", "bytes", "hits", "bursts", "waiting", "per_day", "at_risk"}
_LEAST = {"days_to_cap", "days_to_ttl"}

Row = dict[str, Any]
Name = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Epoch:
    """
    Days whose pseudonyms are made with one key.

    :param last: part of it.
    :param secret: None once it was forgotten.
    """

    number: int
    first: date
    last: date
    secret: bytes | None = field(repr=False)


class Pseudonyms:
    """
    The key file: JSON, mode 0600, made at first use.

    Epochs begin at whole multiples of their length, counted from the first day of the calendar, so a day has the same
    one however runs are ordered; those that there are stay as they are when the setting changes. Runs at the same
    time may share the file.

    :param days: length of a new epoch.
    """

    def __init__(self, path: Path, days: int) -> None:
        self._path = path
        self._days = days

    def of(self, day: date) -> Name:
        """
        What makes pseudonyms for the tables of a day; they are all `forgotten` if the key was.

        :raise AnalyticsError: the key file cannot be used.
        """
        epoch = _covering(self.epochs(), day) or self._begun(day)
        if epoch.secret is None:
            return _named(lambda identifier: FORGOTTEN)
        return _named(Pseudonymizer("keyed", PseudonymKey(epoch.number, epoch.secret)).did)

    def epochs(self) -> list[Epoch]:
        """
        All there are, by their days.

        :raise AnalyticsError: the key file cannot be used.
        """
        if not self._path.exists():
            return []
        try:
            return _parsed(read_secret_file(self._path))
        except SecretFileError as error:
            raise AnalyticsError(str(error)) from None
        except (ValueError, TypeError, KeyError):
            raise AnalyticsError(f"{self._path} is not a file of pseudonym keys: expected JSON with epochs") from None

    def forget(self, number: int) -> None:
        """
        Destroy the key of an epoch. Nobody can tell any more whom the pseudonyms of its days stand for.

        Copies of the file, in backups or snapshots, have to be destroyed as well.

        :raise AnalyticsError: there is no such epoch, or the key file cannot be used.
        """
        with self._locked():
            epochs = self.epochs()
            if number not in {epoch.number for epoch in epochs}:
                raise AnalyticsError(f"{self._path} has no epoch {number}")
            with _opened(self._path) as old:
                self._write([replace(epoch, secret=None) if epoch.number == number else epoch for epoch in epochs])
                _overwrite(old)

    def _begun(self, day: date) -> Epoch:
        """The epoch of a day that had none."""
        with self._locked():
            epochs = self.epochs()
            # Another run may have been quicker.
            epoch = _covering(epochs, day)
            if epoch is None:
                epoch = self._new(epochs, day)
                self._write([*epochs, epoch])
            return epoch

    def _new(self, epochs: Sequence[Epoch], day: date) -> Epoch:
        """From one multiple to the next, as far as no other epoch is there."""
        start = date.fromordinal(day.toordinal() - day.toordinal() % self._days)
        end = start + timedelta(self._days - 1)
        first = max([start, *(epoch.last + timedelta(1) for epoch in epochs if epoch.last < day)])
        last = min([end, *(epoch.first - timedelta(1) for epoch in epochs if epoch.first > day)])
        number = max((epoch.number for epoch in epochs), default=0) + 1
        return Epoch(number, first, last, secrets.token_bytes(_SECRET_SIZE))

    def _write(self, epochs: Iterable[Epoch]) -> None:
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.new")
        create_secret_file(draft, _rendered(epochs))
        os.replace(draft, self._path)
        with _opened(self._path.parent, os.O_RDONLY) as folder:
            os.fsync(folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all who change the file."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except SecretFileError as error:
            raise AnalyticsError(str(error)) from None
        except OSError as error:
            raise AnalyticsError(f"{self._path} cannot be written: {error.strerror}") from None


def unless_few(count: Column, k: int, value: Column | None = None) -> Column:
    """`value`, or else the count itself; null when the count of individuals is at least 1 and less than k."""
    from pyspark.sql import functions as F

    return F.when(~count.between(1, k - 1), count if value is None else value)


def disclose(table: Table, frame: DataFrame, settings: Settings, pseudonyms: Pseudonyms) -> DataFrame:
    """
    A table as it may be shown: see above. It has the columns declared, in their order.

    :param frame: for a table with pseudonyms a few rows a day: they pass through the driver.
    :raise AnalyticsError: the key file cannot be used.
    """
    if not table.pseudonyms:
        return frame
    struct = table.struct()
    (column,) = table.pseudonyms
    rows = sorted((row.asDict() for row in frame.select(struct.names).collect()), key=_place)
    shown = [
        row
        for day, of_day in groupby(rows, lambda row: row["dt"])
        for row in _shown(list(of_day), column, settings.k_anonymity, pseudonyms.of(day))
    ]
    return frame.sparkSession.createDataFrame([tuple(row[name] for name in struct.names) for row in shown], struct)


def _shown(rows: Sequence[Row], column: str, k: int, name: Name) -> list[Row]:
    """
    Rows of one day under pseudonyms, and ranked anew.

    :param rows: at least one, in order of `rank`.
    :param column: that holds the individuals.
    """
    if len({row[column] for row in rows}) < k:
        shown = [_merged(rows, column, f"fewer than {k}")]
    else:
        hidden = [row for row in rows if row.get("partners", k) < k and k > 1]
        shown = [row | {column: name(row[column])} for row in rows if row not in hidden]
        shown += [_merged(hidden, column, OTHERS)] if hidden else []
    return [row | {"rank": rank} for rank, row in enumerate(shown, 1)]


def _merged(rows: Sequence[Row], column: str, title: str) -> Row:
    merged = {name: _together(name, [row[name] for row in rows]) for name in rows[0]}
    return merged | {column: title, "dt": rows[0]["dt"]}


def _together(name: str, values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if name in _SUMS:
        return sum(there) if there else None
    if name in _LEAST:
        return min(there, default=None)
    return values[0] if isinstance(values[0], str) and set(values) == {values[0]} else None


def _place(row: Row) -> tuple[date, int]:
    return row["dt"], row["rank"]


def _named(made: Name) -> Name:
    def name(identifier: str) -> str:
        return identifier if identifier == _NOBODY or _PSEUDONYM.fullmatch(identifier) else made(identifier)

    return name


def _covering(epochs: Iterable[Epoch], day: date) -> Epoch | None:
    return next((epoch for epoch in epochs if epoch.first <= day <= epoch.last), None)


def _parsed(content: bytes) -> list[Epoch]:
    """:raise ValueError: it is something else; so are TypeError and KeyError."""
    epochs = [
        Epoch(
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


def _rendered(epochs: Iterable[Epoch]) -> bytes:
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
def _opened(path: Path, flags: int = os.O_WRONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _overwrite(descriptor: int) -> None:
    """What stood in a file that has no name any more."""
    os.write(descriptor, bytes(os.fstat(descriptor).st_size))
    os.fsync(descriptor)
