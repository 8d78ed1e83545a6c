"""The drivers as processes that are spoken to by lines, each in the environment of its packages."""

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
# Packages of Node.
NODE = ".node-peers"


class DriverUnavailable(Exception):
    """A peer cannot be run here; the text says why, and what would change it."""


@dataclass(frozen=True, slots=True)
class DriverProgram:
    """
    :param file: in the directory of drivers.
    :param environment: the virtual environment it needs, or the directory with its `node_modules`; empty for ours.
    """

    file: str
    environment: str = ""
    arguments: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """
        What starts it.

        :raise AbsentError: its environment was not made.
        """
        return [*self._interpreter(), str(DRIVERS / self.file), *self.arguments]

    @property
    def place(self) -> Path:
        """Where to start it."""
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
    A program that runs.

    :param complaints: its standard error.
    :ivar versions: of its packages, as soon as it has said them.
    """

    process: subprocess.Popen[str]
    complaints: IO[bytes]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def ask(self, line: str) -> Any:
        """
        Say a line, and hear the answer.

        :raise RuntimeError: it ended instead.
        """
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.hear()

    def hear(self) -> Any:
        """
        The next thing it says.

        :raise RuntimeError: it ended instead; the text is the last line it wrote on standard error.
        """
        try:
            value = json.loads(read_line(self.process))
        except RuntimeError as error:
            self.complaints.seek(0)
            lines = self.complaints.read().decode("utf-8", "replace").split("\n")
            raise RuntimeError(next((line for line in reversed(lines) if line.strip()), str(error))) from None
        if isinstance(value, dict):
            self.versions.update(value.get("versions", {}))
        return value


@contextmanager
def run_driver(program: DriverProgram) -> Iterator[RunningDriver]:
    """
    The program, until the end of the `with`.

    :raise AbsentError: it cannot be run here.
    """
    # A library might send what goes to the loopback interface through a proxy.
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    # What libraries warn of, and what servers say when clients leave without a word, is of no interest.
    complaints = tempfile.TemporaryFile()
    process = subprocess.Popen(
        program.command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        cwd=program.place,
        env=variables,
        encoding="utf-8",
    )
    try:
        yield RunningDriver(process, complaints)
    finally:
        stop_process(process)
        complaints.close()
