"""Forwards and live delivery of DIDComm v1, beside DIDComm v2 and beside Credo's mediator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from mediatord.bench.credo_mediator import explain_absence, run_credo_mediator
from mediatord.bench.didcomm_scenarios import CYCLE_WALLETS
from mediatord.bench.load_generator import CycleRunner, Load, TargetServer
from mediatord.bench.measured_mediator import (
    SUCCESS_STATUSES,
    CycleLoad,
    ForwardLoad,
    StoredMessageCheck,
    open_mediator,
    query_database,
)
from mediatord.bench.plan import RECIPIENTS, BenchmarkPlan
from mediatord.bench.processes import assign_cores, cpu_seconds, pin_to_cores
from mediatord.bench.results import (
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    Figures,
    ResultTable,
    format_size,
    safe_ratio,
    scenario,
)
from mediatord.bench.v1_wallets import V1LiveSocket, V1WalletGroup, fetch_invitation
from mediatord.protocol.didcomm_v1.envelope import ENVELOPE_MEDIA_TYPE
from mediatord.wallet.didcomm_v1_messages import V1Invitation

_V2, _V1, _CREDO = "mediatord, v2", "mediatord, v1", "Credo, v1"
_CPU_US, _OF_V2, _OF_CREDO = "us CPU", "x v2 per CPU-s", "x Credo per CPU-s"
# Messages of the first run, by whose rate the number of those of later runs is chosen.
_FIRST_MESSAGES = 500
_SPARE_SHARE = 1.5
# Messages in the daemon's database, and the DIDs of the recipients of either version.
_COUNT = "SELECT count(*) FROM message JOIN recipient ON recipient.id = recipient_id WHERE did LIKE"
_DID_METHODS = ("did:peer:", "did:key:")


class _V1Load:
    """
    Forwards to wallets of one mediator, those of a key in turn; no forward is sent twice, as it would be recognised.

    :param pid: of the mediator.
    :param failures: gets a sentence for everything that goes wrong.
    :param count: number of stored messages; by default what wallets that are offline can fetch.
    :param handshake: further options of the wallets' connections.
    """

    def __init__(
        self,
        invitation: V1Invitation,
        pid: int,
        failures: list[str],
        count: Callable[[], int] | None = None,
        **handshake: Any,
    ) -> None:
        self.failures = failures
        self.asleep = V1WalletGroup.connect(invitation, RECIPIENTS, **handshake)
        self.awake = V1WalletGroup.connect(invitation, CYCLE_WALLETS, **handshake)
        self.sockets = [V1LiveSocket(wallet) for wallet in self.awake.wallets]
        for live in self.sockets:
            live.enable_live_delivery()
        self.server = TargetServer(self.asleep.endpoint, pid, ENVELOPE_MEDIA_TYPE, SUCCESS_STATUSES)
        self.stored_check = StoredMessageCheck(count or self.asleep.count_queued, failures, SUCCESS_STATUSES)
        self.pushed = 0

    def forward(self, number: int, size: int, connections: int, seconds: float) -> Figures:
        """Post at most this number of forwards to wallets that are offline, and check that they are stored."""
        bodies = [body for body, _ in self.asleep.forwards(size, number)]
        load = Load([self.server], bodies, connections, seconds, once=True)
        return self.stored_check.check(load.result())

    def cycle(self, number: int, size: int, connections: int, seconds: float) -> Figures:
        """Post at most this number to wallets in live mode, which acknowledge them."""
        forwards = [(self.server.encode(body), tag) for body, tag in self.awake.forwards(size, number)]
        runner = CycleRunner(self.server.url, forwards, self.sockets, connections, seconds, once=True)
        before = cpu_seconds(self.server.pid)
        result = runner.run()
        runner.close()
        result.cpu_seconds = cpu_seconds(self.server.pid) - before
        self.pushed += result.accepted
        self.failures += result.failures()
        return result.figures()

    def close_sockets(self) -> None:
        """Check that nothing is queued for wallets that have acknowledged, and close their sockets."""
        if left := self.awake.count_queued():
            self.failures.append(f"{left} messages were acknowledged and are still queued")
        for live in self.sockets:
            live.close()


def _make_contender(run: Callable[..., Figures], size: int, plan: BenchmarkPlan) -> Contender:
    """A contender with enough messages for the rate of a first run."""
    first = run(_FIRST_MESSAGES, size, plan.clients, plan.seconds)
    number = int(_SPARE_SHARE * first[PER_SECOND] * plan.seconds) + _FIRST_MESSAGES
    return partial(run, number, size, plan.clients, plan.seconds)


def _with_cpu_us(contender: Contender) -> Figures:
    figures = contender()
    return figures | {_CPU_US: 1e6 * safe_ratio(1.0, figures[PER_CPU_SECOND])}


@scenario(
    "DIDComm v1",
    (PER_SECOND, PER_CPU_SECOND, _CPU_US, "p50 ms", "p99 ms", "push p50", "push p99", CLIENT_US, _OF_V2, _OF_CREDO),
)
def measure_v1(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Cycles and durable forwards: v1 and v2 at one daemon, and v1 at Credo's mediator if that is installed."""
    cores = assign_cores()
    with ExitStack() as stack:
        mediator = stack.enter_context(open_mediator(plan, cores))
        # Each version has a check of its own of the one table.
        counts = [partial(query_database, mediator.database, f"{_COUNT} '{method}%'") for method in _DID_METHODS]
        v1 = {_V1: _V1Load(fetch_invitation(mediator.url), mediator.pid, table.failures, counts[1])}
        if absence := explain_absence():
            credo_note = f"Credo's mediator is not measured: it {absence}."
        else:
            with pin_to_cores(cores.server):
                invitation, pid = stack.enter_context(run_credo_mediator())
            # Its responses lack this.
            v1[_CREDO] = _V1Load(invitation, pid, table.failures, requires_parent=False)
            credo_note = "Credo's mediator has its queue in memory: what it has answered is lost when it ends."
        forwards = ForwardLoad(mediator, table.failures, count=counts[0])
        cycles = CycleLoad(mediator, table.failures, CYCLE_WALLETS, plan.sizes[0])
        ratios = {_OF_V2: (_V2, PER_CPU_SECOND)} | ({_OF_CREDO: (_CREDO, PER_CPU_SECOND)} if _CREDO in v1 else {})

        def compare(name: str, contenders: dict[str, Contender]) -> None:
            measured: dict[str, Contender] = {one: partial(_with_cpu_us, run) for one, run in contenders.items()}
            table.compare(measured, plan.rounds, f"{name}  ", ratios)

        # First, because Credo searches its queue for every message to be delivered.
        cycles.run(plan.clients, plan.warm_up_seconds)
        compare(
            f"{format_size(plan.sizes[0])} cycle",
            {
                _V2: lambda: cycles.run(plan.clients, plan.seconds).figures(),
                **{name: _make_contender(load.cycle, plan.sizes[0], plan) for name, load in v1.items()},
            },
        )
        # Now, as nobody answers the pings of these sockets meanwhile.
        cycles.check_queues()
        for load in v1.values():
            load.close_sockets()
        for size in plan.sizes:
            forwards.prepare(size)
            compare(
                f"{format_size(size)} forward",
                {
                    _V2: partial(forwards.post, plan.clients, plan.seconds),
                    **{name: _make_contender(load.forward, size, plan) for name, load in v1.items()},
                },
            )
    checks = {_V2: forwards.stored_check} | {name: load.stored_check for name, load in v1.items()}
    table.notes = [
        f"{plan.clients} connections. Cycles: forward, live delivery to one of {CYCLE_WALLETS} wallets, "
        "messages-received, which v1 answers with a status, as its wallets ask for one. us CPU is that of the server "
        f"for each message. {cores.note}",
        credo_note,
        *(f"{name}: {check.note}" for name, check in checks.items()),
        f"Pushed once and acknowledged: {cycles.pushed} of v2, "
        f"{', '.join(f'{load.pushed} of {name}' for name, load in v1.items())}.",
    ]
