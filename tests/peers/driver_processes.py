"""Runs drivers as processes, each in the environment of its packages, and exchanges lines with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mediatord.bench.processes import read_line
from mediatord.wallet.temporary_daemon import stop_process

PROJECT = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
# Directory of Node packages.
NODE = ".node-peers"


class DriverUnavailable(Exception):
    """A peer cannot run here; the text says why, and how to install it."""


@dataclass(frozen=True, slots=True)
class DriverProgram:
    """
    :param file: name in the directory of drivers.
    :param environment: its virtual environment, or the directory with its `node_modules`; empty for the project's.
    """

    file: str
    environment: str = ""
    arguments: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """
        Command that starts it.

        :raise DriverUnavailable: its environment is missing.
        """
        return [*self._interpreter(), str(DRIVERS / self.file), *self.arguments]

    @property
    def working_directory(self) -> Path:
        """Directory to start it in."""
        return PROJECT / self.environment if self._is_node else PROJECT

    @property
    def _is_node(self) -> bool:
        return self.file.endswith(".mjs")

    def _interpreter(self) -> list[str]:
        if self.environment and not (PROJECT / self.environment / ".installed").exists():
            raise DriverUnavailable(f"{self.environment} is not installed; `make {self.environment}` does that")
        if not self._is_node:
            own = str(PROJECT / self.environment / "bin" / "python") if self.environment else sys.executable
            return [own, "-W", "ignore"]
        node = shutil.which("node")
        if node is None:
            raise DriverUnavailable("there is no node")
        return [node]


@dataclass(frozen=True, slots=True)
class RunningDriver:
    """
    A running driver.

    :param stderr: file with its standard error.
    :ivar versions: versions of its packages, once reported.
    """

    process: subprocess.Popen[str]
    stderr: IO[bytes]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def request(self, line: str) -> Any:
        """
        Send a line and return the response.

        :raise RuntimeError: it ended instead.
        """
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.receive()

    def receive(self) -> Any:
        """
        The next value that it writes.

        :raise RuntimeError: it ended instead; the text is the last line of its standard error.
        """
        try:
            value = json.loads(read_line(self.process))
        except RuntimeError as error:
            self.stderr.seek(0)
            lines = self.stderr.read().decode("utf-8", "replace").split("\n")
            raise RuntimeError(next((line for line in reversed(lines) if line.strip()), str(error))) from None
        if isinstance(value, dict):
            self.versions.update(value.get("versions", {}))
        return value


@contextmanager
def run_driver(program: DriverProgram) -> Iterator[RunningDriver]:
    """
    Run a driver within this context.

    :raise DriverUnavailable: it cannot run here.
    """
    # Libraries might send loopback requests through a proxy.
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    # Warnings of libraries, and messages about closed connections, are discarded.
    stderr = tempfile.TemporaryFile()
    process = subprocess.Popen(
        program.command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=program.working_directory,
        env=variables,
        encoding="utf-8",
    )
    try:
        yield RunningDriver(process, stderr)
    finally:
        stop_process(process)
        stderr.close()
