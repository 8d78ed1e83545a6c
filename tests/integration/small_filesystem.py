"""A small file system of its own for tests that fill a disk."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import SkipTest, TestCase


def mount_small_filesystem(test: TestCase, size: int) -> Path:
    """
    An empty tmpfs of so many bytes, unmounted and removed at the end of the test.

    :raise SkipTest: nothing can be mounted here.
    """
    place = Path(tempfile.mkdtemp(prefix="mediatord-disk-"))
    test.addCleanup(shutil.rmtree, place)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "mediatord-test", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SkipTest(f"no mount command: {error.strerror}") from None
    if done.returncode != 0:
        raise SkipTest(f"a small disk cannot be mounted, run as root to enable: {done.stderr.strip()}")
    test.addCleanup(subprocess.run, ["umount", str(place)], check=True)
    return place
