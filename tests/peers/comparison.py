"""A scenario's frame: who takes part, who cannot, and what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mediatord.bench.results import Figures, InterleavedResults, PerformanceTarget

OURS = "mediatord"
# How many times as much as the peer: the figure that matters.
TIMES = "mediatord is x"


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """
    How a run is to be done.

    :param peers: names of those that are asked for; all of them if there is none.
    :param seconds: each contender is measured for so long, in each round.
    :param sizes: bytes of the plaintext inside the innermost envelope.
    :param sockets: how many idle ones are held, in the order of holding them.
    :param clients: connections that post.
    """

    peers: frozenset[str] = frozenset()
    rounds: int = 5
    seconds: float = 1.0
    sizes: tuple[int, ...] = (1024, 16384)
    sockets: tuple[int, ...] = (2000, 10_000)
    clients: int = 32

    def wants(self, peer: str) -> bool:
        """Whether a peer is asked for."""
        return not self.peers or peer in self.peers


@dataclass(slots=True)
class Participants:
    """
    What is to be said about those that take part, and those that do not.

    :ivar versions: of packages, by contender.
    :ivar skipped: peers that were asked for and cannot be run here, with the reason.
    """

    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def notes(self) -> Iterable[str]:
        """A sentence each."""
        for name, versions in self.versions.items():
            yield f"{name}: {', '.join(f'{package} {version}' for package, version in versions.items())}."
        for name, reason in self.skipped.items():
            yield f"{name} skipped: {reason}."


def compare_rows(rounds: InterleavedResults, prefix: str, figure: str) -> dict[str, Figures]:
    """
    Rows of all contenders, each with how many times its figure ours is.

    :param prefix: of their names, in the table.
    """
    rows = {}
    for name in rounds.found:
        times = {} if name == OURS else {TIMES: rounds.ratio(OURS, name, figure)}
        rows[f"{prefix}{name}"] = rounds.medians(name) | times
    return rows


def select_targets(
    rows: Mapping[str, Figures], prefix: str, goals: Mapping[str, float], what: str
) -> Sequence[PerformanceTarget]:
    """Those of the goals, by contender, that this run can say something about."""
    return [
        PerformanceTarget(f"{prefix.rstrip()} {what}, x {name}".strip(), goal, rows[f"{prefix}{name}"][TIMES])
        for name, goal in goals.items()
        if f"{prefix}{name}" in rows
    ]
