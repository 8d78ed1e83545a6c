"""What a benchmark run measures, interleaved rounds of contenders, and the tables that scenarios return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

DEFAULT_SCENARIOS = (
    "opening", "forward", "latency", "cycle", "drain", "storm", "mixed", "command", "log", "push", "sockets", "memory"
)  # fmt: skip
# Need a MongoDB replica set.
MONGODB_SCENARIOS = ("mongodb", "nodes", "elsewhere", "presence")
# Use standard protocols only, so that any mediator can be measured.
TARGET_SCENARIOS = ("forward", "latency", "cycle", "drain", "storm", "mixed")
# Run on request only: they take minutes, many cores or much disk, or change with a release only.
OPTIONAL_SCENARIOS = ("workers", "accounts", "disk", "soak", "cost", "pages", "abuse")
SCENARIOS = (*DEFAULT_SCENARIOS, *OPTIONAL_SCENARIOS, *MONGODB_SCENARIOS)

# Distinct messages per size: more than fit in a cache that would make repetitions cheaper.
DISTINCT_MESSAGES = 300
RECIPIENTS = 100
# Duration of a warm-up relative to that of a round.
WARM_UP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """
    Parameters of a run.

    :param seconds: measuring time of a contender in a round.
    :param rounds: interleaved rounds; medians are reported. Many short rounds are steadier than few long ones.
    :param clients: concurrent keep-alive connections.
    :param sockets: idle WebSockets to hold open.
    :param messages: forwards over which memory has to stay flat.
    :param events: stored events of the large history, rounded down to thousands.
    :param sizes: bytes of the innermost plaintext, and of a command's payload.
    :param mongodb: URI of a replica set in which databases may be created and dropped.
    :param accounts: numbers of registered DIDs; the first one is the baseline.
    :param queued: queued messages, beside the first number of accounts.
    :param minutes: duration of the soak.
    :param even: open-loop requests are sent at fixed intervals instead of a Poisson process.
    :param target: URL of a running mediator to measure instead of a temporary daemon; empty for none.
    :param target_did: the target's DID, if it does not publish it.
    :param target_pid: the target's process on this machine; 0 if it is remote, its CPU time is unknown then.
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


# Everything stays on, except limits that would reject this much load from one address.
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

# Names of figures that many scenarios report.
PER_SECOND = "msg/s"
PER_CPU_SECOND = "msg/CPU-s"
# CPU time of the load generator for each request.
CLIENT_US = "client us"
PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}

Figures = dict[str, float]
Contender = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class PerformanceTarget:
    """
    A goal of the project and what this run measured.

    :param most: the goal is an upper bound instead of a lower one.
    """

    name: str
    goal: float
    measured: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether this run reached the goal."""
        return self.measured <= self.goal if self.most else self.measured >= self.goal


@dataclass(frozen=True, slots=True)
class ResultTable:
    """
    The results of one scenario.

    :param columns: names of the figures, in the order of printing.
    :param rows: figures by row name; a row may lack figures.
    :param notes: sentences below the table.
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
    The figures of all contenders in all rounds.

    :param found: figures of each round, by contender.
    """

    found: Mapping[str, Sequence[Figures]]

    def medians(self, name: str) -> Figures:
        """Median of each figure of a contender."""
        runs = self.found[name]
        return {figure: median(run[figure] for run in runs) for figure in runs[0]}

    def ratio(self, name: str, floor: str, figure: str) -> float:
        """
        Median of the ratios between a contender and the baseline `floor` within each round.

        Other load on the machine distorts absolute figures much more than ratios within a round.
        """
        pairs = zip(self.found[name], self.found[floor], strict=True)
        return median(safe_ratio(run[figure], beside[figure]) for run, beside in pairs)


def run_interleaved(contenders: Mapping[str, Contender], rounds: int) -> InterleavedResults:
    """Run every contender once per round, each round starting with another one."""
    names = list(contenders)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name]())
    return InterleavedResults(found)


def compute_percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def latency_figures(
    latencies_us: Sequence[float], pattern: str = "{} ms", names: Sequence[str] = ("p50", "p99")
) -> Figures:
    """
    Percentiles in milliseconds.

    :param latencies_us: microseconds.
    :param pattern: name of a figure, with `{}` for the percentile.
    """
    ordered = sorted(latencies_us)
    return {pattern.format(name): compute_percentile(ordered, PERCENTILES[name]) / 1000 for name in names}


def safe_ratio(part: float, whole: float) -> float:
    """The quotient; 0 if the divisor is 0."""
    return part / whole if whole else 0.0


def format_size(size: int) -> str:
    """`1k` for 1024 bytes."""
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else f"{size}b"
