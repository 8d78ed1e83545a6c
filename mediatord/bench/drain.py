"""Messages that waited, fetched and acknowledged by wallets that come back."""

from __future__ import annotations

from functools import partial

from mediatord.bench.drive import CLIENT_US, PER_CPU_SECOND, PER_SECOND, post_so_many
from mediatord.bench.figures import Figures, Table, percentile, ratio, size_name, take_turns
from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.subject import Residents, Subject, subject

_LIMITS = (10, 100)
_MESSAGES_PER_SECOND = 2000
_CONNECTIONS = 8
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "requests", "p50 ms", "p99 ms", CLIENT_US)


def measure_drain(plan: Plan) -> Table:
    """Queues are filled, which is not counted, and emptied."""
    size = plan.sizes[0]
    name = size_name(size)
    failures: list[str] = []
    with subject(plan) as one, one.residents(RECIPIENTS, size, DISTINCT_MESSAGES) as residents:
        queues = _Queues(plan, one, residents, failures)
        rounds = take_turns(
            {f"{name}  {limit} a delivery": partial(queues.run, limit) for limit in _LIMITS}, plan.rounds
        )
    rows = {contender: rounds.medians(contender) for contender in rounds.found}
    notes = (
        f"delivery-request and messages-received over HTTP, {_CONNECTIONS} connections, {RECIPIENTS} wallets with "
        f"{queues.count // RECIPIENTS} messages each; latencies are those of a request. {one.note}",
    )
    return Table("Messages fetched", _COLUMNS, rows, (), notes, tuple(failures))


class _Queues:
    """
    Fills queues and has them emptied.

    :ivar count: messages in all queues together.
    """

    def __init__(self, plan: Plan, one: Subject, residents: Residents, failures: list[str]) -> None:
        self._plan = plan
        self._subject = one
        self._residents = residents
        self._failures = failures
        self.count = max(RECIPIENTS, int(_MESSAGES_PER_SECOND * plan.seconds) // RECIPIENTS * RECIPIENTS)

    def run(self, limit: int) -> Figures:
        """One filling and emptying."""
        load = post_so_many(self._subject.server, self._residents.bodies, self._plan.clients, self.count)
        before = self._subject.cpu_seconds
        found = self._residents.do("drain", connections=_CONNECTIONS, limit=limit)
        spent = self._subject.cpu_seconds - before
        if found["messages"] != load.accepted:
            self._failures.append(
                f"{load.accepted} forwards were accepted, {found['messages']} messages were fetched"
            )
        latencies = sorted(found["latencies_us"])
        return {
            PER_SECOND: ratio(found["messages"], found["seconds"]),
            PER_CPU_SECOND: ratio(found["messages"], spent),
            "requests": found["requests"],
            "p50 ms": percentile(latencies, 0.5) / 1000,
            "p99 ms": percentile(latencies, 0.99) / 1000,
            CLIENT_US: 1e6 * ratio(found["cpu_seconds"], found["messages"]),
        }
