"""One load with a fault in its middle, and the reconciliation afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from twisted.internet.threads import deferToThread

from mediatord.store.interfaces.messages import MessageLedger, StoreLedger
from tests.integration.delivery_ledger import LedgerBalance
from tests.torture.daemon_fixture import DaemonFixture, StoreName
from tests.torture.event_load import EventLoad
from tests.torture.faults import KINDS, FaultContext, FaultKind
from tests.torture.ledger_checks import find_ledger_mismatches, subtract_ledger

# Messages to each wallet, and Decentrl events to one identity.
MESSAGES: dict[StoreName, tuple[int, int]] = {"sqlite": (40, 120), "mongodb": (20, 60), "memory": (40, 120)}
EVENTS = (5, 20)


@dataclass(frozen=True, slots=True)
class FaultRound:
    """A round. :param number: determines all random choices, with the seed."""

    number: int
    store: StoreName
    kind: str
    seed: int

    @property
    def chance(self) -> random.Random:
        return random.Random(f"{self.seed}/{self.number}")


@dataclass(slots=True)
class RoundOutcome:
    """
    Outcome of a round, both protocols together.

    :param accepted: posts answered 202 or 200.
    :param refused: posts answered 503.
    :param cut: posts without a response.
    :param delivered: messages by id.
    :param acknowledged: from the store's ledger, as are the next fields.
    :param lost: accepted, but not delivered.
    :param doubled: delivered under a further id.
    :param difference: difference of the store's ledger; None if only the daemon can read it.
    :param slowest: longest response time in seconds.
    :param complaints: broken promises.
    :param marks: observations.
    """

    number: int
    store: str
    kind: str
    posts: int = 0
    accepted: int = 0
    refused: int = 0
    cut: int = 0
    delivered: int = 0
    acknowledged: int = 0
    expired: int = 0
    evicted: int = 0
    withdrawn: int = 0
    lost: int = 0
    doubled: int = 0
    difference: int | None = None
    slowest: float = 0.0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        return asdict(self)

    def add_balance(self, protocol: str, balance: LedgerBalance) -> None:
        """Add the ledger of the clients."""
        self.posts += balance.posts
        self.accepted += balance.accepted
        self.refused += balance.refused
        self.cut += balance.cut
        self.delivered += balance.received
        self.lost += balance.lost
        self.doubled += balance.doubled
        self.slowest = max(self.slowest, balance.slowest)
        if protocol == "didcomm" and balance.posts != balance.accepted + balance.refused + balance.cut:
            self.complaints.append(f"{protocol}: a response that is neither 202 nor 503")
        if balance.discrepancy:
            self.complaints.append(f"{protocol}: {balance}")

    def compare_ledgers(
        self, protocol: str, balance: LedgerBalance, before: MessageLedger, after: MessageLedger, *, withdraws: bool
    ) -> None:
        """Compare with the ledger of the store."""
        entered = subtract_ledger(before, after)
        self.acknowledged += entered.acknowledged
        self.expired += entered.expired
        self.evicted += entered.evicted
        self.withdrawn += entered.withdrawn
        if after.difference is not None:
            self.difference = (self.difference or 0) + abs(after.difference)
        mismatches = find_ledger_mismatches(balance, after, entered, withdraws=withdraws)
        self.complaints += [f"{protocol}: {complaint}" for complaint in mismatches]


def plan_rounds(seed: int, stores: Sequence[StoreName], kinds: Sequence[str]) -> Iterator[FaultRound]:
    """
    Rounds without end: every kind on every store equally often, in random order.

    :param kinds: empty for all.
    """
    pairs = [(store, kind) for store in stores for kind in KINDS[store] if not kinds or kind in kinds]
    assert pairs, "none of these stores has a fault of these kinds"
    number = 0
    while True:
        for store, kind in random.Random(f"{seed}//{number}").sample(pairs, len(pairs)):
            yield FaultRound(number, store, kind, seed)
            number += 1


def failed_round_directory(seed: int, number: int) -> str:
    """Name of the directory with files of a failed round."""
    return f"seed-{seed}-round-{number}"


async def run_round(fixture: DaemonFixture, fault_round: FaultRound) -> RoundOutcome:
    """
    Run one round.

    :raise AssertionError: it could not be completed.
    """
    start_time = time.monotonic()
    chance, kind = fault_round.chance, KINDS[fault_round.store][fault_round.kind]
    if kind.prepare is not None:
        await kind.prepare(fixture)
    before = await deferToThread(fixture.read_ledger)
    load = fixture.prepare_load(str(fault_round.number), chance.randrange(*MESSAGES[fault_round.store]))
    events = EventLoad(
        fixture.identities, [f"{fault_round.number}-{index}" for index in range(chance.randrange(*EVENTS))]
    )
    recipients = fixture.make_recipients(
        load.ledger, fixture.relay.proxy_port(fixture.daemon.port) if kind.relayed else None
    )
    context = FaultContext(fixture, chance, load, recipients)
    # In every other round messages are queued until the recipients start after the fault.
    if kind.relayed or chance.random() < 0.5:
        for recipient in recipients:
            recipient.start()
    else:
        context.marks.append("recipients start afterwards")
    # The fault must meet messages, however fast they are sent.
    load.start(load.message_count // 2 if kind.refuses else 0)
    events.start()
    try:
        await _inject_fault(kind, context, events)
    finally:
        load.senders.stop()
        events.stop()
        for recipient in context.recipients:
            await recipient.stop()
    outcome = RoundOutcome(fault_round.number, fault_round.store, fault_round.kind, marks=context.marks)
    after = await deferToThread(fixture.read_ledger)
    _reconcile(
        outcome, (load.ledger.balance(await deferToThread(fixture.count_queued)), events.balance()), before, after
    )
    outcome.seconds = time.monotonic() - start_time
    return outcome


async def _inject_fault(kind: FaultKind, context: FaultContext, events: EventLoad) -> None:
    await kind.inject(context)
    await deferToThread(context.load.senders.join)
    await deferToThread(events.join)
    await context.fixture.wait_until_recovered()
    for recipient in context.recipients:
        await recipient.drain()
    await deferToThread(events.drain)


def _reconcile(
    outcome: RoundOutcome,
    balances: tuple[LedgerBalance, LedgerBalance],
    before: StoreLedger | None,
    after: StoreLedger | None,
) -> None:
    withdraws = outcome.store == "mongodb"
    for protocol, balance in zip(("didcomm", "decentrl"), balances, strict=True):
        outcome.add_balance(protocol, balance)
        if before is not None and after is not None:
            ledgers = getattr(before, protocol), getattr(after, protocol)
            outcome.compare_ledgers(protocol, balance, *ledgers, withdraws=withdraws)
