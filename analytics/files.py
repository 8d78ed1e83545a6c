"""
Files through Hadoop's FileSystem, so that local paths, HDFS and S3 work alike.

Besides the session, this is the only module that uses `_jvm`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.errors import EXIT_FAILED, EXIT_USAGE, AnalyticsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEME_PATTERN = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)


def get_local_path(url: str) -> Path | None:
    """Local path of a path without a scheme or with `file:`; None for others."""
    scheme = _SCHEME_PATTERN.match(url)
    if scheme is None:
        return Path(url)
    return Path(re.sub(r"^//(?=/)", "", url[scheme.end() :])) if scheme[1].lower() == "file" else None


# Their files appear whole when the output is closed; their renames copy, then delete.
_OBJECT_STORE_SCHEMES = frozenset({"gs", "s3", "s3a"})
_COPY_BUFFER_BYTES = 1 << 20
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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


FileList = list[FileInfo]


class FileSystem:
    """
    Reads, writes and moves files wherever Spark can.

    Paths are strings, read as Spark reads them: without a scheme they are of the default file system.

    Every method may raise :class:`AnalyticsError` with the path in its text: exit status 2 for a path that is not
    there, 1 for anything else.
    """

    def __init__(self, spark: SparkSession) -> None:
        gateway: Any = spark.sparkContext._gateway
        self._gateway = gateway
        self._java = gateway.jvm
        self._hadoop: Any = self._java.org.apache.hadoop.fs
        self._configuration: Any = spark._jsc.hadoopConfiguration()

    def list(self, url: str, recursive: bool = True) -> FileList:
        """All files below a directory, including hidden ones, sorted by path; a file lists itself."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            found = (
                _list_local_files(path, recursive)
                if _is_local_system(system)
                else _list_remote_files(system, path, recursive)
            )
            return sorted(found, key=lambda file: file.path)

    def list_names(self, url: str) -> Sequence[str]:
        """Names of files and directories directly in a directory, sorted."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            return sorted(status.getPath().getName() for status in system.listStatus(path))

    def exists(self, url: str) -> bool:
        """Whether a file or directory exists."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            return bool(system.exists(path))

    def is_directory(self, url: str) -> bool:
        """Whether a directory exists."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            return bool(system.exists(path) and system.getFileStatus(path).isDirectory())

    def read(self, url: str, limit: int | None = None, offset: int = 0) -> bytes:
        """Read at most `limit` bytes of a file from `offset`."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            stream = system.open(path)
            try:
                stream.seek(offset)
                return bytes(stream.readAllBytes() if limit is None else stream.readNBytes(limit))
            finally:
                stream.close()

    def write(self, url: str, data: bytes) -> None:
        """Write a file atomically; an existing file is replaced."""
        system, path = self._resolve(url)
        with _errors_name_path(url), self._replace_file(system, path) as stream:
            stream.write(data)

    def download(self, url: str, target: Path) -> None:
        """Copy a file to a local file, which is replaced; the data does not pass through Python."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            if not system.getFileStatus(path).isFile():
                raise AnalyticsError(f"{url}: is a directory")
            # The raw local file system writes no checksum file.
            system.copyToLocalFile(False, path, self._hadoop.Path(f"file://{target.absolute()}"), True)

    def upload(self, source: Path, url: str) -> None:
        """Copy a local file to a file, atomically; an existing file is replaced."""
        system, path = self._resolve(url)
        with _errors_name_path(str(source)):
            # Java reports a source that is missing by the path of the target.
            source.open("rb").close()
        with _errors_name_path(url), self._replace_file(system, path) as stream:
            data = self._java.java.io.FileInputStream(str(source))
            try:
                self._java.org.apache.hadoop.io.IOUtils.copyBytes(data, stream, _COPY_BUFFER_BYTES, False)
            finally:
                data.close()

    def localize(self, url: str, target: str) -> Sequence[str]:
        """
        Local paths of all files below a directory, sorted; remote files are copied.

        :param target: local directory for copies; it has the same files below it.
        """
        found = []
        for file in self.list(url):
            here = get_local_path(file.path)
            if here is None:
                here = Path(target + file.path.partition(url)[2])
                here.parent.mkdir(parents=True, exist_ok=True)
                self.download(file.path, here)
            found.append(str(here))
        return found

    def move(self, source: str, target: str) -> None:
        """Rename a file or directory, atomically where the file system can; `target` must not exist."""
        system, path = self._resolve(source)
        _, goal = self._resolve(target)
        with _errors_name_path(target):
            system.mkdirs(goal.getParent())
            if system.exists(goal):
                raise AnalyticsError(f"{target}: already exists")
        with _errors_name_path(source):
            system.getFileStatus(path)
            if not system.rename(path, goal):
                raise AnalyticsError(f"{source}: cannot move to {target}")

    def delete(self, url: str) -> None:
        """Delete a file or directory tree, if it exists."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            if not system.delete(path, True) and system.exists(path):
                raise AnalyticsError(f"{url}: cannot delete")

    def sync(self, url: str) -> None:
        """Return when everything that was written below a local path is on disk; other file systems see to it."""
        if get_local_path(url) is not None:
            os.sync()

    def make_directories(self, url: str) -> None:
        """Create a directory and its parents, unless they exist."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            if not system.mkdirs(path):
                raise AnalyticsError(f"{url}: cannot create directory")

    def get_free_bytes(self, url: str) -> int:
        """Free bytes at an existing or future path; very large on an object store."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            there = _find_existing_ancestor(system, path)
            if _is_local_system(system):
                return shutil.disk_usage(there.toUri().getPath()).free
            return int(system.getStatus(there).getRemaining())

    def get_disk_id(self, url: str) -> int | None:
        """Device id of the disk of an existing or future local path; None for other machines."""
        system, path = self._resolve(url)
        with _errors_name_path(url):
            return (
                os.stat(_find_existing_ancestor(system, path).toUri().getPath()).st_dev
                if _is_local_system(system)
                else None
            )

    @contextmanager
    def _replace_file(self, system: Any, path: Any) -> Iterator[Any]:
        """
        Output stream whose data replaces a file at the end, atomically; after an error nothing has changed.

        An object store does so by itself, and has no rename that replaces.
        """
        if system.getUri().getScheme() in _OBJECT_STORE_SCHEMES:
            with _create_file(system, path) as stream:
                yield stream
            return
        draft = self._hadoop.Path(path.getParent(), f"_{path.getName()}.draft")
        try:
            with _create_file(system, draft) as stream:
                yield stream
            self._rename_over(system, draft, path)
        except BaseException:
            system.delete(draft, False)
            raise

    def _rename_over(self, system: Any, source: Any, target: Any) -> None:
        """Rename a file, replacing another: one step, also on HDFS."""
        if _is_local_system(system):
            os.replace(source.toUri().getPath(), target.toUri().getPath())
            return
        context = self._hadoop.FileContext.getFileContext(system.getUri(), self._configuration)
        rename = self._hadoop.Options.Rename
        # Java's method takes any number of options, which is an array to Python.
        options = self._gateway.new_array(rename, 1)
        options[0] = rename.OVERWRITE
        context.rename(source, target, options)

    def _resolve(self, url: str) -> tuple[Any, Any]:
        """Return the file system of a path, and the qualified path."""
        with _errors_name_path(url, EXIT_USAGE):
            path = self._hadoop.Path(url)
            system = path.getFileSystem(self._configuration)
            return system, system.makeQualified(path)


