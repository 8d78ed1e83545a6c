"""Decentrl events for somebody who is offline: verified, authorised, durable in SQLite, and only then answered."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.circle import Circle, deliveries, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Server, post_once
from mediatord.bench.figures import Contender, Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.line import JSON
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, Plan
from mediatord.bench.processes import child, read_line
from mediatord.wallet.throwaway import throw_away_daemon

FLOOR_GOAL = 0.45

_OF_FLOOR, _OF_FLOOR_PER_CPU = "x stock Site", "x per CPU-s"
_OURS, _FLOOR = "mediatord, durable", "stock Site, verify and store"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", _OF_FLOOR, _OF_FLOOR_PER_CPU)
# A short event: a line of chat, encrypted.
_SMALLEST = 300
_OK = "200"
_WARM_UP_SHARE = 0.25
# Commands per second to have ready for the warm-up, and after it in proportion to what was taken. A server that is
# faster than that has a shorter turn.
_FIRST_GUESS = 4000.0
_SPARE = 1.5


def measure_commands(plan: Plan) -> Table:
    """One table for all sizes."""
    rows: dict[str, Figures] = {}
    targets: list[Target] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        site = stack.enter_context(child("mediatord.bench.stock_command", str(place / DATABASE)))
        circle = gather(daemon.url)
        ours = Server.at(circle.mediator.url, daemon.pid, JSON, _OK)
        floor = Server(site.pid, int(read_line(site)), ours.path, JSON, _OK)
        accounts = {
            _OURS: Accounting(ours, lambda: stored_rows(daemon.directory / DATABASE, "pending_event")),
            _FLOOR: Accounting(floor, lambda: stored_rows(place / DATABASE, "event")),
        }
        for size in (_SMALLEST, *plan.sizes):
            supply = _Supply(circle, size, place / "bodies")
            rounds = _one_size(plan, {name: _Posting(one, supply, plan.clients) for name, one in accounts.items()})
            name = size_name(size)
            for contender in rounds.found:
                rows[f"{name}  {contender}"] = rounds.medians(contender) | _compared(rounds, contender)
            measured = rows[f"{name}  {_OURS}"][_OF_FLOOR]
            targets.append(Target(f"durable commands {name}, x stock Site", FLOOR_GOAL, measured))
    counted = accounts[_OURS]
    notes = (
        f"{plan.clients} connections, one daemon process. The stock Site parses and verifies, and stores in groups.",
        f"{counted.accepted} commands were answered 200 and {counted.stored} rows were stored.",
    )
    failures = tuple(f"{name}: {failure}" for name, one in accounts.items() for failure in one.failures)
    return Table("Commands, durable before the answer", _COLUMNS, rows, tuple(targets), notes, failures)


@dataclass(frozen=True, slots=True)
class _Supply:
    """
    Commands signed just before they are sent.

    :param size: characters of the payload.
    :param bodies: the file that they are written to.
    """

    circle: Circle
    size: int
    bodies: Path

    def write(self, count: int) -> Path:
        """So many new ones, in place of those before."""
        write_bodies(self.bodies, list(deliveries(self.circle, self.size, count)))
        return self.bodies


class _Posting:
    """One contender: has commands signed, as many as it is likely to take, and then takes them."""

    def __init__(self, accounting: Accounting, supply: _Supply, clients: int) -> None:
        self._accounting = accounting
        self._supply = supply
        self._clients = clients
        self._expected = _FIRST_GUESS

    def run(self, seconds: float) -> Figures:
        """Only the posting counts."""
        bodies = self._supply.write(self._clients + ceil(self._expected * seconds * _SPARE))
        figures = self._accounting.check(post_once(self._accounting.server, bodies, self._clients, seconds))
        self._expected = figures[PER_SECOND]
        return figures


def _one_size(plan: Plan, contenders: Mapping[str, _Posting]) -> Rounds:
    for contender in contenders.values():
        contender.run(plan.seconds * _WARM_UP_SHARE)
    return take_turns({name: _turn(one, plan.seconds) for name, one in contenders.items()}, plan.rounds)


def _turn(contender: _Posting, seconds: float) -> Contender:
    return lambda: contender.run(seconds)


def _compared(rounds: Rounds, contender: str) -> Figures:
    return {
        _OF_FLOOR: rounds.ratio(contender, _FLOOR, PER_SECOND),
        _OF_FLOOR_PER_CPU: rounds.ratio(contender, _FLOOR, PER_CPU_SECOND),
    }
