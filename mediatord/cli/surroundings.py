"""What a configuration names, looked at before the daemon needs it: files, directories, keys, certificates."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from mediatord.admin.access import read_token
from mediatord.certificates import Certificate, named_files
from mediatord.cluster.secret import read_secret
from mediatord.config import Config
from mediatord.config.tree import Key
from mediatord.keyfile import load_keys
from mediatord.keylock import passphrase_from
from mediatord.private_file import PrivateFileError
from mediatord.service import StartupError, refuse_unavailable
from mediatord.store.database import APPLICATION_ID, schema_steps
from mediatord.store.database_check import loss_of
from mediatord.tag_keys import read_tag_keys
from mediatord.wiring import load_identity
from mediatord.wiring.base import log_key

# The key that names it, and what is the matter.
Where = tuple[Key, ...]
Finding = tuple[Where, str]


def look_around(config: Config, path: Path) -> Iterator[Finding]:
    """
    All that would keep the daemon of this configuration from starting, or from working later.

    :param path: where that is written.
    """
    try:
        refuse_unavailable(config)
    except StartupError as error:
        yield ("cluster", "listen"), str(error)
    yield from _keys(config)
    yield from _log(config)
    yield from _store(config)
    if urlsplit(config.storage.mongodb.uri).password and path.stat().st_mode & 0o004:
        yield ("storage", "mongodb", "uri"), f"everybody may read the password in {path}; type: chmod o= {path}"
    for key, endpoint in _endpoints(config):
        yield from ((key, text) for text in _tls(endpoint))
    if config.cluster.listen is not None and config.cluster.secret_file is not None:
        yield from _secret(("cluster", "secret_file"), config.cluster.secret_file, read_secret)
    if config.admin.listen is not None and config.admin.token_file is not None:
        yield from _secret(("admin", "token_file"), config.admin.token_file, read_token)


def _secret(key: Where, path: Path, read: Callable[[Path], object]) -> Iterator[Finding]:
    try:
        read(path)
    except PrivateFileError as error:
        yield key, str(error)


def _keys(config: Config) -> Iterator[Finding]:
    try:
        load_keys(config.identity.keys, passphrase_from(config.identity.passphrase_file))
    except PrivateFileError as error:
        yield ("identity", "keys"), str(error)
        return
    try:
        load_identity(config)
    except StartupError as error:
        yield ("identity",), str(error)


def _log(config: Config) -> Iterator[Finding]:
    path = log_key(config)
    named = ("identity", "keys") if config.log.key_file is None else ("log", "key_file")
    if path.exists():
        yield from _secret(named, path, read_tag_keys)
    elif not path.parent.is_dir():
        yield named, f"{path.parent} is not there; type: install -d -m 700 {path.parent}"
    elif (reason := _unwritable(path.parent)) is not None:
        yield named, f"{path} is not there and cannot be made: {reason}"
    if (reason := _unwritable(config.log.directory)) is not None:
        yield ("log", "directory"), reason


def _store(config: Config) -> Iterator[Finding]:
    if config.storage.backend == "sqlite":
        path = config.storage.sqlite.path
        yield from ((("storage", "sqlite", "path"), text) for text in _database(path, config.log.directory))
    elif config.storage.backend == "mongodb":
        yield from ((("storage", "mongodb", "uri"), text) for text in _address(config.storage.mongodb.uri))


def _database(path: Path, logs: Path) -> Iterator[str]:
    if not path.parent.is_dir():
        yield f"{path.parent} is not there; type: install -d -m 700 {path.parent}"
    elif (reason := _unwritable(path.parent)) is not None:
        yield reason
    elif loss := loss_of(path, logs):
        yield f"{path} cannot be used: {loss}"
    elif path.exists():
        if not os.access(path, os.R_OK | os.W_OK):
            yield f"{path} cannot be read and written by this user"
            return
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                yield from _foreign(path, connection)
        except sqlite3.Error as error:
            yield f"{path} cannot be used: {error}"


def _foreign(path: Path, connection: sqlite3.Connection) -> Iterator[str]:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if tables and application != APPLICATION_ID:
        yield f"{path} is a database of another program"
    elif version > len(schema_steps()):
        yield f"{path} is of a newer mediatord: its schema is version {version}, this one knows {len(schema_steps())}"


def _address(uri: str) -> Iterator[str]:
    try:
        import txmongo  # noqa: F401  looked for only
    except ImportError:
        yield 'storage.backend mongodb needs pip install "mediatord[mongodb]"'
        return
    from mediatord.store.mongo.uri import read_uri

    try:
        read_uri(uri)
    except ValueError as error:
        yield str(error)


def _endpoints(config: Config) -> Iterator[Finding]:
    yield from ((("listen", place), endpoint) for place, endpoint in enumerate(config.listen))
    if config.admin.listen is not None:
        yield ("admin", "listen"), config.admin.listen


def _tls(endpoint: str) -> Iterator[str]:
    """What is the matter with the files of an `ssl:` endpoint."""
    if not endpoint.startswith("ssl:"):
        return
    unreadable = False
    for name, path in named_files(endpoint).items():
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
        except OSError as error:
            unreadable = True
            yield f"{name}: {path}: {error.strerror}"
            continue
        if name == "privateKey" and stat.S_IMODE(mode) & 0o007:
            yield f"{name}: {path} is open to everybody; type: chmod o= {path}"
    if unreadable:
        return
    try:
        expiry = Certificate(endpoint, None).expiry
    except Exception:  # the texts of OpenSSL are lists of its functions
        yield "key and certificate cannot be used, or do not belong together"
        return
    if expiry <= datetime.now(UTC):
        yield f"the certificate has expired on {expiry:%Y-%m-%d}"


def _unwritable(directory: Path) -> str | None:
    """Why this user cannot make files there; None if it can, or can make the directory."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there == directory else f"is not there, and {there} cannot be written to,"
        return f"{directory} {what} by this user"
    return None