def _find_existing_ancestor(system: Any, path: Any) -> Any:
    """The path itself or its nearest existing ancestor."""
    while not system.exists(path):
        path = path.getParent()
    return path


@contextmanager
def _create_file(system: Any, path: Any) -> Iterator[Any]:
    """Output stream of a new file; after an error an object store has no file, others may have a part of it."""
    # Write no checksum file beside files that operators look at.
    stream = (system.getRawFileSystem() if _is_local_system(system) else system).create(path, True)
    try:
        yield stream
    except BaseException:
        # To close the stream would make the file appear.
        if stream.hasCapability("fs.capability.outputstream.abortable"):
            stream.abort()
        else:
            stream.close()
        raise
    stream.close()


def _list_local_files(path: Any, recursive: bool) -> Iterator[FileInfo]:
    """As :func:`_list_remote_files`, but without six calls to Java per file."""
    yield from _list_files_below(path.toUri().getPath(), recursive)


def _list_files_below(top: str, recursive: bool) -> Iterator[FileInfo]:
    if not os.path.isdir(top):
        yield _stat_local_file(top)
        return
    for directory, inner, names in os.walk(top, onerror=_raise_error, followlinks=True):
        if not recursive:
            inner.clear()
        for name in names:
            # Skip Hadoop's checksum files, and files that vanished meanwhile.
            if not (name.startswith(".") and name.endswith(".crc")):
                with suppress(FileNotFoundError):
                    yield _stat_local_file(os.path.join(directory, name))


