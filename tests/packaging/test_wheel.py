"""The wheel: it is complete, and what it installs runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deb.tree import ROOT
from mediatord.wallet.temporary_daemon import find_free_port
from tests.packaging.health_checks import await_health

PACKAGES = ("mediatord", "analytics")
package_test = pytest.mark.skipif(
    not os.environ.get("PACKAGE_TEST"), reason="builds and installs for minutes: make package-test"
)


def data_files() -> Iterator[Path]:
    """Files in the packages that are no Python modules, relative to the root."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and path.suffix not in {".py", ".pyc"} and path.name != "dropin.cache":
                yield path.relative_to(ROOT)


def test_data_files_are_declared() -> None:
    """Each matches a pattern of setup.cfg; the wheel would lack it otherwise."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    declared = [
        f"{package.replace('.', '/')}/{pattern.strip()}"
        for package, patterns in setup["options.package_data"].items()
        for pattern in patterns.replace(",", "\n").split("\n")
        if pattern.strip()
    ]
    missing = [str(path) for path in data_files() if not any(fnmatch(str(path), pattern) for pattern in declared)]
    assert missing == []


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Iterator[Path]:
    """Programs of a new virtual environment with the wheel and its dependencies."""
    with tempfile.TemporaryDirectory() as environment:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        quiet = ("--quiet", "--disable-pip-version-check")
        subprocess.run([f"{environment}/bin/pip", "install", *quiet, f"{wheel}[mongodb]"], check=True)
        yield Path(environment) / "bin"


def run_outside_tree(*command: str | Path, directory: Path) -> str:
    """
    Output of a command, run outside this tree and with a clean environment.

    :raise AssertionError: it failed or wrote to standard error.
    """
    environ = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(directory)}
    result = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), (
        f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    )
    return result.stdout


@package_test
def test_wheel_contains_modules_and_data(wheel: Path) -> None:
    """The wheel has every module and data file, and no tests or build tools."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    wanted = {str(path) for path in (*modules, *data_files())} | {"twisted/plugins/mediatord_plugin.py"}
    assert wanted - names == set()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {*PACKAGES, "twisted"}
    shared = {name.partition(".data/data/share/mediatord/")[2] for name in names} - {""}
    data = {
        f"{name}/{path.name}"
        for name in ("nginx", "prometheus", "grafana", "spark")
        for path in (ROOT / "etc" / name).iterdir()
    }
    data |= {f"systemd/{path.name}" for path in (ROOT / "systemd").iterdir()}
    assert shared == data | {"examples/mediator.yaml", "examples/analytics.yaml"}
    completions = {name.partition(".data/data/share/")[2] for name in names if "/share/mediatord/" not in name} - {""}
    assert completions == {
        f"{directory}/{name}"
        for directory, names in (
            ("bash-completion/completions", ("mediatord", "mediatord-analytics")),
            ("zsh/site-functions", ("_mediatord", "_mediatord-analytics")),
            ("fish/vendor_completions.d", ("mediatord.fish", "mediatord-analytics.fish")),
        )
        for name in names
    }
    assert [name for name in names if name.startswith("twisted/")] == ["twisted/plugins/mediatord_plugin.py"]


@package_test
def test_sdist_contains_what_builds_need(wheel: Path) -> None:
    """The sdist has what builds and tests of packages need."""
    source = next(wheel.parent.glob("*.tar.gz"))
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "Makefile",
        "deb/build.py",
        "deb/postinst",
        ".dockerignore",
        "Containerfile",
        "systemd/mediatord.socket",
        "tests/packaging/test_wheel.py",
    ):
        assert wanted in names


@package_test
def test_twist_and_twistd_list_the_plugin(programs: Path, tmp_path: Path) -> None:
    """Both programs of Twisted list the plugin."""
    for program in ("twist", "twistd"):
        assert "Mediator for DIDComm v2 and Decentrl wallets" in run_outside_tree(
            programs / program, "--help", directory=tmp_path
        )


@package_test
def test_installed_program_serves(programs: Path, tmp_path: Path) -> None:
    """The installed program works, from `init` to a response."""
    assert run_outside_tree(programs / "mediatord", "--version", directory=tmp_path).startswith("mediatord ")
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    run_outside_tree(programs / "mediatord", "init", "--dir", "mine", "--public-url", url, directory=tmp_path)
    config = tmp_path / "mine/mediator.yaml"
    run_outside_tree(programs / "mediatord", "check-config", "--config", config, directory=tmp_path)
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [programs / "mediatord", "run", "--config", config], cwd=tmp_path, stdout=output, stderr=output
        )
        try:
            await_health(f"{url}/health", process)
            assert "<html" in run_outside_tree(
                programs / "python", "-c", fetch_program(f"{url}/invitation"), directory=tmp_path
            )
            assert "openapi" in run_outside_tree(
                programs / "python", "-c", fetch_program(f"{url}/openapi.json"), directory=tmp_path
            )
        finally:
            process.terminate()
            assert process.wait(60) == 0, (tmp_path / "output").read_text()


def fetch_program(url: str) -> str:
    """A program that prints what a browser gets from a URL."""
    return (
        "from urllib.request import *\n"
        f"request = Request({url!r}, headers={{'Accept': 'text/html, application/json;q=0.5'}})\n"
        "print(build_opener(ProxyHandler({})).open(request).read().decode())"
    )


@package_test
def test_unit_is_installed_where_init_says(programs: Path, tmp_path: Path) -> None:
    """The units are in the directory that `mediatord init` prints."""
    program = "from mediatord.cli.init import find_installed_units; print(find_installed_units())"
    units = Path(run_outside_tree(programs / "python", "-c", program, directory=tmp_path).strip())
    assert (units / "mediatord.service").is_file() and (units / "mediatord.socket").is_file()


@package_test
def test_extras_install_their_packages(programs: Path, tmp_path: Path) -> None:
    """The requested extra installs the MongoDB driver; all extras are declared."""
    program = "import txmongo, importlib.metadata as m; print(m.metadata('mediatord').get_all('Provides-Extra'))"
    extras = run_outside_tree(programs / "python", "-c", program, directory=tmp_path)
    for extra in ("mongodb", "mongo", "analytics-duckdb", "analytics"):
        assert repr(extra) in extras
