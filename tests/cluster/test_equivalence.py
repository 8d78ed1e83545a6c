"""Two nodes deliver what one process delivers: random scenarios, run by both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from mediatord.cluster.anti_entropy import ANTI_ENTROPY_INTERVAL, MIN_MESSAGE_AGE, SCAN_WINDOW
from mediatord.protocol.didcomm.message_pickup import DELIVERY
from mediatord.wallet.didcomm_client import DeliveredMessage, read_delivery
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.in_memory_mediator import MP, FakeSocket, InMemoryMediator, InMemoryWallet, pack_forward
from tests.integration.daemon import PLENTY

NEXT_ROUND = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1
SCENARIOS, STEPS = 8, 24
# Sockets of the wallet, each at a node of its own where there are two.
SOCKETS = 2


class MediatorScenario:
    """
    A wallet and its mediator, which is one process or two nodes.

    :param mediators: nodes that take requests in turn.

    :ivar pushes: for each socket ever opened its pushes.

    :ivar ended: for each of them what came before it was closed or its live mode changed, and need not come later.

    :ivar picked_up: what was delivered otherwise and need not be pushed.
    """

    def __init__(self, in_memory_nodes: list[InMemoryMediator], later: Callable[[float], None]) -> None:
        self._houses = in_memory_nodes
        self.advance = later
        identity = InMemoryWallet(in_memory_nodes[0]).enrol().identity
        self._wallets = [InMemoryWallet(in_memory, identity) for in_memory in in_memory_nodes]
        self._open: list[tuple[FakeSocket, int] | None] = [None] * SOCKETS
        self._live = [False] * SOCKETS
        self._names: dict[str, str] = {}
        self.pushes: list[list[str]] = []
        self.ended: list[set[str]] = []
        self.picked_up: set[str] = set()

    def forward(self, at: int, text: str) -> None:
        """Forward a message."""
        in_memory = self._houses[at % len(self._houses)]
        forward = self._wallets[0].make_payload(text)
        in_memory.test.assertEqual(
            in_memory.receive(pack_forward(in_memory, self._wallets[0].did, forward)).status, 202
        )

    def switch_live_mode(self, slot: int, live: bool) -> None:
        """Switch live mode of a socket, which is opened if it is not open."""
        wallet = self._wallets[slot % len(self._wallets)]
        if self._open[slot] is None:
            self._open[slot] = wallet.in_memory.socket(), len(self.pushes)
            self.pushes.append([])
            self.ended.append(set())
        self.read_pushes()
        socket, _ = self._open[slot]  # type: ignore[misc]  # it is open
        wallet.answer(f"{MP}/live-delivery-change", {"live_delivery": live}, socket=socket)
        socket.frames.clear()
        self._end_live_period(slot)

    def close_socket(self, slot: int) -> None:
        """Close a socket."""
        self.read_pushes()
        self._end_live_period(slot)
        opened, self._open[slot] = self._open[slot], None
        if opened is not None:
            self._wallets[slot % len(self._wallets)].in_memory.base.connections.closed(opened[0])

    def fetch(self, at: int, limit: int) -> list[str]:
        """Fetch messages."""
        wallet = self._wallets[at % len(self._wallets)]
        self.read_pushes()
        answer = wallet.answer(f"{MP}/delivery-request", {"limit": limit})
        texts = self._read(read_delivery(answer.message) if answer.message.type.uri == DELIVERY else [])
        self.picked_up.update(texts)
        return texts

    def acknowledge(self, at: int, texts: list[str]) -> None:
        """Acknowledge messages."""
        wallet = self._wallets[at % len(self._wallets)]
        ids = [id_ for id_, text in self._names.items() if text in texts]
        wallet.answer(f"{MP}/messages-received", {"message_id_list": ids})
        self.picked_up.update(texts)

    def read_pushes(self) -> None:
        """Record the pushes on all sockets."""
        for opened in filter(None, self._open):
            socket, number = opened
            frames, socket.frames = socket.frames, []
            for frame in frames:
                self.pushes[number] += self._read(read_delivery(self._wallets[0].open(frame).message))

    def count_waiting(self) -> int:
        """Number of queued messages."""
        return self._wallets[0].count_queued()

    def _read(self, delivered: list[DeliveredMessage]) -> list[str]:
        for message in delivered:
            self._names[message.id] = self._wallets[0].open(message.payload).text
        return [self._names[message.id] for message in delivered]

    def _end_live_period(self, slot: int) -> None:
        """End a period in which a socket was live or not."""
        opened = self._open[slot]
        if opened is not None:
            self.ended[opened[1]].update(self.pushes[opened[1]])


class EquivalenceTests(InMemoryClusterTestCase):
    """As many sockets as nodes, requests at any node, notifications that arrive or not."""

    def run_scenario(
        self, random: Random, one: MediatorScenario, two: MediatorScenario, cut: Callable[[], None]
    ) -> None:
        """Run the same steps with both."""
        fetched: list[str] = []
        for number in range(STEPS):
            step = random.choice(
                ("forward",) * 4 + ("live", "off", "gone", "fetch", "fetch", "ack", "ack", "wait", "wait")
            )
            at, slot, live = random.randrange(2), random.randrange(SOCKETS), step == "live"
            limit, seconds = random.randrange(1, 4), random.choice((0.1, 2.0, 11.0, 22.0, 40.0))
            cut()
            for scenario in (one, two):
                if step == "forward":
                    scenario.forward(at, f"{number}")
                elif step in ("live", "off"):
                    scenario.switch_live_mode(slot, live)
                elif step == "gone":
                    scenario.close_socket(slot)
                elif step == "fetch":
                    fetched = scenario.fetch(at, limit)
                elif step == "ack":
                    scenario.acknowledge(at, fetched[:limit])
                else:
                    scenario.advance(seconds)
                scenario.read_pushes()

    def make_both(self) -> tuple[MediatorScenario, MediatorScenario]:
        """One process, and two nodes."""
        in_memory = InMemoryMediator(self, limits=PLENTY["limits"])
        return MediatorScenario([in_memory], in_memory.clock.advance), MediatorScenario(
            list(self.in_memory_nodes), self.advance
        )

    def test_same_pushes(self) -> None:
        """
        If all notifications arrive, each socket gets the same at the same time, and the same messages stay queued.
        """
        for seed in range(SCENARIOS):
            with self.subTest(seed=seed):
                one, two = self.make_both()
                self.run_scenario(Random(seed), one, two, lambda: None)
                self.assertEqual(two.pushes, one.pushes)
                self.assertEqual(two.count_waiting(), one.count_waiting())

    def test_lost_notifications(self) -> None:
        """
        If some are lost, nothing is pushed that one process would not push, and nothing twice; what is missing was
        delivered otherwise, or its socket closed.
        """
        for seed in range(SCENARIOS):
            with self.subTest(seed=seed):
                one, two = self.make_both()
                random, losing = Random(seed), Random(seed)

                def cut(losing: Random = losing) -> None:
                    lost = losing.random() < 0.5
                    self.network.cut = lambda node: lost

                self.run_scenario(random, one, two, cut)
                for scenario in (one, two):
                    scenario.advance(SCAN_WINDOW + NEXT_ROUND)
                    scenario.read_pushes()
                self.assertEqual(two.count_waiting(), one.count_waiting())
                for actual, expected, ended in zip(two.pushes, one.pushes, one.ended, strict=True):
                    self.assertEqual(Counter(actual) - Counter(expected), Counter())
                    self.assertLessEqual(set(expected) - set(actual), ended | one.picked_up)
                self.network.cut = lambda node: False
