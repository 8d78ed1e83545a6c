"""
What stands for a DID, a message id or an address in logs and metrics (`log.dids`).

`plain` shortens what is long; `keyed` gives pseudonyms that only the holder of the key can make again. Addresses are
always pseudonyms, of their network and not of themselves.

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
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import Any, Literal

from mediatord.private_file import (
    PrivateFileError,
    create_private_file,
    lock_private_file,
    read_private_file,
    replace_private_file,
)

_MAX_PLAIN_LENGTH = 80
_PLAIN_PREFIX_LENGTH = 24
_CACHE_SIZE = 8192


@dataclass(frozen=True, slots=True)
class PseudonymKey:
    """
    :param epoch: which key this is; pseudonyms of different epochs cannot be compared.
    :param since: the day (UTC) that it began; None if nobody wrote that down.
    """

    epoch: int
    secret: bytes = field(repr=False)
    since: date | None = field(default=None, compare=False)


class Pseudonymizer:
    """
    Makes tags. Equal input gives equal output for as long as the key is the same.

    :ivar did: callable, the tag of a DID.
    :ivar message: callable, the tag of a message id.
    :ivar peer: callable, the tag of the network of an IP address; None for what is no address, a UNIX socket say.
    :ivar key: that tags are made with.
    :ivar epoch: of the key.
    """

    def __init__(self, mode: Literal["plain", "keyed"], key: PseudonymKey) -> None:
        self._mode = mode
        self.set_key(key)

    def set_key(self, key: PseudonymKey) -> None:
        """Make tags with this key from now on."""
        mode = self._mode
        self.key = key
        self.epoch = key.epoch
        self.did: Callable[[str], str] = lru_cache(_CACHE_SIZE)(_shorten if mode == "plain" else self._keyed(b"did"))
        self.message: Callable[[str], str] = _shorten if mode == "plain" else self._keyed(b"msg")
        self.peer: Callable[[str], str | None] = lru_cache(_CACHE_SIZE)(self._peer)

    def _keyed(self, purpose: bytes) -> Callable[[str], str]:
        key = self.key

        def pseudonym(text: str) -> str:
            return blake2b(
                text.encode("utf-8", "surrogatepass"), digest_size=16, key=key.secret, person=purpose
            ).hexdigest()

        return pseudonym

    def _peer(self, address: str) -> str | None:
        try:
            parsed = ip_address(address.partition("/")[0].partition("%")[0])
        except ValueError:
            return None
        mapped = parsed if isinstance(parsed, IPv4Address) else parsed.ipv4_mapped
        network = ip_network((mapped, 24) if mapped else (parsed, 48), strict=False)
        return self._keyed(b"peer")(str(network))


def _shorten(text: str) -> str:
    if len(text) <= _MAX_PLAIN_LENGTH:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[:_PLAIN_PREFIX_LENGTH]}~{digest}"


_KEY_BYTES = 32


def create_pseudonym_key(path: Path) -> PseudonymKey:
    """
    Make `log.key`.

    :raise PrivateFileError: it is there already or cannot be written.
    """
    key = PseudonymKey(1, secrets.token_bytes(_KEY_BYTES))
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


def renew_pseudonym_key(
    path: Path, today: date, days: int, on_failure: Callable[[str], None], *, make: bool = False
) -> PseudonymKey:
    """
    The key of the current epoch; starts a new epoch when that one has lasted `days`. Safe in several processes at once.

    :param days: 0 for an epoch without an end.
    :param on_failure: receives the reason why no key could be added; the current key then stays in use.
    :param make: create a missing `log.key`, as :func:`load_pseudonym_key` does.
    :raise PrivateFileError: there is no usable key, or none could be made.
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
        on_failure(str(error))
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
    keys = [*keys, PseudonymKey(keys[-1].epoch + 1, secrets.token_bytes(_KEY_BYTES), today)]
    _write_keys(path, keys)
    return keys


def _write_keys(path: Path, keys: list[PseudonymKey]) -> None:
    listed = [{"epoch": key.epoch, "key": key.secret.hex(), "since": str(key.since)} for key in keys]
    replace_private_file(path, json.dumps({"keys": listed}, indent=1).encode() + b"\n")
