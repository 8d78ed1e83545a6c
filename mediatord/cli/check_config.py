"""`mediatord check-config`: validates a configuration and what it needs on this machine: files, keys, directories."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import click

from mediatord.admin.site import read_admin_token
from mediatord.app.lifecycle import check_setting_combinations
from mediatord.app.reload import load_identity
from mediatord.cli.console import config_option, json_option, print_result
from mediatord.cluster.peer_connection import read_cluster_keys
from mediatord.config.file import KeyPart, examine_config
from mediatord.config.settings import Config
from mediatord.errors import OperatorError
from mediatord.identity.encrypted_file import make_passphrase_source
from mediatord.identity.key_file import load_keys
from mediatord.net.listeners import ListenerCertificate, find_certificate_files
from mediatord.observability.pseudonyms import read_pseudonym_keys
from mediatord.store.sqlite.database_file import APPLICATION_ID, describe_database_loss, read_schema_steps

# Key of the configuration, and text of the finding.
KeyPath = tuple[KeyPart, ...]
Finding = tuple[KeyPath, str]


def check_environment(config: Config, path: Path) -> Iterator[Finding]:
    """
    Find what would keep the daemon of a configuration from starting or working: files, keys, directories, database.

    :param path: of the configuration.
    """
    yield from _check(("cluster", "listen"), check_setting_combinations, config)
    passphrase = make_passphrase_source(config.identity.passphrase_file)
    unusable = list(_check(("identity", "keys"), load_keys, config.identity.keys, passphrase))
    yield from unusable or _check(("identity",), load_identity, config)
    yield from _check_log(config)
    if config.control_socket is not None and (reason := _explain_unusable(config.control_socket.parent)):
        yield ("control_socket",), reason
    if config.storage.backend == "sqlite":
        found = _check_database(config.storage.sqlite.path, config.log.directory)
        yield from ((("storage", "sqlite", "path"), text) for text in found)
    elif config.storage.backend == "mongodb":
        yield from ((("storage", "mongodb", "uri"), text) for text in _check_mongodb(config.storage.mongodb.uri))
    if urlsplit(config.storage.mongodb.uri).password and path.stat().st_mode & 0o004:
        yield (
            ("storage", "mongodb", "uri"),
            f"the password in {path} is readable for everybody; type: chmod o= {path}",
        )
    yield from _check_listeners(config)


def _check(key: KeyPath, function: Callable[..., object], *arguments: object) -> Iterator[Finding]:
    try:
        function(*arguments)
    except OperatorError as error:
        yield key, str(error)


def _check_listeners(config: Config) -> Iterator[Finding]:
    for place, endpoint in enumerate(config.listen):
        yield from ((("listen", place), text) for text in _check_tls_files(endpoint))
    if config.cluster.listen is not None and config.cluster.secret_file is not None:
        yield from _check(("cluster", "secret_file"), read_cluster_keys, config.cluster.secret_file)
    if config.admin.listen is not None:
        yield from ((("admin", "listen"), text) for text in _check_tls_files(config.admin.listen))
        if config.admin.token_file is not None:
            yield from _check(("admin", "token_file"), read_admin_token, config.admin.token_file)


def _check_log(config: Config) -> Iterator[Finding]:
    path = config.log_key_path
    key: KeyPath = ("identity", "keys") if config.log.key_file is None else ("log", "key_file")
    if path.exists():
        yield from _check(key, read_pseudonym_keys, path)
    elif (reason := _explain_unusable(path.parent)) is not None:
        yield key, f"{path} is not there and cannot be made: {reason}" if path.parent.is_dir() else reason
    if (reason := _explain_unwritable(config.log.directory)) is not None:
        yield ("log", "directory"), reason


def _check_database(path: Path, logs: Path) -> Iterator[str]:
    if reason := _explain_unusable(path.parent):
        yield reason
    elif loss := describe_database_loss(path, logs):
        yield f"{path} cannot be used: {loss}"
    elif path.exists():
        if not os.access(path, os.R_OK | os.W_OK):
            yield f"{path} cannot be read and written by this user"
            return
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                yield from _check_schema(path, connection)
        except sqlite3.Error as error:
            yield f"{path} cannot be used: {error}"


def _check_schema(path: Path, connection: sqlite3.Connection) -> Iterator[str]:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if tables and application != APPLICATION_ID:
        yield f"{path} is a database of another program"
    elif version > len(read_schema_steps()):
        known = len(read_schema_steps())
        yield f"{path} is of a newer mediatord: its schema is version {version}, this one knows {known}"


def _check_mongodb(uri: str) -> Iterator[str]:
    try:
        import txmongo  # noqa: F401  looked for only
    except ImportError:
        yield 'storage.backend mongodb needs pip install "mediatord[mongodb]"'
        return
    from mediatord.store.mongo.driver.uri import parse_mongo_uri

    try:
        parse_mongo_uri(uri)
    except ValueError as error:
        yield str(error)


def _check_tls_files(endpoint: str) -> Iterator[str]:
    """Problems of the files of an `ssl:` endpoint."""
    if not endpoint.startswith("ssl:"):
        return
    unreadable = False
    for name, path in find_certificate_files(endpoint).items():
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
        expiry = ListenerCertificate(endpoint, None).expiry
    except Exception:  # the texts of OpenSSL are lists of its functions
        yield "key and certificate cannot be used, or do not belong together"
        return
    if expiry <= datetime.now(UTC):
        yield f"the certificate has expired on {expiry:%Y-%m-%d}"


def _explain_unusable(directory: Path) -> str | None:
    """Why this user can create no files in a directory, which has to exist; None if it can."""
    if not directory.is_dir():
        return f"{directory} is not there; type: install -d -m 700 {directory}"
    return _explain_unwritable(directory)


def _explain_unwritable(directory: Path) -> str | None:
    """Why this user can create no files in a directory; None if it can, or can create the directory."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there == directory else f"is not there, and {there} cannot be written to,"
        return f"{directory} {what} by this user"
    return None


@click.command("check-config")
@config_option
@json_option
def check_config(path: Path, as_json: bool) -> int:
    """
    Validate a configuration file and the files that it names.

    Prints one line for each problem. Keys, certificates, database and directories are checked with the permissions of
    the calling user. Nothing is changed, and no connection is made. Exits with 2 if the configuration is invalid,
    with 1 if only files are.
    """
    draft = examine_config(path)
    findings = [] if draft.config is None else check_environment(draft.config, path)
    # Not of defaults that stand in for invalid values.
    around = [draft.problem(where, text) for where, text in findings if not draft.is_wrong(where)]
    lines = draft.lines(around)
    if as_json:
        print_result(True, {"file": str(path), "ok": not lines, "problems": lines}, "")
    else:
        for line in lines:
            click.echo(line, err=True)
        if not lines:
            click.echo(f"{path}: ok")
    return 2 if draft.problems else 1 if around else 0
