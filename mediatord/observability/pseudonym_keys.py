"""
`log.key`: the keys that tags are made with, one an epoch.

The file is JSON: an object with `epoch` and `key` in hexadecimal, or, once there was more than one, `keys`, a list of
such objects with `since`, the day (UTC) that each began. Without a key nobody can tell whom the pseudonyms of
its epoch stand for.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.observability.event_log import EventLogWriter
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.private_file import (
    PrivateFileError,
    create_private_file,
    lock_private_file,
    read_private_file,
    replace_private_file,
)

_log = Logger()

_KEY_SIZE = 32


def create_pseudonym_key(path: Path) -> PseudonymKey:
    """
    Make `log.key`.

    :raise PrivateFileError: it is there already or cannot be written.
    """
    key = PseudonymKey(1, secrets.token_bytes(_KEY_SIZE))
    create_private_file(path, json.dumps({"epoch": key.epoch, "key": key.secret.hex()}).encode() + b"\n")
    return key


def load_pseudonym_key(path: Path) -> PseudonymKey:
    """
    The key of the present epoch; where there is no `log.key` yet, it is made.

    :raise PrivateFileError: it cannot be used or made.
    """
    try:
        there = path.exists()
    except OSError as error:
        raise PrivateFileError(f"{path} cannot be read: {error.strerror}") from None
    return read_pseudonym_keys(path)[-1] if there else create_pseudonym_key(path)


def renew_pseudonym_key(path: Path, today: date, days: int, *, make: bool = False) -> PseudonymKey:
    """
    The key of the present epoch, of a new one if that has lasted so many days. Several processes may do this.
    Where no key can be added, the present one goes on, and the operator is told.

    :param days: 0 for an epoch that lasts.
    :param make: where there is no `log.key`, as :func:`load_pseudonym_key`.
    :raise PrivateFileError: there is none, or it cannot be used or made.
    """
    key = load_pseudonym_key(path) if make else read_pseudonym_keys(path)[-1]
    if not _is_epoch_over(key, today, days):
        return key
    try:
        with lock_private_file(path):
            keys = read_pseudonym_keys(path)
            if _is_epoch_over(keys[-1], today, days):
                keys = _append_key(path, keys, today)
            return keys[-1]
    except PrivateFileError as error:
        _log.error("keeping the current pseudonym key: {reason}", reason=str(error))
        return key


def start_key_epoch(path: Path, today: date) -> PseudonymKey:
    """
    Add a key, which is that of the present epoch from now on.

    :raise PrivateFileError: the file cannot be used or written.
    """
    with lock_private_file(path):
        return _append_key(path, read_pseudonym_keys(path), today)[-1]


def delete_epoch_key(path: Path, epoch: int) -> None:
    """
    Delete the key of an epoch that is over.

    :raise PrivateFileError: there is none, or it is in use; the file cannot be used or written.
    """
    with lock_private_file(path):
        keys = read_pseudonym_keys(path)
        if epoch == keys[-1].epoch:
            raise PrivateFileError(f"the key of epoch {epoch} is in use; begin another one first")
        left = [key for key in keys if key.epoch != epoch]
        if len(left) == len(keys):
            raise PrivateFileError(f"{path} has no key of epoch {epoch}")
        _write_keys(path, left)


def read_pseudonym_keys(path: Path) -> list[PseudonymKey]:
    """
    All keys, those of earlier epochs first. One that does not say since when it is in use is as old as the file.

    :raise PrivateFileError: the file cannot be used.
    """
    try:
        value = json.loads(read_private_file(path))
        keys = [_parse_key(one) for one in (value["keys"] if "keys" in value else [value])]
        written = datetime.fromtimestamp(os.stat(path).st_mtime, UTC).date()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise PrivateFileError(f"{path} is not a key file: expected JSON with epoch and key") from None
    if not keys or len({key.epoch for key in keys}) < len(keys):
        raise PrivateFileError(f"{path} is not a key file: expected one key for each epoch")
    if not all(16 <= len(key.secret) <= 64 for key in keys):
        raise PrivateFileError(f"{path} holds a key of the wrong size: expected 16 to 64 bytes in hexadecimal")
    return sorted((replace(key, since=key.since or written) for key in keys), key=lambda key: key.epoch)


def _parse_key(value: dict[str, Any]) -> PseudonymKey:
    since = value.get("since")
    return PseudonymKey(int(value["epoch"]), bytes.fromhex(value["key"]), since and date.fromisoformat(since))


def _is_epoch_over(key: PseudonymKey, today: date, days: int) -> bool:
    # Also one that a clock which was wrong has put far ahead.
    return bool(days) and key.since is not None and abs((today - key.since).days) >= days


def _append_key(path: Path, keys: list[PseudonymKey], today: date) -> list[PseudonymKey]:
    keys = [*keys, PseudonymKey(keys[-1].epoch + 1, secrets.token_bytes(_KEY_SIZE), today)]
    _write_keys(path, keys)
    return keys


def _write_keys(path: Path, keys: list[PseudonymKey]) -> None:
    listed = [{"epoch": key.epoch, "key": key.secret.hex(), "since": str(key.since)} for key in keys]
    replace_private_file(path, json.dumps({"keys": listed}, indent=1).encode() + b"\n")


_DAY_SECONDS = 86_400.0
# Seconds. A timer ignores changes of the wall clock, so longer waits are split.
_MAX_WAIT = 3_600.0


def to_utc_day(seconds: float) -> date:
    """The UTC date of a POSIX timestamp."""
    return datetime.fromtimestamp(seconds, UTC).date()


class PseudonymKeyRotation(Service):
    """
    Switches the event log to a new pseudonym key when a key epoch ends; checks once a day, at midnight UTC.

    :param path: of `log.key`.
    :param epoch_days: length of an epoch in days; 0 means that it never ends.
    """

    name = "pseudonym key rotation"

    def __init__(
        self,
        clock: IReactorTime,
        path: Path,
        pseudonymizer: Pseudonymizer,
        events: EventLogWriter,
        epoch_days: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._path = path
        self._pseudonymizer = pseudonymizer
        self._events = events
        self._epoch_days = epoch_days
        self._timer: IDelayedCall | None = None
        self._checked_day = date.min

    def startService(self) -> None:
        """Start the daily check; the current key was checked when it was loaded."""
        super().startService()
        self._checked_day = to_utc_day(self._clock.seconds())
        self._schedule()

    def stopService(self) -> None:
        """Stop the daily check."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rotate_if_due(self) -> None:
        """
        Use the key of the current epoch, in a new segment of the event log if the epoch has changed.

        The key in use stays if there is no key file, or if the file has another key for the same epoch.
        """
        try:
            key = renew_pseudonym_key(self._path, to_utc_day(self._clock.seconds()), self._epoch_days())
        except PrivateFileError as error:
            _log.error("keeping the current pseudonym key: {reason}", reason=str(error))
            return
        if key.epoch != self._pseudonymizer.epoch:
            self._pseudonymizer.use(key)
            self._events.set_key_epoch(key.epoch)
        elif key != self._pseudonymizer.key:
            _log.warn(
                "{path} has a different key for epoch {epoch}; the key in use stays until a restart",
                path=self._path,
                epoch=key.epoch,
            )

    def _schedule(self) -> None:
        remaining = _DAY_SECONDS - self._clock.seconds() % _DAY_SECONDS
        self._timer = self._clock.callLater(min(remaining, _MAX_WAIT), self._check_day)

    def _check_day(self) -> None:
        self._schedule()
        today = to_utc_day(self._clock.seconds())
        if today != self._checked_day:
            self._checked_day = today
            self.rotate_if_due()
