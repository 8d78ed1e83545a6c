"""Forwards to a mediator of any make, beside the floors that need nothing of it."""

from __future__ import annotations

from pathlib import Path

from mediatord.bench.agreement import KeyAgreement
from mediatord.bench.drive import CLIENT_US, PER_CPU_SECOND, PER_SECOND, Load, Server, post_for
from mediatord.bench.figures import Figures, Rounds, Table, size_name, take_turns
from mediatord.bench.keeping import Keeping
from mediatord.bench.plan import DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.processes import child, read_line
from mediatord.bench.subject import Subject, subject

_TARGET, _SITE = "target", "stock Site, empty 202"
_OF_AGREEMENT, _OF_SITE = "of g", "x stock Site"
_WARM_UP_SHARE = 0.25
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", CLIENT_US, _OF_AGREEMENT, _OF_SITE)


def measure_anywhere(plan: Plan) -> Table:
    """All sizes, to wallets with short DIDs."""
    rows: dict[str, Figures] = {}
    notes: list[str] = []
    failures: list[str] = []
    with subject(plan) as one:
        for size in plan.sizes:
            name = size_name(size)
            with one.residents(RECIPIENTS, size, DISTINCT_MESSAGES) as residents:
                keeping = Keeping(one, residents)
                contest = _Contest(plan, one, keeping)
                rounds = contest.run(residents.bodies)
            rows |= {
                f"{name}  {each}": rounds.medians(each) | contest.compared(rounds, each) for each in rounds.found
            }
            notes.append(keeping.note)
            failures += keeping.failures
    known = "" if one.pid else " The target's CPU time is not known: give its process by --target-pid."
    notes.append(f"{plan.clients} connections; g is {contest.agreement.name} in the same round.{known}")
    return Table(f"Forwards to {one.url}", _COLUMNS, rows, (), tuple(notes), tuple(failures))


class _Contest:
    """The target and its floors, in turns."""

    def __init__(self, plan: Plan, one: Subject, keeping: Keeping) -> None:
        self._plan = plan
        self._subject = one
        self._keeping = keeping
        self.agreement = KeyAgreement()

    def run(self, bodies: Path) -> Rounds:
        """All rounds of one size."""
        clients, seconds = self._plan.clients, self._plan.seconds
        with child("mediatord.bench.stock") as site:
            stock = Server(site.pid, int(read_line(site)), "/didcomm")

            def post(server: Server, share: float = 1.0) -> Load:
                return post_for(server, bodies, clients, seconds * share)

            self._keeping.check(post(self._subject.server, _WARM_UP_SHARE))
            return take_turns(
                {
                    _TARGET: lambda: self._keeping.check(post(self._subject.server)),
                    self.agreement.name: self.agreement.run,
                    _SITE: lambda: post(stock).figures(),
                },
                self._plan.rounds,
            )

    def compared(self, rounds: Rounds, name: str) -> Figures:
        """With the floors."""
        of_site = {_OF_SITE: rounds.ratio(name, _SITE, PER_SECOND)} if name != self.agreement.name else {}
        if name == _TARGET and not self._subject.pid:
            return of_site
        return {_OF_AGREEMENT: rounds.ratio(name, self.agreement.name, PER_CPU_SECOND), **of_site}
