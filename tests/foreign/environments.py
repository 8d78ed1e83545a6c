"""Runs drivers in the virtual environments of third-party libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

# Time-out of a driver; its steps have shorter ones.
DRIVER_SECONDS = 900


def find_python(environment: str) -> Path:
    """Interpreter of `environment`, ``.venv-sicpa`` or ``.venv-indicio``; skips the test if there is none."""
    python = PROJECT / environment / "bin" / "python"
    if not (PROJECT / environment / ".installed").exists():
        pytest.skip(f"{environment} is not installed; `make {environment}` does that")
    return python


def run_driver(environment: str, program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """
    Run a program of this directory to its end.

    :param given: its standard input.
    """
    # The libraries would send loopback requests through a proxy.
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [find_python(environment), "-W", "ignore", Path(__file__).with_name(program), *arguments],
        input=given,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**variables, "PYTHONIOENCODING": "utf-8"},
        timeout=DRIVER_SECONDS,
        check=False,
    )