def _stat_local_file(path: str) -> FileInfo:
    status = os.stat(path)
    return FileInfo(
        f"file:{path}", status.st_size, _UNIX_EPOCH + timedelta(milliseconds=status.st_mtime_ns // 1_000_000)
    )


def _raise_error(error: OSError) -> None:
    raise error


def _list_remote_files(system: Any, path: Any, recursive: bool) -> Iterator[FileInfo]:
    each = system.listFiles(path, recursive)
    while each.hasNext():
        status = each.next()
        modified = _UNIX_EPOCH + timedelta(milliseconds=status.getModificationTime())
        yield FileInfo(status.getPath().toString(), status.getLen(), modified)


def _is_local_system(system: Any) -> bool:
    return bool(system.getUri().getScheme() == "file")


@contextmanager
def _errors_name_path(url: str, exit_status: int = EXIT_FAILED) -> Iterator[None]:
    """Convert errors of Java to one line that names the path."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        with _local_errors_name_path(url, exit_status):
            yield
    except PySparkException as error:
        raise AnalyticsError(f"{url}: {' '.join(str(error).split())}", exit_status) from None
    except Py4JJavaError as error:
        kind = error.java_exception.getClass().getSimpleName()
        if kind == "FileNotFoundException":
            raise AnalyticsError(f"{url}: no such file or directory", EXIT_USAGE) from None
        text = str(error.java_exception.getMessage() or "").split("\n")[0]
        raise AnalyticsError(f"{url}: {text} ({kind})", exit_status) from None


@contextmanager
def _local_errors_name_path(url: str, exit_status: int = EXIT_FAILED) -> Iterator[None]:
    """Convert errors of the operating system to one line that names the path."""
    try:
        yield
    except OSError as error:
        status = EXIT_USAGE if isinstance(error, FileNotFoundError) else exit_status
        raise AnalyticsError(f"{url}: {(error.strerror or str(error)).lower()}", status) from None


class LocalFileSystem(FileSystem):
    """Files of this machine, without Java."""

    def __init__(self) -> None:
        pass

    def list(self, url: str, recursive: bool = True) -> FileList:
        """As :class:`FileSystem`."""
        with _local_errors_name_path(url):
            return sorted(_list_files_below(_get_path(url), recursive), key=lambda file: file.path)

    def list_names(self, url: str) -> Sequence[str]:
        """As :class:`FileSystem`."""
        with _local_errors_name_path(url):
            return sorted(os.listdir(_get_path(url)))

    def exists(self, url: str) -> bool:
        """As :class:`FileSystem`."""
        return os.path.exists(_get_path(url))

    def is_directory(self, url: str) -> bool:
        """As :class:`FileSystem`."""
        return os.path.isdir(_get_path(url))

    def read(self, url: str, limit: int | None = None, offset: int = 0) -> bytes:
        """As :class:`FileSystem`."""
        with _local_errors_name_path(url), open(_get_path(url), "rb") as file:
            file.seek(offset)
            return file.read() if limit is None else file.read(limit)

    def write(self, url: str, data: bytes) -> None:
        """As :class:`FileSystem`; it is on disk when this returns."""
        with _local_errors_name_path(url):
            write_durably(Path(_get_path(url)), data)

    def download(self, url: str, target: Path) -> None:
        """As :class:`FileSystem`."""
        with _local_errors_name_path(url):
            shutil.copyfile(_get_path(url), target)

    def upload(self, source: Path, url: str) -> None:
        """As :class:`FileSystem`."""
        self.write(url, source.read_bytes())

    def move(self, source: str, target: str) -> None:
        """As :class:`FileSystem`."""
        path, goal = _get_path(source), _get_path(target)
        with _local_errors_name_path(target):
            os.makedirs(os.path.dirname(goal), exist_ok=True)
            if os.path.lexists(goal):
                raise AnalyticsError(f"{target}: already exists")
        with _local_errors_name_path(source):
            os.rename(path, goal)

    def delete(self, url: str) -> None:
        """As :class:`FileSystem`."""
        path = _get_path(url)
        with _local_errors_name_path(url), suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)

    def make_directories(self, url: str) -> None:
        """As :class:`FileSystem`."""
        with _local_errors_name_path(url):
            os.makedirs(_get_path(url), exist_ok=True)

    def get_free_bytes(self, url: str) -> int:
        """As :class:`FileSystem`."""
        return shutil.disk_usage(_find_existing_directory(_get_path(url))).free

    def get_disk_id(self, url: str) -> int | None:
        """As :class:`FileSystem`."""
        return os.stat(_find_existing_directory(_get_path(url))).st_dev


def _get_path(url: str) -> str:
    path = get_local_path(url)
    if path is None:
        raise AnalyticsError(f"{url}: only local paths can be used without Spark", EXIT_USAGE)
    return os.path.abspath(path)


def _find_existing_directory(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def write_durably(path: Path, data: bytes) -> None:
    """Replace a local file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"_{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
