"""Finds programs that tests run: in `.debs`, where `make test` installs what the machine lacks, or on the path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_DEBS_BIN = Path(__file__).parents[1] / ".debs" / "bin"


def find_program(name: str) -> Path:
    """
    Path of a program; skips the test if it is not installed.

    :param name: `chromium`, `promtool`, `prometheus`, `nginx`, `haproxy` or `caddy`.
    """
    path = os.pathsep.join([str(_DEBS_BIN), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which(name, path=path)
    if program is None:
        pytest.skip(f"{name} is not installed; `make .debs` or `apt-get install` provides it")
    return Path(program)
