"""Nothing is lost that a hint was lost of: whatever clocks say, whatever others did, and however much there is."""

from __future__ import annotations

from typing import Any

from mediatord.cluster import rounds
from mediatord.cluster.rounds import CATCH_UP, COMMIT, LATE, WINDOW, YOUNG
from mediatord.cluster.sealing import WINDOW as CLOCKS_DIFFER
from mediatord.interfaces import StoredMessage
from tests.cluster.test_village import DIDCommVillage
from tests.house import MP, FakeSocket

SOON = CATCH_UP + YOUNG + 1


class _Wrong:
    """A clock that goes wrong by so many seconds."""

    def __init__(self, clock: Any, error: float) -> None:
        self._clock = clock
        self._error = error

    def seconds(self) -> float:
        return float(self._clock.seconds() + self._error)


class CatchUpVillage(DIDCommVillage):
    """Hints can be lost."""

    def deaf(self, is_deaf: bool = True) -> None:
        """Whether no node hears of another."""
        self.wires.cut = lambda node, path: is_deaf

    def forward_by(self, error: float, text: str) -> None:
        """Leave something at a node whose clock is wrong by so much."""
        clock = self.store._clock
        self.store._clock = _Wrong(clock, error)
        try:
            self.forward(self.a, text)
        finally:
            self.store._clock = clock

    def heard(self, socket: FakeSocket) -> list[str]:
        """What was pushed, in any order."""
        return sorted(self.texts(socket))


class DelayedTests(CatchUpVillage):
    def test_lost_hint(self) -> None:
        """What was delayed for longer than rounds look back counts from when it was due."""
        socket = self.live_at(self.b)
        self.forward(self.a, "late", delay_milli=2000 * WINDOW)
        self.deaf()
        self.later(2 * WINDOW + SOON)
        self.assertEqual(self.texts(socket), ["late"])
        self.later(3 * WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_node_dies_with_it(self) -> None:
        """Another one finds what was taken from the store and not handed over."""
        socket = self.live_at(self.b)
        self.forward(self.a, "late", delay_milli=2000 * WINDOW)
        taken: list[StoredMessage] = []
        for house in (self.a, self.b):
            house.half.due._hand_over = taken.append
        self.later(2 * WINDOW + 2)
        self.assertEqual((len(taken), self.texts(socket)), (1, []))
        self.a.freeze()
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["late"])

    def test_no_backlog(self) -> None:
        """What was due before the socket was there waits to be asked for."""
        self.forward(self.a, "late", delay_milli=1000)
        self.later(1 + LATE + 1)
        socket = self.live_at(self.b)
        self.later(WINDOW + SOON)
        self.assertEqual(self.texts(socket), [])


class PushedElsewhereTests(CatchUpVillage):
    settings = {"queue": {"delivered_timeout": "20s"}}

    def test_dead_socket_elsewhere(self) -> None:
        """A socket that nobody reads any more keeps nothing from those of other nodes."""
        self.live_at(self.a)
        socket = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        self.assertEqual(self.texts(socket), [])
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_not_over_and_over(self) -> None:
        """What was pushed here and is overdue, or whose socket is gone, is not pushed by each round."""
        self.live_at(self.a)
        first, second = self.live_at(self.b), self.live_at(self.b)
        self.forward(self.a)
        self.assertEqual((self.texts(first), self.texts(second)), (["hello"], ["hello"]))
        self.b.base.connections.closed(first)
        self.later(2 * WINDOW)
        self.assertEqual(self.texts(second), [])

    def test_acknowledged(self) -> None:
        """What was acknowledged is gone for everybody."""
        socket = self.live_at(self.b)
        self.deaf()
        self.forward(self.a)
        (delivered,) = self.bob.fetch()
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.later(2 * WINDOW)
        self.assertEqual(self.texts(socket), [])


class ClockTests(CatchUpVillage):
    def test_slow_clock(self) -> None:
        """What came right after a socket, at a node that has the time of right before it, is pushed."""
        self.deaf()
        socket = self.live_at(self.b)
        self.later(COMMIT)
        for error in (-2.0 * COMMIT, -CLOCKS_DIFFER):
            self.forward_by(error, str(error))
        self.later(SOON)
        self.assertEqual(self.heard(socket), ["-5.0", "-60.0"])

    def test_slow_commit(self) -> None:
        """Likewise when it took its time to be written."""
        self.deaf()
        socket = self.live_at(self.b)
        self.forward_by(-LATE, "slow")
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["slow"])

    def test_any_time(self) -> None:
        """However far clocks are apart, and whenever it comes between two rounds."""
        socket = self.live_at(self.b)
        self.later(LATE + WINDOW)
        self.deaf()
        expected = []
        for number in range(int(CATCH_UP) + 1):
            for error in (-LATE, -25.0, 0.0, 25.0, CLOCKS_DIFFER):
                expected.append(f"{number} {error}")
                self.forward_by(error, expected[-1])
            self.later(1)
        self.later(CLOCKS_DIFFER + SOON)
        self.assertEqual(self.heard(socket), sorted(expected))
        self.later(2 * WINDOW)
        self.assertEqual(self.texts(socket), [])

    def test_little_backlog(self) -> None:
        """What came shortly before a socket may be pushed as well: once."""
        self.forward(self.a, "old")
        self.later(LATE)
        self.forward(self.a, "new")
        self.later(1)
        socket = self.live_at(self.b)
        self.later(2 * WINDOW)
        self.assertEqual(self.texts(socket), ["new"])


class ManyTests(CatchUpVillage):
    def test_of_one_time(self) -> None:
        """More of one time than one question is answered with."""
        self.patch(rounds, "CHUNK", 3)
        socket = self.live_at(self.b)
        self.deaf()
        texts = [f"{number:02}" for number in range(11)]
        for text in texts:
            self.forward(self.a, text)
        self.later(SOON)
        self.assertEqual(self.heard(socket), texts)

    def test_of_different_clocks(self) -> None:
        """In whichever order they have come."""
        self.patch(rounds, "CHUNK", 3)
        socket = self.live_at(self.b)
        self.later(WINDOW)
        self.deaf()
        texts = [f"{number:02}" for number in range(20)]
        for number, text in enumerate(texts):
            self.forward_by(-(number * 7 % 20), text)
        self.later(SOON)
        self.assertEqual(self.heard(socket), texts)
        self.later(2 * WINDOW)
        self.assertEqual(self.texts(socket), [])
