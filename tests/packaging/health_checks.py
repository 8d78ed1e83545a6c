"""Waits for daemons that are started as operators start them."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

START_SECONDS = 120.0
# Paths that a proxy must not serve publicly, in spellings that the daemon accepts.
PRIVATE_PATHS = ("/metrics", "/metrics/", "/%6detrics", "/metrics?x", "/ready", "/ready/", "/%72eady/")


def await_health(url: str, process: subprocess.Popen[bytes], status: int = 200) -> None:
    """
    Wait until a daemon responds with this status.

    :param url: URL of /health or the like.

    :raise AssertionError: the process ended, or did not answer so in time.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if request_status(url) == status:
            return
        try:
            raise AssertionError(f"process ended with {process.wait(0.1)}")
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"no status {status} in time: {url}")


def request_status(url: str) -> int:
    """Status of a response; 0 without one."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=START_SECONDS) as response:
            return int(response.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


def await_port(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """
    Wait until a process listens on the port.

    :raise AssertionError: the process ended, or did not listen in time.
    """
    for _ in range(int(START_SECONDS * 5)):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        try:
            raise AssertionError(f"process ended with {process.wait(0.5)}:\n{output.read_text('utf-8')}")
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"no listener on port {port}:\n{output.read_text('utf-8')}")
