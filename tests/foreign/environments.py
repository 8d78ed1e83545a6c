"""Runs drivers in the virtual environments of third-party libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

# Time-out of a driver; its steps have shorter ones.
DRIVER_SECONDS = 900


# What an environment takes beside the network.
_NEEDS = {".venv-acapy": ", given Python 3.13: PYTHON_ACAPY=/path/to/python names one"}


def find_python(environment: str) -> Path:
    """Interpreter of `environment`, such as ``.venv-sicpa``; skips the test if there is none."""
    python = PROJECT / environment / "bin" / "python"
    if not (PROJECT / environment / ".installed").exists():
        pytest.skip(f"{environment} is not installed; `make {environment}` does that{_NEEDS.get(environment, '')}")
    return python


def environment_without_proxies() -> dict[str, str]:
    """The environment of this process without proxies, through which the libraries would send loopback requests."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def run_driver(environment: str, program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """
    Run a program of this directory to its end.

    :param given: its standard input.
    """
    return subprocess.run(
        [find_python(environment), "-W", "ignore", Path(__file__).with_name(program), *arguments],
        input=given,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**environment_without_proxies(), "PYTHONIOENCODING": "utf-8"},
        timeout=DRIVER_SECONDS,
        check=False,
    )
