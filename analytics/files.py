"""Files by Hadoop's FileSystem, so that local paths, HDFS and S3 are all the same: the one room with `_jvm`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from analytics.errors import FAILED, WRONG_USAGE, AnalyticsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """
    :param path: in full, with its scheme: `file:/var/log/...`.
    :param size: bytes.
    :param modified: time of the last change, UTC, to the millisecond.
    """

    path: str
    size: int
    modified: datetime


Listing = list[FileInfo]


class Files:
    """
    Reads, writes and moves files wherever Spark can.

    Paths are strings, read as Spark reads them: without a scheme they are of the default file system.

    Every method may raise :class:`AnalyticsError` with the path in its text: exit status 2 for a path that is not
    there, 1 for anything else.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._hadoop: Any = spark._jvm.org.apache.hadoop.fs  # type: ignore[union-attr]  # classic sessions have it
        self._configuration: Any = spark._jsc.hadoopConfiguration()

    def list(self, url: str, recursive: bool = True) -> Listing:
        """All files in a directory, hidden ones too, by path; a file lists itself."""
        system, path = self._at(url)
        with _named(url):
            found = _local(path, recursive) if _is_local(system) else _remote(system, path, recursive)
            return sorted(found, key=lambda file: file.path)

    def names(self, url: str) -> Sequence[str]:
        """Names of what is directly in a directory, directories too, in order."""
        system, path = self._at(url)
        with _named(url):
            return sorted(status.getPath().getName() for status in system.listStatus(path))

    def exists(self, url: str) -> bool:
        """Whether there is a file or directory."""
        system, path = self._at(url)
        with _named(url):
            return bool(system.exists(path))

    def is_directory(self, url: str) -> bool:
        """Whether it is there, and a directory."""
        system, path = self._at(url)
        with _named(url):
            return bool(system.exists(path) and system.getFileStatus(path).isDirectory())

    def read(self, url: str, limit: int | None = None, offset: int = 0) -> bytes:
        """Bytes of a file from `offset` on, at most `limit` of them."""
        system, path = self._at(url)
        with _named(url):
            stream = system.open(path)
            try:
                stream.seek(offset)
                return bytes(stream.readAllBytes() if limit is None else stream.readNBytes(limit))
            finally:
                stream.close()

    def write(self, url: str, data: bytes) -> None:
        """A file with this content, whole or not at all; replaces one that is there."""
        system, path = self._at(url)
        draft = self._hadoop.Path(path.getParent(), f"_{path.getName()}.draft")
        with _named(url):
            try:
                _fill(system, draft, data)
                _replace(system, draft, path)
            except BaseException:
                system.delete(draft, False)
                raise

    def move(self, source: str, target: str) -> None:
        """Rename a file or directory, atomically where the file system can; nothing may stand at `target`."""
        system, path = self._at(source)
        _, goal = self._at(target)
        with _named(target):
            system.mkdirs(goal.getParent())
            if system.exists(goal):
                raise AnalyticsError(f"{target}: something is there already")
        with _named(source):
            system.getFileStatus(path)
            if not system.rename(path, goal):
                raise AnalyticsError(f"{source}: cannot be moved to {target}")

    def delete(self, url: str) -> None:
        """Delete a file, or a directory with all that is in it; nothing there is fine."""
        system, path = self._at(url)
        with _named(url):
            if not system.delete(path, True) and system.exists(path):
                raise AnalyticsError(f"{url}: cannot be deleted")

    def make_dirs(self, url: str) -> None:
        """A directory and those above it; fine if they are there."""
        system, path = self._at(url)
        with _named(url):
            if not system.mkdirs(path):
                raise AnalyticsError(f"{url}: the directory cannot be made")

    def free_bytes(self, url: str) -> int:
        """Bytes that may still be written where a path is or will be; very many on an object store."""
        system, path = self._at(url)
        with _named(url):
            there = _nearest(system, path)
            if _is_local(system):
                return shutil.disk_usage(there.toUri().getPath()).free
            return int(system.getStatus(there).getRemaining())

    def disk(self, url: str) -> int | None:
        """Which disk of this machine a path is or will be on; None for other machines."""
        system, path = self._at(url)
        with _named(url):
            return os.stat(_nearest(system, path).toUri().getPath()).st_dev if _is_local(system) else None

    def _at(self, url: str) -> tuple[Any, Any]:
        """The file system of a path and the path in full."""
        with _named(url, WRONG_USAGE):
            path = self._hadoop.Path(url)
            system = path.getFileSystem(self._configuration)
            return system, system.makeQualified(path)


def _nearest(system: Any, path: Any) -> Any:
    """The path, or the first one above it that is there."""
    while not system.exists(path):
        path = path.getParent()
    return path


def _fill(system: Any, path: Any, data: bytes) -> None:
    # No file of checksums beside one that people look at.
    stream = (system.getRawFileSystem() if _is_local(system) else system).create(path, True)
    try:
        stream.write(data)
    finally:
        stream.close()


def _replace(system: Any, source: Any, target: Any) -> None:
    """Rename a file over another; object stores and HDFS do so in two steps."""
    if _is_local(system):
        os.replace(source.toUri().getPath(), target.toUri().getPath())
        return
    system.delete(target, False)
    if not system.rename(source, target):
        raise AnalyticsError(f"{target.toString()}: cannot be written")


def _local(path: Any, recursive: bool) -> Iterator[FileInfo]:
    """What :func:`_remote` gives, without asking Java six questions about each of thousands of files."""
    top = path.toUri().getPath()
    if not os.path.isdir(top):
        yield _local_file(top)
        return
    for directory, inner, names in os.walk(top, onerror=_fail, followlinks=True):
        if not recursive:
            inner.clear()
        for name in names:
            # Hadoop's own files of checksums, and files that were packed or moved away meanwhile.
            if not (name.startswith(".") and name.endswith(".crc")):
                with suppress(FileNotFoundError):
                    yield _local_file(os.path.join(directory, name))


def _local_file(path: str) -> FileInfo:
    status = os.stat(path)
    return FileInfo(f"file:{path}", status.st_size, _EPOCH + timedelta(milliseconds=status.st_mtime_ns // 1_000_000))


def _fail(error: OSError) -> None:
    raise error


def _remote(system: Any, path: Any, recursive: bool) -> Iterator[FileInfo]:
    each = system.listFiles(path, recursive)
    while each.hasNext():
        status = each.next()
        modified = _EPOCH + timedelta(milliseconds=status.getModificationTime())
        yield FileInfo(status.getPath().toString(), status.getLen(), modified)


def _is_local(system: Any) -> bool:
    return bool(system.getUri().getScheme() == "file")


@contextmanager
def _named(url: str, exit_status: int = FAILED) -> Iterator[None]:
    """Tell errors of Java with the path, in one line."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except OSError as error:
        status = WRONG_USAGE if isinstance(error, FileNotFoundError) else exit_status
        raise AnalyticsError(f"{url}: {(error.strerror or str(error)).lower()}", status) from None
    except PySparkException as error:
        raise AnalyticsError(f"{url}: {' '.join(str(error).split())}", exit_status) from None
    except Py4JJavaError as error:
        kind = error.java_exception.getClass().getSimpleName()
        if kind == "FileNotFoundException":
            raise AnalyticsError(f"{url}: no such file or directory", WRONG_USAGE) from None
        text = str(error.java_exception.getMessage() or "").split("\n")[0]
        raise AnalyticsError(f"{url}: {text} ({kind})", exit_status) from None
