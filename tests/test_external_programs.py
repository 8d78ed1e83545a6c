"""Fetching programs for the tests, as far as that works without a network: `tests/debs/fetch.sh`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FETCH = Path(__file__).parent / "debs" / "fetch.sh"
PROGRAMS = ("chromium", "promtool", "prometheus", "nginx", "haproxy", "caddy")


def run_fetch(directory: Path, *installed: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a machine that has only `installed` and a shell."""
    path = directory / "path"
    path.mkdir()
    for name in ("cut", "flock", "mkdir", "rm", "touch", "tr"):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"there is no {name} here")
        (path / name).symlink_to(found)
    for name in installed:
        (path / name).write_text("#!/bin/sh\nexit 1\n")
        (path / name).chmod(0o755)
    # It also searches /usr/sbin, where a proxy may be installed.
    script = directory / "fetch.sh"
    script.write_text(FETCH.read_text("utf-8").replace("PATH=$PATH:/usr/sbin:/sbin\n", ""))
    shell = str(shutil.which("sh"))
    return subprocess.run(
        [shell, script, directory / "debs"], env={"PATH": str(path)}, capture_output=True, text=True, check=False
    )


def test_does_not_fetch_installed_programs(tmp_path: Path) -> None:
    done = run_fetch(tmp_path, *PROGRAMS)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in (tmp_path / "debs").iterdir()} == {"lock", ".installed"}


def test_reports_missing_programs_without_apt(tmp_path: Path) -> None:
    """It creates no placeholders."""
    done = run_fetch(tmp_path, "promtool", "prometheus", "dpkg")

    assert done.returncode == 1
    assert done.stderr == "there is no apt-get here; install chromium nginx haproxy caddy by other means\n"
    assert not (tmp_path / "debs" / ".installed").exists()


def test_creates_no_placeholders_if_apt_fails(tmp_path: Path) -> None:
    """It fails without creating files."""
    done = run_fetch(tmp_path, "promtool", "prometheus", "dpkg", "apt-get")

    assert done.returncode == 1
    assert not (tmp_path / "debs" / ".installed").exists()
