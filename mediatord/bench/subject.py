"""What is measured: a daemon of our own, started for it, or a mediator of any make that is running somewhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mediatord.bench.cores import Cores, on, split
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import Server
from mediatord.bench.finding import find_mediator
from mediatord.bench.plan import DAEMON_SETTINGS, Plan
from mediatord.bench.processes import child, cpu_seconds, read_line, write_line
from mediatord.bench.wallets import Setup
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.throwaway import throw_away_daemon

# Many mediators answer 202 as the specification says, some 200 or 204.
SUCCESS = "202 200 204"


class Residents:
    """
    The process that holds some wallets of the subject.

    :ivar bodies: the file with forwards to them.
    """

    def __init__(self, process: subprocess.Popen[str], bodies: Path) -> None:
        self._process = process
        self.bodies = bodies

    def do(self, what: str, **details: Any) -> dict[str, Any]:
        """
        Have something done and wait for it.

        :raise RuntimeError: the process ended; what it said is on stderr.
        """
        self.begin(what, **details)
        return self.result()

    def begin(self, what: str, **details: Any) -> None:
        """Have something done; :meth:`result` waits for it."""
        write_line(self._process, json.dumps({"do": what, **details}))

    def result(self) -> dict[str, Any]:
        """What came of it."""
        found: dict[str, Any] = json.loads(read_line(self._process))
        return found


@contextmanager
def residing(setup: Setup) -> Iterator[Residents]:
    """Enrolled wallets in a process of their own, until it is ended."""
    with child("mediatord.bench.wallets") as process:
        write_line(process, json.dumps(asdict(setup)))
        read_line(process)
        yield Residents(process, Path(setup.bodies))


@dataclass(frozen=True, slots=True)
class Subject:
    """
    :param url: where it was found.
    :param did: by which it was asked for, if it does not say so itself.
    :param pid: 0 when it runs elsewhere.
    :param database: its messages, if it is ours.
    """

    url: str
    did: str | None
    mediator: Mediator
    pid: int
    database: Path | None
    cores: Cores
    place: Path

    @property
    def server(self) -> Server:
        """Where forwards go."""
        return Server.at(self.mediator.http_uri, self.pid, success=SUCCESS)

    @property
    def note(self) -> str:
        """A sentence about who runs where."""
        return self.cores.note if self.database is not None else "The target runs where it was started."

    @property
    def stored(self) -> int | None:
        """How many messages are in its database; None when nobody can look."""
        return None if self.database is None else stored_rows(self.database)

    @property
    def cpu_seconds(self) -> float:
        """So far; 0 of one that runs elsewhere."""
        return cpu_seconds(self.pid) if self.pid else 0.0

    @contextmanager
    def residents(self, wallets: int, size: int, letters: int) -> Iterator[Residents]:
        """
        Enrolled wallets in a process of their own.

        Those of a mediator that is not ours fetch and acknowledge in the end what waits for them, and leave.

        :param letters: so many different forwards to them are prepared.
        """
        with TemporaryDirectory(dir=self.place) as place, ExitStack() as stack:
            setup = Setup(self.url, self.did, wallets, size, letters, f"{place}/bodies")
            residents = stack.enter_context(residing(setup))
            yield residents
            if self.database is None:
                residents.do("close")
                residents.do("drain", connections=1, limit=50)
                residents.do("leave")


@contextmanager
def subject(plan: Plan, settings: Mapping[str, str] | None = None) -> Iterator[Subject]:
    """
    A daemon of our own on a core of its own, or the plan's target. Within, we run on the cores of the clients.

    :param settings: of a daemon of our own, besides the usual ones.
    """
    cores = split()
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        if plan.target:
            mediator = find_mediator(plan.target, plan.target_did)
            yield Subject(plan.target, plan.target_did, mediator, plan.target_pid, None, cores, place)
            return
        with on(cores.server):
            daemon = stack.enter_context(throw_away_daemon({**DAEMON_SETTINGS, **(settings or {})}))
        stack.enter_context(on(cores.clients))
        mediator = find_mediator(daemon.url)
        yield Subject(daemon.url, None, mediator, daemon.pid, daemon.directory / DATABASE, cores, place)
