"""
What a run is to measure, and for how long.

Turns, medians, percentiles, and the shape in which results are handed to the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

DEFAULT_SCENARIOS = (
    "opening", "forward", "latency", "cycle", "drain", "storm", "mixed", "command", "log", "push", "sockets", "memory"
)  # fmt: skip
# Those that need a MongoDB replica set.
MONGODB_SCENARIOS = ("mongodb", "nodes", "elsewhere", "presence")
# Those that speak standard protocols only, so that any mediator can be their subject.
TARGET_SCENARIOS = ("forward", "latency", "cycle", "drain", "storm", "mixed")
# What takes minutes, many cores or much room, or changes with a release only, has to be asked for.
OPTIONAL_SCENARIOS = ("workers", "accounts", "disk", "soak", "cost", "pages", "abuse")
SCENARIOS = (*DEFAULT_SCENARIOS, *OPTIONAL_SCENARIOS, *MONGODB_SCENARIOS)

# Distinct messages per size: more than fit in any cache that could make the second one cheaper.
DISTINCT_MESSAGES = 300
RECIPIENTS = 100


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """
    :param seconds: each contender is measured for this long, in each round.
    :param rounds: contenders take turns this often; medians count. Many short rounds are steadier than few long ones.
    :param clients: keep-alive connections that post at the same time.
    :param sockets: idle WebSockets to hold open.
    :param messages: forwards over which memory has to stay flat.
    :param events: stored ones in the larger history of which pages are read, rounded down to thousands.
    :param sizes: bytes of the plaintext inside the innermost envelope, and of a command's payload.
    :param mongodb: URI of a replica set in which databases may be made and dropped.
    :param accounts: how many DIDs are registered, in turn; the first number is what the others are compared with.
    :param queued: messages that wait, beside so many accounts as the first number says.
    :param minutes: of the soak.
    :param even: requests at fixed times come in a beat, instead of at random.
    :param target: URL of a running mediator that is measured instead of a daemon of our own; empty for none.
    :param target_did: its DID, if it does not say so itself.
    :param target_pid: of its process, if it runs on this machine; 0 otherwise, and its CPU time is unknown.
    """

    seconds: float = 1.0
    rounds: int = 7
    clients: int = 128
    sockets: int = 1000
    messages: int = 100_000
    events: int = 1_000_000
    sizes: tuple[int, ...] = (1024, 16384)
    mongodb: str = field(default="", repr=False)
    accounts: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    queued: int = 1_000_000
    minutes: float = 30.0
    even: bool = False
    target: str = ""
    target_did: str | None = None
    target_pid: int = 0


# Everything stays on; only what would refuse this much load from one address is out of the way.
DAEMON_SETTINGS = {
    "MEDIATORD_STORAGE__BACKEND": "sqlite",
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "1000000000",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "1000000",
    "MEDIATORD_LIMITS__ACCOUNTS_PER_ADDRESS_PER_DAY": "1000000000",
    "MEDIATORD_LIMITS__REGISTRATION_BYTES_PER_ADDRESS_PER_DAY": "1000000000000",
    "MEDIATORD_LIMITS__ACCOUNTS": "1000000000",
    "MEDIATORD_LIMITS__REGISTRATION_BYTES": "1000000000000",
    "MEDIATORD_QUEUE__MAX_MESSAGES": "1000000000",
    "MEDIATORD_QUEUE__MAX_BYTES": "1000000000000",
    "MEDIATORD_DECENTRL__MAX_PENDING_EVENTS": "1000000000",
    "MEDIATORD_DECENTRL__MAX_PENDING_BYTES": "1000000000000",
    "MEDIATORD_DECENTRL__MAX_STORED_EVENTS": "1000000000",
    "MEDIATORD_DECENTRL__MAX_STORED_BYTES": "1000000000000",
}

Figures = dict[str, float]
Contender = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class PerformanceTarget:
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
class ResultTable:
    """
    What one scenario found.

    :param columns: what the figures of a row are called, in the order of printing.
    :param rows: name and figures; a figure that a row has not is left out.
    :param notes: sentences under the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Figures]
    targets: tuple[PerformanceTarget, ...] = ()
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class InterleavedResults:
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
        return median(safe_ratio(run[figure], beside[figure]) for run, beside in pairs)


def run_interleaved(contenders: Mapping[str, Contender], rounds: int) -> InterleavedResults:
    """Run every contender once a round; each round begins with another one."""
    names = list(contenders)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name]())
    return InterleavedResults(found)


def compute_percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def safe_ratio(part: float, whole: float) -> float:
    """0 when there is nothing to compare with."""
    return part / whole if whole else 0.0


def format_size(size: int) -> str:
    """`1k` for 1024 bytes."""
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else f"{size}b"
