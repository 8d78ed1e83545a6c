"""What `mediatord init` writes."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from mediatord.config import Config, render
from mediatord.keyfile import create_keys
from mediatord.tag_keys import create_tag_key

_LOOPBACK = ("127.0.0.1", "localhost")


class SetupError(Exception):
    """There is something in the way; the text is one line for the operator."""


def set_up(directory: Path, public_url: str) -> tuple[Config, Path]:
    """
    Write mediator.yaml, keys.jwks and log.key; the configuration, with its paths resolved, and where it is.

    :raise ValueError: `public_url` cannot be used; nothing was written.
    :raise SetupError: one of the files is there already; nothing was written.
    :raise PrivateFileError: a file with keys could not be written.
    :raise OSError: the configuration could not be written.
    """
    config = _fresh_config(public_url)
    path = directory / "mediator.yaml"
    keys, tag_key = directory / config.identity.keys, directory / "log.key"
    for file in (path, keys, tag_key):
        if file.exists():
            raise SetupError(f"{file} is there already and is not overwritten")
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    create_keys(keys)
    create_tag_key(tag_key)
    # Last: where it is, everything is.
    with path.open("x", encoding="utf-8") as written:
        written.write(render(config))
    return config.resolved(directory.absolute()), path


def _fresh_config(public_url: str) -> Config:
    """The defaults for this URL. Who names a port of this very machine means to listen there."""
    try:
        config = Config(public_url=public_url)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    parts = urlsplit(config.public_url)
    if parts.scheme == "http" and parts.hostname in _LOOPBACK:
        return Config(public_url=public_url, listen=(f"tcp:{parts.port or 80}:interface=127.0.0.1",))
    return config
