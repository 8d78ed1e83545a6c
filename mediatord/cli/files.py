"""What `mediatord init` writes, and to whom it belongs."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from mediatord.config import Config, render
from mediatord.keyfile import create_keys
from mediatord.tag_keys import create_tag_key

# Where the daemon of the system has its files, and whose it is.
SYSTEM = Path("/etc/mediatord")
STATE, LOGS = Path("/var/lib/mediatord"), Path("/var/log/mediatord")
USER = "mediatord"

_LOOPBACK = ("127.0.0.1", "localhost")
# A proxy on this machine, which says whom it speaks for.
_LOCAL_PROXY = ("127.0.0.0/8", "::1/128")


class SetupError(Exception):
    """There is something in the way; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom the daemon of the system runs as."""

    user: int
    group: int


def set_up(directory: Path, public_url: str) -> tuple[Config, Path]:
    """
    Write mediator.yaml, keys.jwks and log.key; the configuration, with its paths resolved, and where it is.

    In the directory of the system's daemon, its state and logs are where those of daemons are, and it can read what
    root has written. log.key is left to the daemon, as it is among the files that it writes.

    :raise ValueError: `public_url` cannot be used; nothing was written.
    :raise SetupError: one of the files is there already; nothing was written.
    :raise PrivateFileError: a file with keys could not be written.
    :raise OSError: the configuration could not be written.
    """
    config = _fresh_config(public_url)
    if is_system(directory):
        config = _of_system(config)
    path = directory / "mediator.yaml"
    keys, tag_key = directory / config.identity.keys, directory / "log.key"
    made = (keys,) if config.log.key_file else (keys, tag_key)
    for file in (path, *made):
        if file.exists():
            raise SetupError(f"{file} is there already and is not overwritten")
    owner = system_owner() if is_system(directory) and os.geteuid() == 0 else None
    _make(directory, owner)
    create_keys(keys)
    if tag_key in made:
        create_tag_key(tag_key)
    if owner is not None:
        os.chown(keys, owner.user, owner.group)
    # Last: where it is, everything is. It may come to hold the password of a database.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "w", encoding="utf-8") as written:
        written.write(render(config))
        if owner is not None:
            os.fchown(written.fileno(), 0, owner.group)
    return config.resolved(directory.absolute()), path


def _make(directory: Path, owner: Owner | None) -> None:
    """As a directory that the daemon can read in, unless it is there."""
    if directory.exists():
        return
    directory.mkdir(mode=0o750, parents=True)
    if owner is not None:
        os.chown(directory, 0, owner.group)


def is_system(directory: Path) -> bool:
    """Whether it is that of the system's daemon."""
    return directory.resolve() == SYSTEM


def system_owner() -> Owner | None:
    """Whom the daemon of the system runs as, if there is such a user already."""
    try:
        return Owner(pwd.getpwnam(USER).pw_uid, grp.getgrnam(USER).gr_gid)
    except KeyError:
        return None


def _fresh_config(public_url: str) -> Config:
    """
    The defaults for this URL. Who names a port of this very machine means to listen there; behind https:// there is
    mostly a proxy on the same machine.
    """
    try:
        config = Config(public_url=public_url)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    parts = urlsplit(config.public_url)
    if parts.scheme == "https":
        return Config.model_validate({"public_url": public_url, "trusted_proxies": _LOCAL_PROXY})
    if parts.hostname in _LOOPBACK:
        return Config(public_url=public_url, listen=(f"tcp:{parts.port or 80}:interface=127.0.0.1",))
    return config


def _of_system(config: Config) -> Config:
    sqlite = config.storage.sqlite.model_copy(update={"path": STATE / config.storage.sqlite.path})
    storage = config.storage.model_copy(update={"sqlite": sqlite})
    log = config.log.model_copy(update={"directory": LOGS, "key_file": STATE / "log.key"})
    return config.model_copy(update={"storage": storage, "log": log})
