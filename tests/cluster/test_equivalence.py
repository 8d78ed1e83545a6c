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

SOON = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1
SCENARIOS, STEPS = 8, 24
# Sockets of the wallet, each at a node of its own where there are two.
SOCKETS = 2


class MediatorScenario:
    """
    A wallet and its mediator, be that one process or two.

    :param houses: where requests go in turn.
    :ivar pushes: for each socket that was ever opened what came on it.
    :ivar ended: for each of them what came before it was gone or switched off or on, and need not come later.
    :ivar picked_up: what has come otherwise, and need not be pushed.
    """

    def __init__(self, in_memory_nodes: list[InMemoryMediator], later: Callable[[float], None]) -> None:
        self._houses = in_memory_nodes
        self.later = later
        identity = InMemoryWallet(in_memory_nodes[0]).enrol().identity
        self._wallets = [InMemoryWallet(in_memory, identity) for in_memory in in_memory_nodes]
        self._open: list[tuple[FakeSocket, int] | None] = [None] * SOCKETS
        self._live = [False] * SOCKETS
        self._names: dict[str, str] = {}
        self.pushes: list[list[str]] = []
        self.ended: list[set[str]] = []
        self.picked_up: set[str] = set()

    def forward(self, at: int, text: str) -> None:
        """Somebody leaves something."""
        in_memory = self._houses[at % len(self._houses)]
        letter = self._wallets[0].letter(text)
        in_memory.test.assertEqual(
            in_memory.receive(pack_forward(in_memory, self._wallets[0].did, letter)).status, 202
        )

    def switch(self, slot: int, live: bool) -> None:
        """Live mode of a socket, which is opened if it is not."""
        wallet = self._wallets[slot % len(self._wallets)]
        if self._open[slot] is None:
            self._open[slot] = wallet.in_memory.socket(), len(self.pushes)
            self.pushes.append([])
            self.ended.append(set())
        self.listen()
        socket, _ = self._open[slot]  # type: ignore[misc]  # it is open
        wallet.answer(f"{MP}/live-delivery-change", {"live_delivery": live}, socket=socket)
        socket.frames.clear()
        self._end(slot)

    def hang_up(self, slot: int) -> None:
        """A socket is gone."""
        self.listen()
        self._end(slot)
        opened, self._open[slot] = self._open[slot], None
        if opened is not None:
            self._wallets[slot % len(self._wallets)].in_memory.base.connections.closed(opened[0])

    def fetch(self, at: int, limit: int) -> list[str]:
        """What is picked up."""
        wallet = self._wallets[at % len(self._wallets)]
        self.listen()
        answer = wallet.answer(f"{MP}/delivery-request", {"limit": limit})
        texts = self._read(read_delivery(answer.message) if answer.message.type.uri == DELIVERY else [])
        self.picked_up.update(texts)
        return texts

    def acknowledge(self, at: int, texts: list[str]) -> None:
        """These have come."""
        wallet = self._wallets[at % len(self._wallets)]
        ids = [id_ for id_, text in self._names.items() if text in texts]
        wallet.answer(f"{MP}/messages-received", {"message_id_list": ids})
        self.picked_up.update(texts)

    def listen(self) -> None:
        """Note what came on the sockets."""
        for opened in filter(None, self._open):
            socket, number = opened
            frames, socket.frames = socket.frames, []
            for frame in frames:
                self.pushes[number] += self._read(read_delivery(self._wallets[0].open(frame).message))

    def waiting(self) -> int:
        """How many messages wait."""
        return self._wallets[0].waiting()

    def _read(self, delivered: list[DeliveredMessage]) -> list[str]:
        for one in delivered:
            self._names[one.id] = self._wallets[0].open(one.payload).text
        return [self._names[one.id] for one in delivered]

    def _end(self, slot: int) -> None:
        """A time in which a socket was live, or was not, is over."""
        opened = self._open[slot]
        if opened is not None:
            self.ended[opened[1]].update(self.pushes[opened[1]])


class EquivalenceTests(InMemoryClusterTestCase):
    """As many sockets as nodes, requests anywhere, hints that arrive or do not."""

    def scenario(self, random: Random, one: MediatorScenario, two: MediatorScenario, cut: Callable[[], None]) -> None:
        """The same steps in both."""
        known: list[str] = []
        for number in range(STEPS):
            step = random.choice(
                ("forward",) * 4 + ("live", "off", "gone", "fetch", "fetch", "ack", "ack", "wait", "wait")
            )
            at, slot, live = random.randrange(2), random.randrange(SOCKETS), step == "live"
            limit, seconds = random.randrange(1, 4), random.choice((0.1, 2.0, 11.0, 22.0, 40.0))
            cut()
            for world in (one, two):
                if step == "forward":
                    world.forward(at, f"{number}")
                elif step in ("live", "off"):
                    world.switch(slot, live)
                elif step == "gone":
                    world.hang_up(slot)
                elif step == "fetch":
                    known = world.fetch(at, limit)
                elif step == "ack":
                    world.acknowledge(at, known[:limit])
                else:
                    world.later(seconds)
                world.listen()

    def worlds(self) -> tuple[MediatorScenario, MediatorScenario]:
        """One process, and two nodes."""
        in_memory = InMemoryMediator(self, limits=PLENTY["limits"])
        return MediatorScenario([in_memory], in_memory.clock.advance), MediatorScenario(
            list(self.in_memory_nodes), self.later
        )

    def test_nothing_lost(self) -> None:
        """While all hints arrive, each socket gets the same at the same time, and the same waits."""
        for seed in range(SCENARIOS):
            with self.subTest(seed=seed):
                one, two = self.worlds()
                self.scenario(Random(seed), one, two, lambda: None)
                self.assertEqual(two.pushes, one.pushes)
                self.assertEqual(two.waiting(), one.waiting())

    def test_hints_lost(self) -> None:
        """While some are lost, nothing comes that one process would not have pushed, and nothing twice; what is left
        out had reached its recipient in another way, or the socket did not last."""
        for seed in range(SCENARIOS):
            with self.subTest(seed=seed):
                one, two = self.worlds()
                random, losing = Random(seed), Random(seed)

                def cut(losing: Random = losing) -> None:
                    lost = losing.random() < 0.5
                    self.network.cut = lambda node: lost

                self.scenario(random, one, two, cut)
                for world in (one, two):
                    world.later(SCAN_WINDOW + SOON)
                    world.listen()
                self.assertEqual(two.waiting(), one.waiting())
                for there, here, ended in zip(two.pushes, one.pushes, one.ended, strict=True):
                    self.assertEqual(Counter(there) - Counter(here), Counter())
                    self.assertLessEqual(set(here) - set(there), ended | one.picked_up)
                self.network.cut = lambda node: False
