"""Turns, medians, percentiles, and the shape in which results are handed to the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Figures = dict[str, float]
Contender = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Target:
    """
    A figure that the project has set itself.

    :param measured: of this run.
    :param most: the goal is not to be exceeded, instead of to be reached.
    """

    name: str
    goal: float
    measured: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether this run reached it."""
        return self.measured <= self.goal if self.most else self.measured >= self.goal


@dataclass(frozen=True, slots=True)
class Table:
    """
    What one scenario found.

    :param columns: what the figures of a row are called, in the order of printing.
    :param rows: name and figures; a figure that a row has not is left out.
    :param notes: sentences under the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Figures]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Rounds:
    """
    What all contenders did in all rounds.

    :param found: by contender, its figures of each round.
    """

    found: Mapping[str, Sequence[Figures]]

    def medians(self, name: str) -> Figures:
        """Each figure of a contender, over the rounds."""
        runs = self.found[name]
        return {figure: median(run[figure] for run in runs) for figure in runs[0]}

    def ratio(self, name: str, floor: str, figure: str) -> float:
        """
        How one contender compares with another: the median of the ratios within a round.

        A neighbour that is busy for a while spoils absolute figures, and hardly those ratios.
        """
        pairs = zip(self.found[name], self.found[floor], strict=True)
        return median(ratio(run[figure], beside[figure]) for run, beside in pairs)


def take_turns(contenders: Mapping[str, Contender], rounds: int) -> Rounds:
    """Run every contender once a round; each round begins with another one."""
    names = list(contenders)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name]())
    return Rounds(found)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def ratio(part: float, whole: float) -> float:
    """0 when there is nothing to compare with."""
    return part / whole if whole else 0.0


def size_name(size: int) -> str:
    """`1k` for 1024 bytes."""
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else f"{size}b"
