"""
Pseudonyms for DIDs, message ids and client networks in logs and metrics (`log.dids`), and their keys in `log.key`.

`plain` only shortens long texts; `keyed` makes pseudonyms that only the holder of the key can recompute. Addresses
are always pseudonymised, by network. `log.key` is JSON: an object with `epoch` and hexadecimal `key`, or `keys`, a
list of such objects with `since`, the first day (UTC) of the epoch. Without its key, the pseudonyms of an epoch
cannot be attributed.
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

from mediatord.runtime.secret_files import (
    SecretFileError,
    create_secret_file,
    lock_secret_file,
    read_secret_file,
    replace_secret_file,
)

_MAX_PLAIN_LENGTH = 80
_PLAIN_PREFIX_LENGTH = 24
_CACHE_SIZE = 8192


@dataclass(frozen=True, slots=True)
class PseudonymKey:
    """
    The pseudonym key of an epoch.

    :param epoch: number of the key; pseudonyms of different epochs are not comparable.
    :param since: first day (UTC) of the epoch; None if not recorded.
    """

    epoch: int
    secret: bytes = field(repr=False)
    since: date | None = field(default=None, compare=False)


class Pseudonymizer:
    """
    Makes pseudonyms, deterministic per key.

    :ivar did: pseudonym of a DID.
    :ivar message: pseudonym of a message id, which is short.
    :ivar peer: pseudonym of the network of an IP address; None for other text, such as a UNIX socket.
    :ivar key: current key.
    :ivar epoch: of the key.
    """

    def __init__(self, mode: Literal["plain", "keyed"], key: PseudonymKey) -> None:
        self._mode = mode
        self.set_key(key)

    def set_key(self, key: PseudonymKey) -> None:
        """Replace the key."""
        mode = self._mode
        self.key = key
        self.epoch = key.epoch
        self.did: Callable[[str], str] = lru_cache(_CACHE_SIZE)(_shorten if mode == "plain" else self._keyed(b"did"))
        self.message: Callable[[str], str] = str if mode == "plain" else self._keyed(b"msg")
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


def is_full_did(text: str) -> bool:
    """Whether text is a DID as it is, neither shortened nor a keyed pseudonym."""
    return text.startswith("did:") and "~" not in text


_KEY_BYTES = 32


def create_pseudonym_key(path: Path) -> PseudonymKey:
    """
    Create `log.key`.

    :raise SecretFileError: it exists or cannot be written.
    """
    key = PseudonymKey(1, secrets.token_bytes(_KEY_BYTES))
    create_secret_file(path, json.dumps({"epoch": key.epoch, "key": key.secret.hex()}).encode() + b"\n")
    return key


def load_pseudonym_key(path: Path) -> PseudonymKey:
    """
    The key of the current epoch; creates a missing `log.key`.

    :raise SecretFileError: it cannot be used or created.
    """
    try:
        there = path.exists()
    except OSError as error:
        raise SecretFileError(f"cannot read {path}: {error.strerror}") from None
    return read_pseudonym_keys(path)[-1] if there else create_pseudonym_key(path)


def renew_pseudonym_key(
    path: Path, today: date, days: int, on_failure: Callable[[str], None], *, make: bool = False
) -> PseudonymKey:
    """
    The key of the current epoch; starts a new epoch after `days`. Safe in several processes at once.

    :param days: 0 for an epoch without an end.
    :param on_failure: receives the reason why no key could be added; the current key then stays in use.
    :param make: create a missing `log.key`, as :func:`load_pseudonym_key` does.
    :raise SecretFileError: there is no usable key, or none could be made.
    """
    key = load_pseudonym_key(path) if make else read_pseudonym_keys(path)[-1]
    if not _is_epoch_over(key, today, days):
        return key
    try:
        with lock_secret_file(path):
            keys = read_pseudonym_keys(path)
            if _is_epoch_over(keys[-1], today, days):
                keys = _append_key(path, keys, today)
            return keys[-1]
    except SecretFileError as error:
        on_failure(str(error))
        return key


def start_key_epoch(path: Path, today: date) -> PseudonymKey:
    """
    Add a key and thereby start a new epoch.

    :raise SecretFileError: the file cannot be used or written.
    """
    with lock_secret_file(path):
        return _append_key(path, read_pseudonym_keys(path), today)[-1]


def delete_epoch_key(path: Path, epoch: int) -> None:
    """
    Delete the key of a past epoch.

    :raise SecretFileError: there is none, it is the current one, or the file cannot be used or written.
    """
    with lock_secret_file(path):
        keys = read_pseudonym_keys(path)
        if epoch == keys[-1].epoch:
            raise SecretFileError(f"the key of epoch {epoch} is in use; run `mediatord log-keys rotate` first")
        left = [key for key in keys if key.epoch != epoch]
        if len(left) == len(keys):
            raise SecretFileError(f"{path} has no key of epoch {epoch}; list its keys with `mediatord log-keys list`")
        _write_keys(path, left)


def read_pseudonym_keys(path: Path) -> list[PseudonymKey]:
    """
    All keys by epoch. A key without `since` is as old as the file.

    :raise SecretFileError: the file cannot be used.
    """
    try:
        value = json.loads(read_secret_file(path))
        keys = [_parse_key(one) for one in (value["keys"] if "keys" in value else [value])]
        written = datetime.fromtimestamp(os.stat(path).st_mtime, UTC).date()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise SecretFileError(f"{path} is not a key file: expected JSON with epoch and key") from None
    if not keys or len({key.epoch for key in keys}) < len(keys):
        raise SecretFileError(f"{path} is not a key file: expected one key for each epoch")
    if not all(16 <= len(key.secret) <= 64 for key in keys):
        raise SecretFileError(f"{path} contains a key of the wrong size: expected 16 to 64 bytes in hexadecimal")
    return sorted((replace(key, since=key.since or written) for key in keys), key=lambda key: key.epoch)


def _parse_key(value: dict[str, Any]) -> PseudonymKey:
    since = value.get("since")
    return PseudonymKey(int(value["epoch"]), bytes.fromhex(value["key"]), since and date.fromisoformat(since))


def _is_epoch_over(key: PseudonymKey, today: date, days: int) -> bool:
    # Also if a wrong clock dated the epoch far into the future.
    return bool(days) and key.since is not None and abs((today - key.since).days) >= days


def _append_key(path: Path, keys: list[PseudonymKey], today: date) -> list[PseudonymKey]:
    keys = [*keys, PseudonymKey(keys[-1].epoch + 1, secrets.token_bytes(_KEY_BYTES), today)]
    _write_keys(path, keys)
    return keys


def _write_keys(path: Path, keys: list[PseudonymKey]) -> None:
    listed = [{"epoch": key.epoch, "key": key.secret.hex(), "since": str(key.since)} for key in keys]
    replace_secret_file(path, json.dumps({"keys": listed}, indent=1).encode() + b"\n")
