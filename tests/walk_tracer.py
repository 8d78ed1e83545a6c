"""
Records which Python functions of `mediatord/` a daemon calls, on request.

A `sitecustomize` module that :mod:`tests.walk` puts on the path of a daemon calls :func:`install` in each of its
processes. Each then listens on a UNIX socket named after its pid and answers one command a line: `start` forgets what
was recorded and records, `count` says how many calls were recorded, `stop` ends recording and answers the calls.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_PREFIX = str(Path(__file__).parents[1] / "mediatord") + os.sep
# The loop, which runs for all requests together, and whose calls would otherwise be Twisted's.
_REACTOR = _PREFIX + os.path.join("runtime", "epoll_reactor.py")


class CallRecorder:
    """Profile function for all threads; while enabled, records thread and file of each call."""

    def __init__(self) -> None:
        self.enabled = False
        self.calls: list[tuple[int, str, str]] = []

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by the interpreter."""
        if self.enabled and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(_PREFIX) and code.co_filename != _REACTOR:
                self.calls.append((threading.get_ident(), code.co_filename[len(_PREFIX) :], code.co_qualname))

    def answer(self, command: str) -> Any:
        """Carry out a command; return its response."""
        if command == "start":
            self.calls = []
            self.enabled = True
        elif command == "stop":
            self.enabled = False
            return self.calls
        return len(self.calls)


def install(directory: str) -> None:
    """Trace this process, and listen for commands in `directory`."""
    recorder = CallRecorder()
    threading.Thread(target=_serve, args=(recorder, Path(directory) / str(os.getpid())), daemon=True).start()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)


def _serve(recorder: CallRecorder, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    stream.write(json.dumps(recorder.answer(line.strip())) + "\n")
                    stream.flush()
