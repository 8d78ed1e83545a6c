"""Builds from a clean copy of this tree, so that leftovers of earlier builds do not get into a package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A wheel is a ZIP archive, whose earliest year is 1980.
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
    """Copy all files but hidden, built and local ones. :param target: a directory that does not exist yet."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)
    # The only hidden file that a build needs.
    shutil.copy2(ROOT / ".dockerignore", target)


def source_date() -> int:
    """
    Modification time of all files of a package, in seconds since the epoch: SOURCE_DATE_EPOCH, else that of the last
    commit, else that of `setup.cfg`, which has the version.
    """
    if (given := os.environ.get("SOURCE_DATE_EPOCH", "")).isdecimal():
        return max(int(given), _EARLIEST)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        output = ""
    return max(int(output) if output.isdecimal() else int((ROOT / "setup.cfg").stat().st_mtime), _EARLIEST)


def build_wheel(scratch: Path, out: Path) -> Path:
    """
    Build the sdist, and from it the wheel, in `out`. Return the path of the wheel.

    :param scratch: a directory for temporary files.
    :raise subprocess.CalledProcessError: the build fails.
    """
    copy_tree(scratch / "tree")
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(source_date())}
    built = scratch / "built"
    command = [sys.executable, "-m", "build", "--outdir", str(built), str(scratch / "tree")]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        raise subprocess.CalledProcessError(done.returncode, command)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(built.iterdir()):
        shutil.copy(file, out / file.name)
    return out / next(built.glob("*.whl")).name
