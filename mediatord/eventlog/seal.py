"""
Closes a log segment for good: on disk, and compressed if asked to. Run as a program, at low priority.

It is a process of its own because compressing and waiting for the disk would hold up the reactor. It imports nothing
of mediatord, so that it starts in no time.
"""

import contextlib
import gzip
import os
import shutil
import sys
from pathlib import Path


def seal(path: Path, compress: bool) -> None:
    """
    Flush `path` to disk; or replace it by `path.gz`, which is there whole or not at all.

    A segment that is gone, because it was the oldest of too many, is no error.
    """
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return
    with source:
        if compress:
            _compress(path, source)
        else:
            os.fsync(source.fileno())
    if compress:
        path.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _compress(path, source):  # type: ignore[no-untyped-def]  # the stubs of gzip do not agree with those of shutil
    draft = path.with_name(path.name + ".gz.tmp")
    with draft.open("wb") as target:
        os.fchmod(target.fileno(), os.fstat(source.fileno()).st_mode & 0o777)
        # No name and no time inside: the same segment always gives the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
    draft.rename(path.with_name(path.name + ".gz"))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a sandbox may not like it
        os.nice(15)
    seal(Path(sys.argv[1]), compress="--gzip" in sys.argv[2:])
