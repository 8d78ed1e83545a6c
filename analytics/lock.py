"""One run at a time writes to a directory of results."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from analytics.errors import AnalyticsError
from analytics.files import Files
from analytics.places import local_path

PREFIX = "_lock-"
# A process elsewhere cannot be asked whether it lives. No run takes that long.
FORGOTTEN = timedelta(hours=24)


@contextmanager
def held(files: Files, out: str, run_id: str) -> Iterator[None]:
    """
    Hold the lock of a directory.

    Everybody writes a file of its own and then looks for others. So of two that come at the same moment neither may
    go on, but never both; and no file system needs to know exclusive creation.

    :raise AnalyticsError: another run holds it, on this host or another.
    """
    mine = f"{PREFIX}{run_id}.json"
    path = f"{out}/{mine}"
    files.write(path, json.dumps(_whoami()).encode())
    try:
        for name in files.names(out):
            if name.startswith(PREFIX) and name != mine:
                _pass_by(files, f"{out}/{name}")
        yield
    finally:
        _give_back(files, path)


def _give_back(files: Files, path: str) -> None:
    """Delete one's own lock, on this machine without Java if that is gone. Elsewhere it stays then."""
    try:
        files.delete(path)
    except Exception:
        local = local_path(path)
        if local:
            with suppress(OSError):
                local.unlink()


def _pass_by(files: Files, path: str) -> None:
    """
    Remove a lock that nobody holds any longer.

    :raise AnalyticsError: it is held.
    """
    try:
        holder = json.loads(files.read(path))
    except AnalyticsError:
        return  # It was given back meanwhile.
    if _is_held(holder):
        raise AnalyticsError(
            f"another run is writing here: process {holder['pid']} on {holder['host']} since {holder['since']};"
            f" if it is not, delete {path}"
        )
    files.delete(path)


def _is_held(holder: dict[str, Any]) -> bool:
    if holder["host"] == socket.gethostname():
        return holder["life"] in {_life(holder["pid"])} - {None}
    return datetime.now(UTC) - datetime.fromisoformat(holder["since"]) < FORGOTTEN


def _whoami() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "life": _life(os.getpid()),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _life(pid: int) -> str | None:
    """
    What tells a process from others with the same id, earlier or after a reboot; None if there is none.

    Without /proc it is the process id alone.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        began = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[19]
    except OSError:
        return str(pid)
    return f"{boot}/{began}"
