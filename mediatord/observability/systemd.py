"""Tells systemd how the daemon is (`Type=notify`); without systemd it does nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from time import monotonic_ns

# What `STATUS=` says of a daemon that takes work, and of one whose store is away.
STATUS_SERVING = "serving"
STATUS_WAITING_FOR_STORE = "waiting for the store"


def notify_systemd(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """
    Send `READY=1`, `STATUS=serving`, `WATCHDOG=1` and the like to the socket that NOTIFY_SOCKET names.

    Never waits and never raises; returns whether it was sent.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
            # An @ stands for the zero byte that begins the name of an abstract socket.
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        return False
    return True


def build_reloading_state() -> str:
    """What systemd is told when a reload begins, which ends with `READY=1` (`Type=notify-reload`)."""
    return f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}"


def get_watchdog_interval(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds between two `WATCHDOG=1`, half of what systemd allows; None when it does not watch this process."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = environ.get("WATCHDOG_USEC", "")
    return int(text) / 2e6 if text.isdecimal() and int(text) else None
