"""The rules of `make audit` find what they are for, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.audit.advisories import evaluate, query

ROOT = Path(__file__).parents[2]
RULES, BAD = ROOT / "tests/audit/rules.yaml", ROOT / "tests/audit/bad.py.txt"
TOOLS = ROOT / ".venv-audit/bin"

needs_tools = pytest.mark.skipif(not (TOOLS / "semgrep").exists(), reason="there is no .venv-audit: make audit")


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """The bad sample as a program."""
    return Path(shutil.copy(BAD, tmp_path / "sample.py"))


def marked_lines() -> set[tuple[int, str]]:
    """Lines of the sample, and the rule that must match each."""
    lines = enumerate(BAD.read_text().splitlines(), start=1)
    return {(number, found[1]) for number, line in lines if (found := re.search(r"# bad: ([a-z-]+)$", line))}


@needs_tools
def test_rules(sample: Path) -> None:
    """Each rule matches the lines marked with its name, and no others."""
    words = [str(TOOLS / "semgrep"), "scan", "--metrics=off", "--disable-version-check", "--no-git-ignore", "--json"]
    words.append("--timeout=600")  # seconds per rule; the default of 5 is too short for a busy machine
    done = subprocess.run([*words, "--config", str(RULES), str(sample)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["errors"] == []
    found = {(item["start"]["line"], item["check_id"].rpartition(".")[2]) for item in report["results"]}
    assert found == marked_lines()
    assert {rule["id"] for rule in yaml.safe_load(RULES.read_text())["rules"]} == {name for _, name in found}


@needs_tools
def test_bandit(sample: Path) -> None:
    """The configured checks find a shell, a weak digest, evaluated data, and unverified TLS."""
    settings = str(ROOT / "pyproject.toml")
    words = [str(TOOLS / "bandit"), "--quiet", "--configfile", settings, "--format", "json", str(sample)]
    done = subprocess.run(words, capture_output=True, text=True)
    found = {item["test_id"] for item in json.loads(done.stdout)["results"]}
    assert done.returncode == 1
    assert {"B602", "B605", "B301", "B307", "B324", "B501", "B506"} <= found
    assert found.isdisjoint({"B101", "B404", "B603", "B607", "B608"})


def test_without_tools(tmp_path: Path) -> None:
    """Without the tools tests are skipped and `make audit` fails."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for stamp in (".venv/.installed", ".venv/.installed-test", "tests/audit/requirements.txt"):
        (tmp_path / stamp).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stamp).touch()
    words = ["make", "PYTHON=false", "--old-file=.venv/.installed", "--old-file=.venv/.installed-test"]
    for goal, status in ((".venv-audit/.installed", 0), ("audit", 2)):
        done = subprocess.run([*words, goal], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, "its tests are skipped" in done.stderr) == (status, True), done.stderr
    assert "nothing was checked" in done.stderr


def test_exceptions_have_reasons() -> None:
    """Each exclusion names the finding and the reason."""
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for room in ("mediatord", "analytics", "deb", "twisted")
        for path in (ROOT / room).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"# nosec\b", line)
        and not re.search(r"# nosec B\d{3}( # \w|$)", line)
        or re.search(r"nosemgrep", line)
        and not re.search(r"# nosemgrep: [a-z-]+  \w", line)
    ]
    assert bare == []


def test_advisories() -> None:
    """A known vulnerability fails; a missing answer does not, and is reported."""
    fine = {"name": "a", "version": "1", "vulns": []}
    weak = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1"}, {"id": "PYSEC-2"}]}
    unknown = {"name": "c", "skip_reason": "Dependency not found on PyPI"}
    assert evaluate([fine, weak, unknown]) == (1, ["b 2: PYSEC-1, PYSEC-2"])
    assert evaluate([fine, unknown]) == (0, ["audit: no known weakness in 1 packages; nothing is known of 1"])
    for nothing in (None, [], [unknown]):
        status, (line,) = evaluate(nothing)
        assert status == 0 and "cannot be reached" in line


def test_no_answer(tmp_path: Path) -> None:
    """A missing program, no output or other output is no answer."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o700)
    assert query(["a==1"], tmp_path / "none") is None
    assert query(["a==1"], silent) is None
