"""A clean copy of this tree to build from: what earlier builds left behind must not get into a package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# 1980 is the earliest year that an archive of a wheel knows.
_EARLIEST = 315_532_800
_LEFT_OUT = (
    ".*",
    "build",
    "dist",
    "var",
    "node_modules",
    "*.egg-info",
    "__pycache__",
    "dropin.cache",
    "_trial_temp*",
)


def copy_tree(target: Path) -> None:
    """Everything but what is built, hidden or of somebody's own. :param target: is made; must not be there."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)
    # The one hidden file that something is built by.
    shutil.copy2(ROOT / ".dockerignore", target)


def source_date() -> int:
    """
    Seconds since the epoch that every file of a package is dated: SOURCE_DATE_EPOCH, else the last commit, else the
    day of the last change to `setup.cfg`, where the version is.
    """
    if (given := os.environ.get("SOURCE_DATE_EPOCH", "")).isdecimal():
        return max(int(given), _EARLIEST)
    asked = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        told = ""
    return max(int(told) if told.isdecimal() else int((ROOT / "setup.cfg").stat().st_mtime), _EARLIEST)


def build_wheel(scratch: Path, out: Path) -> Path:
    """
    The sdist, and from it the wheel, in `out`; the path of the wheel.

    :param scratch: a directory for what is needed on the way.
    :raise subprocess.CalledProcessError: it cannot be built.
    """
    copy_tree(scratch / "tree")
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(source_date())}
    made = scratch / "made"
    command = [sys.executable, "-m", "build", "--outdir", str(made), str(scratch / "tree")]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        raise subprocess.CalledProcessError(done.returncode, command)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(made.iterdir()):
        shutil.copy(file, out / file.name)
    return out / next(made.glob("*.whl")).name
