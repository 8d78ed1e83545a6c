"""Programs that tests run: from `.debs`, where `make test` puts what the machine lacks, or the machine's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_FETCHED = Path(__file__).parents[1] / ".debs" / "bin"


def find_program(name: str) -> Path:
    """
    Where it is. Skips the test where it is not.

    :param name: `chromium`, `promtool`, `prometheus`, `nginx` or `haproxy`.
    """
    path = os.pathsep.join([str(_FETCHED), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"there is no {name} here; `make .debs` fetches it where apt-get can, as `apt-get install` would")
    return Path(found)
