"""Whom the pseudonyms of the event log stand for, and the keys that they are made with."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import click

from mediatord.cli.options import config_option, group_config_option
from mediatord.config import Config, load
from mediatord.service import StartupError
from mediatord.tag_keys import begin_epoch, forget_epoch, read_tag_keys
from mediatord.tags import Tags
from mediatord.wiring.base import log_key

_PATIENCE_MS = 5_000


@click.group("log-keys")
@group_config_option
def log_keys() -> None:
    """Show and change the keys that pseudonyms of the event log are made with."""


@log_keys.command("list")
@config_option
def list_keys(path: Path) -> None:
    """Print the epochs that there are keys of, and the day (UTC) that each began."""
    for key in read_tag_keys(log_key(load(path))):
        click.echo(f"{key.epoch}  since {key.since}")


@log_keys.command("rotate")
@config_option
def rotate_keys(path: Path) -> None:
    """Begin another epoch. A running daemon goes by it after a SIGHUP, or from the next midnight UTC on."""
    key = begin_epoch(log_key(load(path)), datetime.now(UTC).date())
    click.echo(f"epoch {key.epoch} begins")


@log_keys.command("forget")
@click.argument("epoch", type=int)
@config_option
def forget_key(epoch: int, path: Path) -> None:
    """
    Delete the key of an epoch: nobody can tell any more whom its pseudonyms stand for.

    A daemon that runs and still uses it goes on with it until it has read the file again (SIGHUP).
    """
    forget_epoch(log_key(load(path)), epoch)
    click.echo(f"epoch {epoch} is forgotten; a daemon that still uses its key does so until a SIGHUP")


@click.command()
@click.argument("pseudonym")
@config_option
def whois(pseudonym: str, path: Path) -> None:
    """Print the registered DIDs that a pseudonym stands for, with its epoch. Exits with 1 if there is none."""
    config = load(path)
    tags = [Tags(mode, key) for key in read_tag_keys(log_key(config)) for mode in ("plain", "keyed")]
    found = {(one.epoch, did) for did in _registered_dids(config) for one in tags if one.did(did) == pseudonym}
    for epoch, did in sorted(found):
        click.echo(f"{epoch}  {did}")
    if not found:
        raise click.ClickException(f"{pseudonym} stands for no registered DID")


def _registered_dids(config: Config) -> Iterator[str]:
    """
    Accounts, recipients and Decentrl identities that the store knows.

    :raise StartupError: it cannot be read.
    """
    backend = config.storage.backend
    if backend == "memory":
        raise StartupError("storage.backend: nobody but the daemon itself knows what is in its memory")
    return _in_mongodb(config.storage.mongodb.uri) if backend == "mongodb" else _in_file(config.storage.sqlite.path)


def _in_file(path: Path) -> Iterator[str]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            query = "SELECT did FROM account UNION SELECT did FROM recipient UNION SELECT did FROM party"
            yield from (did for (did,) in connection.execute(query))
    except sqlite3.Error as error:
        raise StartupError(f"{path} cannot be read: {error}") from None


def _in_mongodb(uri: str) -> Iterator[str]:
    from pymongo import MongoClient
    from pymongo.errors import PyMongoError

    from mediatord.store.mongo.collections import ACCOUNTS, RECIPIENTS
    from mediatord.store.mongo.decentrl_schema import PARTIES
    from mediatord.store.mongo.uri import read_uri

    address = read_uri(uri)
    try:
        client: MongoClient[dict[str, str]] = MongoClient(uri, serverSelectionTimeoutMS=_PATIENCE_MS)
        with client:
            for collection in (ACCOUNTS, RECIPIENTS, PARTIES):
                for one in client[address.database][collection].find({}, {"_id": 0, "did": 1}):
                    yield one["did"]
    except PyMongoError:
        raise StartupError(f"MongoDB at {address.hosts} cannot be read") from None
