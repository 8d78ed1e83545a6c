"""Whether pages of a long history take longer to read than those of a short one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import click

from mediatord.bench.circle import join, mediator_at
from mediatord.bench.drive import Server, post_once
from mediatord.bench.feed import Feed
from mediatord.bench.figures import Contender, Figures, Rounds, Table, Target, percentile, take_turns
from mediatord.bench.history import BATCH, History, Page
from mediatord.bench.line import JSON, Line
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, Plan
from mediatord.wallet.throwaway import throw_away_daemon

SMALL_GOAL = 0.5

# A thousand events of a history go into one command.
_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LIMITS__MAX_MESSAGE_BYTES": "8388608"}
_SMALL, _LARGE = "small", "large"
_PUBLIC_SHARE = 10
_AT_ONCE = 5000
# There are many lists to read, and a page takes milliseconds.
_TURN_SHARE = 0.1
_FEWEST_READ = 3
_RATE, _MILLISECONDS, _OF_SMALL = "pages/s", "p50 ms", "x small"
_COLUMNS = (*(f"{name} {figure}" for figure in (_MILLISECONDS, _RATE) for name in (_SMALL, _LARGE)), _OF_SMALL)


@dataclass(frozen=True, slots=True)
class _Shelf:
    """
    One identity at a daemon of its own, with as many events as are to be read.

    :param published: how many public ones.
    """

    server: Server
    history: History
    feed: Feed
    stored: int
    published: int

    def pages(self) -> dict[str, Page]:
        """All there is to ask for."""
        return self.history.pages(self.stored) | self.feed.pages(self.published)

    def fill(self, bodies: Path, connections: int) -> Iterator[int]:
        """
        Store and publish; yields how many were, after each step.

        :param bodies: a file to put commands into.
        :raise RuntimeError: something was refused.
        """
        yield from self.history.fill(self.stored)
        for first in range(0, self.published, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, self.published))
            write_bodies(bodies, self.feed.publications(numbers))
            load = post_once(self.server, bodies, connections)
            if load.accepted != len(numbers):
                raise RuntimeError(f"not all public events were accepted: {load.statuses}")
            yield len(numbers)


def measure_pages(plan: Plan) -> Table:
    """One table for all that is asked for."""
    large = max(plan.events // BATCH * BATCH, BATCH)
    notes = []
    with ExitStack() as stack:
        shelves = {name: stack.enter_context(_shelf(count)) for name, count in ((_SMALL, BATCH), (_LARGE, large))}
        with TemporaryDirectory(prefix="mediatord-bench-") as place:
            for name, shelf in shelves.items():
                notes.append(f"{name}: {_filled(shelf, Path(place) / 'bodies', plan.clients)}")
        small, other = (shelves[name].pages() for name in (_SMALL, _LARGE))
        rounds = {}
        for name in small:
            rounds[name] = _compare(plan, small[name], other[name], changing=False)
            rounds[f"{name}, after a change"] = _compare(plan, small[name], other[name], changing=True)
    rows = {name: _row(found) for name, found in rounds.items()}
    targets = tuple(Target(f"rate of {name}, x small", SMALL_GOAL, row[_OF_SMALL]) for name, row in rows.items())
    return Table("Pages of a long history and of a short one", _COLUMNS, rows, targets, tuple(notes))


@contextmanager
def _shelf(count: int) -> Iterator[_Shelf]:
    with ExitStack() as stack:
        daemon = stack.enter_context(throw_away_daemon(_SETTINGS))
        mediator = mediator_at(daemon.url)
        line, reading = (stack.enter_context(Line(mediator.url)) for _ in range(2))
        member = join(mediator, line, "owner")
        server = Server.at(mediator.url, daemon.pid, JSON, "200")
        published = max(BATCH, count // _PUBLIC_SHARE // BATCH * BATCH)
        yield _Shelf(server, History(member, line), Feed(member, line, reading), count, published)


def _filled(shelf: _Shelf, bodies: Path, connections: int) -> str:
    """Fill it, and say how that went."""
    start = perf_counter()
    what = f"{shelf.stored:,} stored and {shelf.published:,} public events"
    with click.progressbar(length=shelf.stored + shelf.published, label=what, file=sys.stderr) as bar:
        for done in shelf.fill(bodies, connections):
            bar.update(done)
    return f"{what}, there after {perf_counter() - start:,.0f} s"


def _compare(plan: Plan, small: Page, large: Page, *, changing: bool) -> Rounds:
    seconds = plan.seconds * _TURN_SHARE
    for page in (small, large):
        page.read()
    contenders = {_SMALL: _turn(small, seconds, changing), _LARGE: _turn(large, seconds, changing)}
    return take_turns(contenders, plan.rounds)


def _turn(page: Page, seconds: float, changing: bool) -> Contender:
    def read() -> Figures:
        spent: list[float] = []
        while len(spent) < _FEWEST_READ or sum(spent) < seconds:
            if changing:
                page.change()
            spent.append(page.read())
        return {_RATE: len(spent) / sum(spent), _MILLISECONDS: percentile(spent, 0.5) * 1000}

    return read


def _row(found: Rounds) -> Figures:
    figures = {f"{name} {figure}": number for name in found.found for figure, number in found.medians(name).items()}
    return {**figures, _OF_SMALL: found.ratio(_LARGE, _SMALL, _RATE)}
