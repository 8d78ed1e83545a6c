"""
Query PyPI for known vulnerabilities of installed packages: ``python -m tests.audit.advisories``.

Fails if there is one. If PyPI does not answer, one line says so and it does not fail: that is no finding about the
code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
PIP_AUDIT = _ROOT / ".venv-audit/bin/pip-audit"
_SECONDS = 120.0


def installed_packages() -> list[str]:
    """Packages installed by pip, as `name==version`, without mediatord."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"], check=True, capture_output=True, text=True
    )
    return [line for line in done.stdout.splitlines() if "==" in line]


def query(packages: Sequence[str], program: Path = PIP_AUDIT) -> list[dict[str, Any]] | None:
    """The vulnerabilities of each package, as in pip-audit's JSON; None without an answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(packages))
        listed.flush()
        command = [str(program), "--requirement", listed.name, "--no-deps", "--disable-pip", "--format", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
            return None
    return found


def evaluate(found: Sequence[dict[str, Any]] | None) -> tuple[int, list[str]]:
    """The exit status and the report."""
    known = [package for package in found or () if "vulns" in package]
    weak = [package for package in known if package["vulns"]]
    lines = [
        f"{package['name']} {package['version']}: {', '.join(vuln['id'] for vuln in package['vulns'])}"
        for package in weak
    ]
    if weak:
        return 1, lines
    if not known:
        return 0, ["audit: the advisories of PyPI cannot be reached: dependencies were not looked at"]
    missing = len(found or ()) - len(known)
    return 0, [f"audit: no known weakness in {len(known)} packages; nothing is known of {missing}"]


def main() -> int:
    """The exit status."""
    status, lines = evaluate(query(installed_packages()))
    for line in lines:
        sys.stderr.write(f"{line}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
