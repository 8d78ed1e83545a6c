"""The wheel: that nothing is missing from it, and that what it installs runs."""

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
long = pytest.mark.skipif(
    not os.environ.get("PACKAGE_TEST"), reason="builds and installs for minutes: make package-test"
)


def data_files() -> Iterator[Path]:
    """What is no Python in the packages, relative to the root."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and path.suffix not in {".py", ".pyc"} and path.name != "dropin.cache":
                yield path.relative_to(ROOT)


def test_all_data_is_declared() -> None:
    """Whatever lies beside the modules matches a pattern of setup.cfg, or the wheel would lack it."""
    found = ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    declared = [
        f"{package.replace('.', '/')}/{pattern.strip()}"
        for package, patterns in found["options.package_data"].items()
        for pattern in patterns.replace(",", "\n").split("\n")
        if pattern.strip()
    ]
    missing = [str(path) for path in data_files() if not any(fnmatch(str(path), one) for one in declared)]
    assert missing == []


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Iterator[Path]:
    """Where the programs of a new environment are that has the wheel and what it asks for."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        quiet = ("--quiet", "--disable-pip-version-check")
        subprocess.run([f"{place}/bin/pip", "install", *quiet, f"{wheel}[mongodb]"], check=True)
        yield Path(place) / "bin"


def run(*command: str | Path, where: Path) -> str:
    """
    What a command prints, away from this tree and with nothing of ours in its environment.

    :raise AssertionError: it failed, or complained.
    """
    environ = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(where)}
    done = subprocess.run(command, cwd=where, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@long
def test_what_is_in_the_wheel(wheel: Path) -> None:
    """Every module and every data file; no tests, and nothing that builds packages."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    wanted = {str(path) for path in (*modules, *data_files())} | {"twisted/plugins/mediatord_plugin.py"}
    assert wanted - names == set()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {*PACKAGES, "twisted"}
    shared = {name.partition(".data/data/share/mediatord/")[2] for name in names} - {""}
    ours = {
        f"{name}/{path.name}"
        for name in ("nginx", "prometheus", "grafana")
        for path in (ROOT / "etc" / name).iterdir()
    }
    ours |= {f"systemd/{path.name}" for path in (ROOT / "systemd").iterdir()}
    assert shared == ours | {"examples/mediator.yaml", "examples/analytics.yaml"}
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


@long
def test_what_is_in_the_sdist(wheel: Path) -> None:
    """All that a package can be built and tested from."""
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


@long
def test_the_plugin_is_listed(programs: Path, tmp_path: Path) -> None:
    """By both programs of Twisted."""
    for program in ("twist", "twistd"):
        assert "Mediator for DIDComm v2 and Decentrl wallets" in run(programs / program, "--help", where=tmp_path)


@long
def test_it_runs(programs: Path, tmp_path: Path) -> None:
    """From the first command to an answer."""
    assert run(programs / "mediatord", "--version", where=tmp_path).startswith("mediatord ")
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    run(programs / "mediatord", "init", "--dir", "mine", "--public-url", url, where=tmp_path)
    config = tmp_path / "mine/mediator.yaml"
    run(programs / "mediatord", "check-config", "--config", config, where=tmp_path)
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [programs / "mediatord", "run", "--config", config], cwd=tmp_path, stdout=output, stderr=output
        )
        try:
            await_health(f"{url}/health", process)
            assert "<html" in run(programs / "python", "-c", page(f"{url}/invitation"), where=tmp_path)
            assert "openapi" in run(programs / "python", "-c", page(f"{url}/openapi.json"), where=tmp_path)
        finally:
            process.terminate()
            assert process.wait(60) == 0, (tmp_path / "output").read_text()


def page(url: str) -> str:
    """A program that prints what a browser gets there."""
    return (
        "from urllib.request import *\n"
        f"asked = Request({url!r}, headers={{'Accept': 'text/html, application/json;q=0.5'}})\n"
        "print(build_opener(ProxyHandler({})).open(asked).read().decode())"
    )


@long
def test_the_unit_is_brought(programs: Path, tmp_path: Path) -> None:
    """Where what `mediatord init` prints for the system's daemon has it."""
    program = "from mediatord.cli.init import find_installed_units; print(find_installed_units())"
    place = Path(run(programs / "python", "-c", program, where=tmp_path).strip())
    assert (place / "mediatord.service").is_file() and (place / "mediatord.socket").is_file()


@long
def test_the_extras(programs: Path, tmp_path: Path) -> None:
    """The one that was asked for brings MongoDB's driver; the others are known by name."""
    program = "import txmongo, importlib.metadata as m; print(m.metadata('mediatord').get_all('Provides-Extra'))"
    told = run(programs / "python", "-c", program, where=tmp_path)
    for extra in ("mongodb", "mongo", "analytics"):
        assert repr(extra) in told
