"""Credentials that systemd hands to a service (systemd.exec(5), "Credentials"), named as `credential:NAME`."""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "credential:"
_VARIABLE = "CREDENTIALS_DIRECTORY"


def directory() -> Path | None:
    """Where those of this process are; None if it has none."""
    value = os.environ.get(_VARIABLE)
    return Path(value) if value else None


def placed(base: Path, path: Path) -> Path:
    """
    Where a file with a secret is, as the configuration names it: a path relative to `base`, or a credential. One that
    this process was not given stays as it is written.
    """
    if not str(path).startswith(PREFIX):
        return base / path
    given = directory()
    return path if given is None else given / Path(str(path).removeprefix(PREFIX)).name


def is_missing(path: Path) -> bool:
    """Whether it is a credential that this process was not given."""
    return str(path).startswith(PREFIX)


def is_credential(path: Path) -> bool:
    """Whether it is one that this process was given: root's, and by a list of access for the service alone."""
    given = directory()
    return given is not None and path.parent == given
