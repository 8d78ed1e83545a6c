"""Waits for daemons that were started as an operator starts them."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

START_SECONDS = 120.0
# What a proxy keeps from the public, in ways to write it that the daemon would take.
OTHERS = ("/metrics", "/metrics/", "/%6detrics", "/metrics?x", "/ready", "/ready/", "/%72eady/")


def await_health(url: str, process: subprocess.Popen[bytes], status: int = 200) -> None:
    """
    Wait until a daemon says this of itself. :param url: with /health or the like.

    :raise AssertionError: it ended, or was not in time.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if request_status(url) == status:
            return
        try:
            raise AssertionError(f"it ended with {process.wait(0.1)}")
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"not {status} in time: {url}")


def request_status(url: str) -> int:
    """The status of an answer; 0 if there is none."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=START_SECONDS) as response:
            return int(response.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


def await_port(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """
    Wait until somebody listens there.

    :raise AssertionError: the process ended, or was not in time.
    """
    for _ in range(int(START_SECONDS * 5)):
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)) == 0:
                return
        try:
            raise AssertionError(f"it ended with {process.wait(0.5)}:\n{output.read_text('utf-8')}")
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"nobody listens:\n{output.read_text('utf-8')}")
