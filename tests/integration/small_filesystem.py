"""Mounts small file systems for tests that fill a disk."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import SkipTest, TestCase


def mount_small_filesystem(test: TestCase, size: int) -> Path:
    """
    An empty tmpfs of this size, unmounted and removed at the end of the test.

    :raise SkipTest: file systems cannot be mounted here.
    """
    directory = Path(tempfile.mkdtemp(prefix="mediatord-disk-"))
    test.addCleanup(shutil.rmtree, directory)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "mediatord-test", str(directory)]
    try:
        result = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SkipTest(f"no mount command: {error.strerror}") from None
    if result.returncode != 0:
        raise SkipTest(f"a small disk cannot be mounted, run as root to enable: {result.stderr.strip()}")
    test.addCleanup(subprocess.run, ["umount", str(directory)], check=True)
    return directory
