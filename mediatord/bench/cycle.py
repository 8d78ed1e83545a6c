"""Messages to wallets that are online: forwarded, stored, pushed, acknowledged, and gone from the store."""

from __future__ import annotations

from typing import Any

from mediatord.bench.drive import CLIENT_US, PER_CPU_SECOND, PER_SECOND, post_for
from mediatord.bench.figures import Figures, Table, Target, percentile, ratio, size_name, take_turns
from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.subject import Residents, Subject, subject

FORWARD_GOAL = 0.35
PUSH_P99_MS = 25.0

WALLETS = 64
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The load at which latencies are promised.
PROMISED = 0.7

_CYCLE, _FORWARD = "cycle", "forward only"
_OF_FORWARD = "of forward"
_COLUMNS = (
    PER_SECOND, PER_CPU_SECOND, _OF_FORWARD, "202 p50", "push p50", "push p99", "push p99.9", "late %", CLIENT_US
)  # fmt: skip
_WARM_UP_SHARE = 0.25


def measure_cycle(plan: Plan) -> Table:
    """As many cycles as come through, beside forwards to wallets that are offline; then at fixed times."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    failures: list[str] = []
    with subject(plan) as one, one.residents(WALLETS, size, WALLETS * 4) as online:
        online.do("live")
        with one.residents(RECIPIENTS, size, DISTINCT_MESSAGES) as offline:
            ours = _Cycles(plan, one, online, failures)
            ours.run(plan.seconds * _WARM_UP_SHARE)
            rounds = take_turns(
                {
                    _CYCLE: lambda: ours.run(plan.seconds),
                    _FORWARD: lambda: post_for(one.server, offline.bodies, plan.clients, plan.seconds).figures(),
                },
                plan.rounds,
            )
        name = size_name(size)
        for contender in rounds.found:
            compared = {_OF_FORWARD: rounds.ratio(contender, _FORWARD, PER_CPU_SECOND if one.pid else PER_SECOND)}
            rows[f"{name}  {contender}"] = rounds.medians(contender) | compared
        most = rows[f"{name}  {_CYCLE}"][PER_SECOND]
        for share in SHARES:
            rows[f"{name}  at {share:.0%}"] = ours.run(plan.seconds * plan.rounds / 2, share * most)
        left = online.do("waiting")["messages"]
    if left:
        failures.append(f"{left} messages were acknowledged and are still there")
    targets = (
        Target(f"cycles {name}, of forwards", FORWARD_GOAL, rows[f"{name}  {_CYCLE}"][_OF_FORWARD]),
        Target(
            f"push p99 {name} at {PROMISED:.0%}, ms",
            PUSH_P99_MS,
            rows[f"{name}  at {PROMISED:.0%}"]["push p99"],
            True,
        ),
    )
    notes = (
        f"Forward, push to one of {WALLETS} wallets in live mode, messages-received without an answer. "
        f"At most {plan.clients} are on their way at a time; at fixed times as many as there are.",
        f"Milliseconds since a forward was sent, or was to be sent. {one.note}",
        f"{ours.pushed} messages were pushed exactly once and acknowledged.",
    )
    return Table("Messages to wallets that are online", _COLUMNS, rows, targets, notes, tuple(failures))


class _Cycles:
    """
    Turns of the same wallets.

    :ivar pushed: how many messages came out, in all turns.
    """

    def __init__(self, plan: Plan, one: Subject, online: Residents, failures: list[str]) -> None:
        self._plan = plan
        self._subject = one
        self._online = online
        self._failures = failures
        self._turns = 0
        self.pushed = 0

    def run(self, seconds: float, rate: float = 0.0) -> Figures:
        """One turn, and what is wrong with it."""
        self._turns += 1
        before = self._subject.cpu_seconds
        turn = {"rate": rate, "even": self._plan.even, "seed": self._turns}
        connections = self._plan.clients * (2 if rate else 1)
        found = self._online.do("cycle", seconds=seconds, connections=connections, **turn)
        spent = self._subject.cpu_seconds - before
        self.pushed += found["pushed"]
        self._failures += complaints(found)
        return cycle_figures(found, spent)


def complaints(found: dict[str, Any]) -> list[str]:
    """Sentences about a turn, none if all is well."""
    wrong = []
    if refused := {status: count for status, count in found["statuses"].items() if not status.startswith("2")}:
        wrong.append(f"other answers than 202: {refused}")
    if found["missing"] and not refused:
        wrong.append(f"{found['missing']} messages were not pushed")
    if found["repeated"]:
        wrong.append(f"{found['repeated']} messages were pushed twice")
    return wrong


def cycle_figures(found: dict[str, Any], spent: float) -> Figures:
    """
    Rates, and latencies in milliseconds.

    :param spent: seconds of CPU of the mediator; 0 if that is unknown.
    """
    pushed, accepted = sorted(found["pushed_us"]), sorted(found["accepted_us"])
    return {
        PER_SECOND: ratio(found["pushed"], found["seconds"]),
        PER_CPU_SECOND: ratio(found["pushed"], spent),
        "202 p50": percentile(accepted, 0.5) / 1000,
        "push p50": percentile(pushed, 0.5) / 1000,
        "push p99": percentile(pushed, 0.99) / 1000,
        "push p99.9": percentile(pushed, 0.999) / 1000,
        "late %": 100 * ratio(found["late"], len(accepted)),
        CLIENT_US: 1e6 * ratio(found["cpu_seconds"], found["pushed"]),
    }
