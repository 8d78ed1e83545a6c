"""Common parts of the scenarios: options, participants, rows and targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mediatord.bench.results import Figures, InterleavedResults, PerformanceTarget

OURS = "mediatord"
# Ratio to the peer, which the targets refer to.
TIMES = "mediatord is x"


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """
    Options of a run.

    :param peers: names of the requested peers; all if empty.
    :param seconds: duration of one measurement of a contender in a round.
    :param sizes: bytes of the plaintext in the innermost envelope.
    :param sockets: numbers of idle sockets to hold, in this order.
    :param clients: connections that post.
    """

    peers: frozenset[str] = frozenset()
    rounds: int = 5
    seconds: float = 1.0
    sizes: tuple[int, ...] = (1024, 16384)
    sockets: tuple[int, ...] = (2000, 10_000)
    clients: int = 32

    def wants(self, peer: str) -> bool:
        """Whether a peer is requested."""
        return not self.peers or peer in self.peers


@dataclass(slots=True)
class Participants:
    """
    Contenders that took part, and peers that did not.

    :ivar versions: package versions, by contender.
    :ivar skipped: requested peers that cannot run here, with the reason.
    """

    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def notes(self) -> Iterable[str]:
        """One sentence each."""
        for name, versions in self.versions.items():
            yield f"{name}: {', '.join(f'{package} {version}' for package, version in versions.items())}."
        for name, reason in self.skipped.items():
            yield f"{name} skipped: {reason}."


def compare_rows(rounds: InterleavedResults, prefix: str, figure: str) -> dict[str, Figures]:
    """
    Rows of all contenders, each with the ratio of mediatord's figure to its own.

    :param prefix: prefix of their names in the table.
    """
    rows = {}
    for name in rounds.found:
        times = {} if name == OURS else {TIMES: rounds.ratio(OURS, name, figure)}
        rows[f"{prefix}{name}"] = rounds.medians(name) | times
    return rows


def select_targets(
    rows: Mapping[str, Figures], prefix: str, goals: Mapping[str, float], what: str
) -> Sequence[PerformanceTarget]:
    """Targets whose contenders were measured."""
    return [
        PerformanceTarget(f"{prefix.rstrip()} {what}, x {name}".strip(), goal, rows[f"{prefix}{name}"][TIMES])
        for name, goal in goals.items()
        if f"{prefix}{name}" in rows
    ]
