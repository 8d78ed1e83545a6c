"""`mediatord check-config`: validates a configuration and what it needs on this machine: files, keys, directories."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import click

from mediatord.admin.site import read_admin_token
from mediatord.app.current_identity import load_identity
from mediatord.app.lifecycle import check_setting_combinations
from mediatord.cli.console import config_option, json_option, print_result
from mediatord.cluster.peer_connection import read_cluster_keys
from mediatord.config.file import KeyPart, examine_config
from mediatord.config.settings import Config, PushSettings
from mediatord.errors import OperatorError
from mediatord.identity.encrypted_file import make_passphrase_source
from mediatord.identity.key_file import load_keys
from mediatord.net.listeners import ListenerCertificate, find_certificate_files
from mediatord.observability.pseudonyms import read_pseudonym_keys
from mediatord.push.apns import load_apns_credentials
from mediatord.push.fcm import load_fcm_credentials
from mediatord.push.web_push import load_vapid_key
from mediatord.push.webhook import load_webhook_secret
from mediatord.store.sqlite.database_file import APPLICATION_ID, describe_database_loss, read_schema_steps

KeyPath = tuple[KeyPart, ...]

_APNS_PREFIX = "push.apns."


def list_checks(config: Config, path: Path) -> Iterator[tuple[KeyPath, Iterable[str]]]:
    """
    Check what would keep the daemon of a configuration from starting or working: files, keys, directories, database.
    Yields keys of the configuration with their problems.

    :param path: of the configuration.
    """
    cluster, admin = config.cluster, config.admin
    yield (
        ("cluster", "listen"),
        (text.removeprefix("cluster.listen ") for text in _try(check_setting_combinations, config)),
    )
    unusable = list(_try(load_keys, config.identity.keys, make_passphrase_source(config.identity.passphrase_file)))
    yield ("identity", "keys"), unusable
    if not unusable:
        yield ("identity",), _try(load_identity, config)
    yield ("identity", "keys") if config.log.key_file is None else ("log", "key_file"), _check_log_key(config)
    yield ("log", "directory"), _explain_unwritable(config.log.directory)
    if config.control_socket is not None:
        yield ("control_socket",), _explain_unusable(config.control_socket.parent)
    yield ("storage", "sqlite", "path"), _check_database(config)
    yield ("storage", "mongodb", "uri"), _check_mongodb(config, path)
    for place, endpoint in enumerate(config.listen):
        yield ("listen", place), _check_tls_files(endpoint)
    if cluster.listen is not None and cluster.secret_file is not None:
        yield ("cluster", "secret_file"), _try(read_cluster_keys, cluster.secret_file)
    if admin.listen is not None and admin.token_file is not None:
        yield ("admin", "listen"), _check_tls_files(admin.listen)
        yield ("admin", "token_file"), _try(read_admin_token, admin.token_file)
    yield from _list_push_checks(config.push)


def _list_push_checks(push: PushSettings) -> Iterator[tuple[KeyPath, Iterable[str]]]:
    """The files of push notifications. Nothing is sent, so that a key which its service has revoked is valid."""
    fcm, apns, web_push, webhook = push.fcm, push.apns, push.web_push, push.webhook
    if fcm.credentials is not None:
        yield ("push", "fcm", "credentials"), _try(load_fcm_credentials, fcm.credentials)
    if apns.key_file is not None:
        for text in _try(load_apns_credentials, apns.key_file, apns.key_id, apns.team_id, apns.topic):
            # Of a key other than that of the file, the text names it.
            key, _, problem = text.removeprefix(_APNS_PREFIX).partition(": ")
            is_of_file = not text.startswith(_APNS_PREFIX)
            yield ("push", "apns", "key_file" if is_of_file else key), (text if is_of_file else problem,)
    if web_push.key_file is not None:
        yield ("push", "web_push", "key_file"), _try(load_vapid_key, web_push.key_file)
    if webhook.url is not None and webhook.secret_file is not None:
        yield ("push", "webhook", "secret_file"), _try(load_webhook_secret, webhook.secret_file)


def _try(function: Callable[..., object], *arguments: object) -> Iterator[str]:
    try:
        function(*arguments)
    except OperatorError as error:
        yield str(error)


def _check_log_key(config: Config) -> Iterator[str]:
    path = config.log_key_path
    if path.exists():
        yield from _try(read_pseudonym_keys, path)
    else:
        for reason in _explain_unusable(path.parent):
            yield f"{path} does not exist and cannot be created: {reason}" if path.parent.is_dir() else reason


def _check_database(config: Config) -> Iterator[str]:
    path = config.storage.sqlite.path
    if config.storage.backend != "sqlite":
        return
    if reasons := list(_explain_unusable(path.parent)):
        yield from reasons
    elif loss := describe_database_loss(path, config.log.directory):
        yield f"cannot use {path}: {loss}"
    elif path.exists():
        if not os.access(path, os.R_OK | os.W_OK):
            yield f"this user cannot read and write {path}"
            return
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                yield from _check_schema(path, connection)
        except sqlite3.Error as error:
            yield f"cannot use {path}: {error}"


def _check_schema(path: Path, connection: sqlite3.Connection) -> Iterator[str]:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if tables and application != APPLICATION_ID:
        yield f"{path} is a database of another program"
    elif version > len(read_schema_steps()):
        known = len(read_schema_steps())
        yield (
            f"the schema version of {path} is {version}, but this release supports at most {known}; upgrade mediatord"
        )


def _check_mongodb(config: Config, path: Path) -> Iterator[str]:
    uri = config.storage.mongodb.uri
    if urlsplit(uri).password and path.stat().st_mode & 0o004:
        yield f"all users can read the password in {path}; run: chmod o= {path}"
    if config.storage.backend != "mongodb":
        return
    if find_spec("txmongo") is None:
        yield 'storage.backend mongodb requires PyMongo and txmongo; run: pip install "mediatord[mongodb]"'
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
            yield f"{name}: {path} is accessible to all users; run: chmod o= {path}"
    if unreadable:
        return
    try:
        expiry = ListenerCertificate(endpoint, None).expiry
    except Exception:  # the texts of OpenSSL are lists of its functions
        yield "cannot use key and certificate, or they do not match"
        return
    if expiry <= datetime.now(UTC):
        yield f"the certificate expired on {expiry:%Y-%m-%d}"


def _explain_unusable(directory: Path) -> Iterator[str]:
    """Why this user can create no files in a directory, which has to exist."""
    if directory.is_dir():
        yield from _explain_unwritable(directory)
    else:
        yield f"{directory} does not exist; run: install -d -m 700 {directory}"


def _explain_unwritable(directory: Path) -> Iterator[str]:
    """Why this user can neither create files in a directory nor create the directory."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        yield f"{there} is not a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        missing = "" if there == directory else f"{directory} does not exist, and "
        yield f"{missing}this user cannot write to {there}"


@click.command("check-config")
@config_option
@json_option
def check_config(path: Path, as_json: bool) -> int:
    """
    Validate the configuration and the files that it names.

    Prints one line per problem. Checks keys, certificates, database and directories as the calling user; changes
    nothing and makes no connection. Exits with 2 if the configuration is invalid, and with 1 if only a file or
    directory that it names has a problem.
    """
    draft = examine_config(path)
    checks = [] if draft.config is None else list_checks(draft.config, path)
    # Not of defaults that stand in for invalid values.
    around = [draft.problem(key, text) for key, texts in checks if not draft.is_wrong(key) for text in texts]
    lines = draft.lines(around)
    if as_json:
        print_result(True, {"file": str(path), "ok": not lines, "problems": lines}, "")
    else:
        for line in lines:
            click.echo(line, err=True)
        if not lines:
            click.echo(f"{path}: ok")
    return 2 if draft.problems else 1 if around else 0
