"""One load with a fault in the middle, and the reconciliation afterwards."""

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

# To each wallet, and of Decentrl to one.
MESSAGES: dict[StoreName, tuple[int, int]] = {"sqlite": (40, 120), "mongodb": (20, 60), "memory": (40, 120)}
EVENTS = (5, 20)


@dataclass(frozen=True, slots=True)
class FaultRound:
    """What is to happen. :param number: decides, with the seed, about all that chance has a part in."""

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
    What came of one round, both protocols together.

    :param accepted: answered 202 or 200.
    :param refused: answered 503.
    :param cut: not answered.
    :param delivered: messages by id.
    :param acknowledged: as the store says, like what follows.
    :param lost: accepted, and did not come.
    :param doubled: came under an id too many.
    :param difference: of the store's ledger; None where nobody else can read it.
    :param slowest: seconds that an answer took.
    :param complaints: what is wrong.
    :param marks: what is worth knowing.
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

    def enter(self, protocol: str, balance: LedgerBalance) -> None:
        """What clients know."""
        self.posts += balance.posts
        self.accepted += balance.accepted
        self.refused += balance.refused
        self.cut += balance.cut
        self.delivered += balance.received
        self.lost += balance.lost
        self.doubled += balance.doubled
        self.slowest = max(self.slowest, balance.slowest)
        if protocol == "didcomm" and balance.posts != balance.accepted + balance.refused + balance.cut:
            self.complaints.append(f"{protocol}: an answer that is neither 202 nor 503")
        if balance.owed:
            self.complaints.append(f"{protocol}: {balance}")

    def compare(
        self, protocol: str, balance: LedgerBalance, before: MessageLedger, after: MessageLedger, *, withdraws: bool
    ) -> None:
        """What the store knows."""
        entered = subtract_ledger(before, after)
        self.acknowledged += entered.acknowledged
        self.expired += entered.expired
        self.evicted += entered.evicted
        self.withdrawn += entered.withdrawn
        if after.difference is not None:
            self.difference = (self.difference or 0) + abs(after.difference)
        wrong = find_ledger_mismatches(balance, after, entered, withdraws=withdraws)
        self.complaints += [f"{protocol}: {complaint}" for complaint in wrong]


def plan_rounds(seed: int, stores: Sequence[StoreName], kinds: Sequence[str]) -> Iterator[FaultRound]:
    """
    Rounds without end: every kind on every store as often as the others, in any order.

    :param kinds: none for all.
    """
    pairs = [(store, kind) for store in stores for kind in KINDS[store] if not kinds or kind in kinds]
    assert pairs, "none of these stores has a fault of these kinds"
    number = 0
    while True:
        for store, kind in random.Random(f"{seed}//{number}").sample(pairs, len(pairs)):
            yield FaultRound(number, store, kind, seed)
            number += 1


def failed_round_directory(seed: int, number: int) -> str:
    """The directory that is left of a round that failed."""
    return f"seed-{seed}-round-{number}"


async def run_round(stage: DaemonFixture, this: FaultRound) -> RoundOutcome:
    """
    Play one round on a stage.

    :raise AssertionError: it could not be played to its end.
    """
    began = time.monotonic()
    chance, kind = this.chance, KINDS[this.store][this.kind]
    if kind.prepare is not None:
        await kind.prepare(stage)
    before = await deferToThread(stage.books)
    load = stage.load(str(this.number), chance.randrange(*MESSAGES[this.store]))
    events = EventLoad(stage.friends, [f"{this.number}-{one}" for one in range(chance.randrange(*EVENTS))])
    recipients = stage.recipients(load.ledger, stage.relay.entrance(stage.daemon.port) if kind.relayed else None)
    scene = FaultContext(stage, chance, load, recipients)
    # In every other round all waits for wallets that come later.
    if kind.relayed or chance.random() < 0.5:
        for recipient in recipients:
            recipient.start()
    else:
        scene.marks.append("nobody listens")
    load.start()
    events.start()
    try:
        await _strike(kind, scene, events)
    finally:
        load.senders.stop()
        events.stop()
        for recipient in scene.recipients:
            await recipient.stop()
    outcome = RoundOutcome(this.number, this.store, this.kind, marks=scene.marks)
    after = await deferToThread(stage.books)
    _close(outcome, (load.ledger.balance(await deferToThread(stage.left)), events.balance()), before, after)
    outcome.seconds = time.monotonic() - began
    return outcome


async def _strike(kind: FaultKind, scene: FaultContext, events: EventLoad) -> None:
    await kind.strike(scene)
    await deferToThread(scene.load.senders.join)
    await deferToThread(events.join)
    await scene.stage.recovered()
    for recipient in scene.recipients:
        await recipient.settle()
    await deferToThread(events.settle)


def _close(
    outcome: RoundOutcome,
    balances: tuple[LedgerBalance, LedgerBalance],
    before: StoreLedger | None,
    after: StoreLedger | None,
) -> None:
    withdraws = outcome.store == "mongodb"
    for protocol, balance in zip(("didcomm", "decentrl"), balances, strict=True):
        outcome.enter(protocol, balance)
        if before is not None and after is not None:
            ledgers = getattr(before, protocol), getattr(after, protocol)
            outcome.compare(protocol, balance, *ledgers, withdraws=withdraws)
