"""Fetching programs for the tests, as far as that goes without a network: `tests/debs/fetch.sh`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FETCH = Path(__file__).parent / "debs" / "fetch.sh"
PROGRAMS = ("chromium", "promtool", "prometheus", "nginx", "haproxy")


def fetched(directory: Path, *there: str) -> subprocess.CompletedProcess[str]:
    """What comes of it on a machine that has `there`, a shell and little else."""
    path = directory / "path"
    path.mkdir()
    for name in ("cut", "flock", "mkdir", "rm", "touch", "tr"):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"there is no {name} here")
        (path / name).symlink_to(found)
    for name in there:
        (path / name).write_text("#!/bin/sh\nexit 1\n")
        (path / name).chmod(0o755)
    # It looks in /usr/sbin as well, where there may be a proxy.
    script = directory / "fetch.sh"
    script.write_text(FETCH.read_text("utf-8").replace("PATH=$PATH:/usr/sbin:/sbin\n", ""))
    shell = str(shutil.which("sh"))
    return subprocess.run(
        [shell, script, directory / "debs"], env={"PATH": str(path)}, capture_output=True, text=True, check=False
    )


def test_what_the_machine_has_is_not_fetched(tmp_path: Path) -> None:
    done = fetched(tmp_path, *PROGRAMS)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in (tmp_path / "debs").iterdir()} == {"lock", ".installed"}


def test_no_apt(tmp_path: Path) -> None:
    """Elsewhere than on Debian it says what is missing, and nothing pretends to be there."""
    done = fetched(tmp_path, "promtool", "prometheus", "dpkg")

    assert done.returncode == 1
    assert done.stderr == "there is no apt-get here; install chromium nginx haproxy by other means\n"
    assert not (tmp_path / "debs" / ".installed").exists()


def test_apt_that_fails(tmp_path: Path) -> None:
    """Nothing pretends to be there, either."""
    done = fetched(tmp_path, "promtool", "prometheus", "dpkg", "apt-get")

    assert done.returncode == 1
    assert not (tmp_path / "debs" / ".installed").exists()
