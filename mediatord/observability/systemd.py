"""Service notifications to systemd (`Type=notify`, sd_notify(3)); no-ops without systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from time import monotonic_ns

# `STATUS=` of a daemon that serves requests, and of one that waits for its store.
STATUS_SERVING = "serving"
STATUS_WAITING_FOR_STORE = "waiting for the store"


def notify_systemd(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """
    Send a state such as `READY=1` or `WATCHDOG=1` to the socket in NOTIFY_SOCKET.

    Never blocks and never raises; returns whether it was sent.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
            # A leading @ denotes the zero byte of an abstract socket name.
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        return False
    return True


def build_reloading_state() -> str:
    """State at the start of a reload, which ends with `READY=1` (`Type=notify-reload`)."""
    return f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}"


def get_watchdog_interval(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds between two `WATCHDOG=1`: half of systemd's timeout. None if the watchdog is off for this process."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = environ.get("WATCHDOG_USEC", "")
    return int(text) / 2e6 if text.isdecimal() and int(text) else None
