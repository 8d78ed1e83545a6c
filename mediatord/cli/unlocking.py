"""Where the command line has the passphrase of an encrypted file of keys from: a file, or whoever types."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mediatord.config import Config
from mediatord.keylock import Passphrase, checked, passphrase_from
from mediatord.private_file import PrivateFileError, read_private


def passphrase_of(config: Config) -> Passphrase:
    """That of the mediator's keys; asked for where the configuration names no file that is there."""
    return passphrase_from(config.identity.passphrase_file, _ask)


def new_passphrase(file: Path | None) -> bytes:
    """
    One to encrypt with; asked for twice where there is no file.

    :raise PrivateFileError: it is too short, or there is nobody to be asked.
    """
    if file is not None:
        return checked(read_private(file).rstrip(b"\r\n"), file)
    _look_for_a_terminal("say where the passphrase is by identity.passphrase_file")
    typed: str = click.prompt("new passphrase", hide_input=True, confirmation_prompt=True, err=True)
    return checked(typed.encode(), "what was typed")


def _ask(path: Path) -> bytes:
    _look_for_a_terminal(f"{path} is encrypted; say where its passphrase is by identity.passphrase_file")
    typed: str = click.prompt(f"passphrase of {path}", hide_input=True, err=True)
    return typed.encode()


def _look_for_a_terminal(otherwise: str) -> None:
    if not sys.stdin.isatty():
        raise PrivateFileError(f"{otherwise}, or type it at a terminal")
