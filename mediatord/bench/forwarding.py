"""Forwards to recipients that are offline: decrypted, routed, durable in SQLite, and only then answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.agreement import KeyAgreement
from mediatord.bench.cores import Cores, on, split
from mediatord.bench.crowd import Crowd, forwards, gather, inner_envelope, mediator_at
from mediatord.bench.database import DATABASE, BareStore, bare_database, stored_rows
from mediatord.bench.drive import CLIENT_US, PER_CPU_SECOND, PER_SECOND, Server, post_for
from mediatord.bench.figures import Contender, Figures, Rounds, Table, Target, size_name, take_turns
from mediatord.bench.load import read_bodies, write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.bench.processes import child, read_line
from mediatord.wallet.throwaway import throw_away_daemon

AGREEMENT_GOAL = 0.22

_OF_AGREEMENT, _OF_SITE = "of g", "x stock Site per CPU-s"
_OURS, _SITE, _BARE = "mediatord, durable", "stock Site, empty 202", "SQLite alone, grouped"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _OF_AGREEMENT, _OF_SITE)
_WARM_UP_SHARE = 0.25
# Of a quiet mediator: few messages share what is done once for all that come together.
_FEW = 32
_ON_FEW = f"mediatord, {_FEW} connections"
# Nobody's DID need be longer than its keys, and most wallets' is: it names their mediator.
LONG = ", long DIDs"


@dataclass(frozen=True, slots=True)
class Kind:
    """Messages of one kind: of a size, to wallets of one sort."""

    name: str
    size: int
    crowd: Crowd


def kinds_of(plan: Plan, url: str) -> Iterator[Kind]:
    """
    All sizes to wallets with short DIDs, and the first one to wallets with long ones as well.

    :raise RuntimeError: the daemon did not do as asked.
    """
    crowd = gather(url, RECIPIENTS, short=True)
    for number, size in enumerate(plan.sizes):
        yield Kind(size_name(size), size, crowd)
        if number == 0:
            yield Kind(size_name(size) + LONG, size, gather(url, RECIPIENTS))


@dataclass(slots=True)
class _Contest:
    """
    Those who are compared.

    :ivar accounting: of our daemon, over all kinds.
    :ivar stock: the floor of HTTP.
    """

    plan: Plan
    cores: Cores
    accounting: Accounting
    stock: Server
    agreement: KeyAgreement
    bodies: Path

    def run(self, kind: Kind) -> Rounds:
        """All rounds of one kind of message."""
        write_bodies(self.bodies, forwards(kind.crowd, kind.size, DISTINCT_MESSAGES))
        payloads = [(wallet.did, inner_envelope(wallet, kind.size)) for wallet in kind.crowd.wallets]
        with bare_database() as connection:
            bare = BareStore(connection, payloads, self.plan.clients)
            contenders: dict[str, Contender] = {
                _OURS: lambda: self._post(self.plan.seconds, self.plan.clients),
                _ON_FEW: lambda: self._post(self.plan.seconds, _FEW),
                self.agreement.name: self._beside(self.agreement.run),
                _SITE: lambda: post_for(self.stock, self.bodies, self.plan.clients, self.plan.seconds).figures(),
                _BARE: self._beside(lambda: bare.run(self.plan.seconds / 2)),
            }
            self._post(self.plan.seconds * _WARM_UP_SHARE, self.plan.clients)
            return take_turns(contenders, self.plan.rounds)

    def _post(self, seconds: float, connections: int) -> Figures:
        return self.accounting.check(post_for(self.accounting.server, self.bodies, connections, seconds))

    def _beside(self, contender: Contender) -> Contender:
        """Where the servers run."""

        def run() -> Figures:
            with on(self.cores.server):
                return contender()

        return run

    def compared(self, rounds: Rounds, name: str) -> Figures:
        """What floors are for."""
        return {
            _OF_AGREEMENT: rounds.ratio(name, self.agreement.name, PER_CPU_SECOND),
            _OF_SITE: rounds.ratio(name, _SITE, PER_CPU_SECOND),
        }


def measure_forwarding(plan: Plan) -> Table:
    """One table for all kinds."""
    rows: dict[str, Figures] = {}
    targets: list[Target] = []
    lengths: list[str] = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        cores = split()
        with on(cores.server):
            daemon = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
            site = stack.enter_context(child("mediatord.bench.stock"))
        stack.enter_context(on(cores.clients))
        server = Server.at(mediator_at(daemon.url).http_uri, daemon.pid)
        accounting = Accounting(server, lambda: stored_rows(daemon.directory / DATABASE))
        stock = Server(site.pid, int(read_line(site)), server.path)
        contest = _Contest(plan, cores, accounting, stock, KeyAgreement(), place / "bodies")
        for kind in kinds_of(plan, daemon.url):
            rounds = contest.run(kind)
            rows |= {
                f"{kind.name}  {one}": rounds.medians(one) | contest.compared(rounds, one) for one in rounds.found
            }
            lengths.append(f"{kind.name} {max(map(len, read_bodies(contest.bodies)))}")
            if not targets:
                measured = rows[f"{kind.name}  {_OURS}"][_OF_AGREEMENT]
                targets.append(Target(f"durable forwards {kind.name}, of g", AGREEMENT_GOAL, measured))
    notes = (
        f"{plan.clients} connections, one daemon process; SQLite alone commits {plan.clients} rows at a time, "
        "and its latencies are those of a commit.",
        f"g is {contest.agreement.name} in the same round, by CPU time like the daemon's. {cores.note}",
        f"Bytes posted: {', '.join(lengths)}.",
        f"{accounting.accepted} forwards were answered 202 and {accounting.stored} rows were stored.",
    )
    return Table(
        "Forwards, durable before the answer", _COLUMNS, rows, tuple(targets), notes, tuple(accounting.failures)
    )
