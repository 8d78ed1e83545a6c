"""What was answered 200 survives the death of the daemon, and is never carried out again (DCTRL-0004 12.2)."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any, Literal

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import encoding
from mediatord.store.interfaces.messages import StoreLedger
from mediatord.wallet.decentrl_client import PRIVATE_CHANNEL
from tests.integration.cluster import fresh_storage
from tests.integration.message_load import LoadSenders, PreparedForward, SendAttempt, prepare_daemon
from tests.integration.raw_decentrl_client import JSON, DaemonClient, RawDecentrlClient, RawWebSocket
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.ledger_checks import read_daemon_mongo_ledger

# `make durability` has more. The first one has nothing to acknowledge yet.
ROUNDS = int(os.environ.get("DURABILITY_ROUNDS", "3"))
EVENTS, BATCHES, ACKNOWLEDGEMENTS = 120, 60, 40
IN_A_BATCH = 4
AT_ONCE = 3
# Longer than anything that the daemon does for one command.
WHOLE_COMMAND_SECONDS = 0.02

Kind = Literal["event", "batch", "acknowledgement"]


@dataclass(slots=True)
class CommandAttempt:
    """
    A command, and what became of it.

    :param letter: the command itself.
    :param parts: payloads that it brings; for an acknowledgement, ids that it takes away.
    :param status: of the answer; None when there was none.
    :param reply: of a success.
    """

    kind: Kind
    letter: PreparedForward
    parts: tuple[str, ...]
    status: int | None = None
    reply: dict[str, Any] = field(default_factory=dict)


class CommandSenders(LoadSenders):
    """Connections that post commands as fast as they are answered. :ivar replies: by marker."""

    def __init__(self, port: int, stock: Sequence[PreparedForward]) -> None:
        super().__init__(port, stock)
        self.replies: dict[str, dict[str, Any]] = {}

    def _send(self, connection: HTTPConnection, letter: PreparedForward, post: SendAttempt) -> None:
        connection.request("POST", "/", letter.body, {"Content-Type": JSON})
        response = connection.getresponse()
        reply = encoding.loads_object(response.read())
        with self._changed:
            post.status = response.status
            self.replies[letter.marker] = reply
            self._answers += 1
            self._changed.notify_all()


class PushRecorder:
    """Listens on a socket of somebody until it is cut. :ivar pushed: ids of the events that came."""

    def __init__(self, resident: RawDecentrlClient) -> None:
        self.pushed: list[str] = []
        self._line = resident.socket()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when there is nothing to hear any more."""
        self._thread.join()
        self._line.close()

    def _listen(self) -> None:
        for message in self._line.messages():
            self.pushed += [event["id"] for event in message.get("events", ())]


class KillTests(SynchronousTestCase):
    """kill -9 in the middle of a load, and what Bob finds afterwards."""

    rounds = ROUNDS

    def storage(self) -> dict[str, Any]:
        """Where the daemon keeps everything."""
        return {}

    def books(self) -> StoreLedger:
        """What the store says itself."""
        return read_sqlite_ledger(self.daemon_client.database)

    def setUp(self) -> None:
        seed = int(os.environ.get("DURABILITY_SEED", random.SystemRandom().randrange(1_000_000)))
        print(f"DURABILITY_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
        self.random = random.Random(seed)
        self.daemon = prepare_daemon({"storage": self.storage()})
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)
        self.daemon_client = DaemonClient(self.daemon)
        self.alice, self.bob = (
            RawDecentrlClient(self.daemon_client, "alice"),
            RawDecentrlClient(self.daemon_client, "bob"),
        )
        self.bob.register()
        self.bob.befriend(self.alice)
        self.kept: Counter[str] = Counter()
        self.waiting: dict[str, str] = {}

    def test_nothing_is_lost_and_nothing_happens_twice(self) -> None:
        """
        What was answered 200 is there, and what it acknowledged is not; what was not answered has happened or not,
        never half; what was pushed is there; and a command that comes again is refused if, and only if, it has been
        carried out.
        """
        for number in range(self.rounds):
            send_tasks = self.send_tasks(number)
            pushed = self.deadly_load(send_tasks)
            self.daemon.start()
            sent = [one for one in send_tasks if one.letter.marker in self.posted]
            self.look()
            self.assertLessEqual(set(pushed), set(self.waiting))
            happened = {one.letter.marker: self.has_happened(one) for one in sent}
            lost = [one for one in sent if one.status == 200 and not happened[one.letter.marker]]
            self.assertEqual(lost, [])
            again = self.post_again(sent)
            expected = {marker: "DUPLICATE_NONCE" if done else "SUCCESS" for marker, done in happened.items()}
            self.assertEqual(again, expected)
            self.look()
            self.assertEqual([one for one in sent if not self.has_happened(one)], [])
            self.check_ids(sent)
            books = self.books().decentrl
            self.assertEqual((books.difference, books.waiting), (0, len(self.waiting)))
        self.assertEqual(max(self.kept.values()), 1)
        self.assertGreater(len(self.kept), self.rounds)

    def send_tasks(self, number: int) -> list[CommandAttempt]:
        """A load, in any order; what is acknowledged is what waits from before."""
        alice, bob = self.alice, self.bob
        found = []
        for one in range(EVENTS):
            payload = f"event {number} {one}"
            raw = alice.command(payload, to=bob.did, channel=PRIVATE_CHANNEL)
            found.append(CommandAttempt("event", PreparedForward(payload, raw), (payload,)))
        for one in range(BATCHES):
            parts = tuple(f"batch {number} {one} {part}" for part in range(IN_A_BATCH))
            raw = bob.command({"type": "SAVE_EVENTS", "events": [bob.event(part, tags=("t",)) for part in parts]})
            found.append(CommandAttempt("batch", PreparedForward(parts[0], raw), parts))
        ids = self.random.sample(sorted(self.waiting), min(len(self.waiting), ACKNOWLEDGEMENTS * AT_ONCE))
        for start in range(0, len(ids), AT_ONCE):
            parts = tuple(ids[start : start + AT_ONCE])
            raw = bob.command({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": list(parts)})
            found.append(CommandAttempt("acknowledgement", PreparedForward(f"acknowledge {parts[0]}", raw), parts))
        self.random.shuffle(found)
        return found

    def deadly_load(self, send_tasks: list[CommandAttempt]) -> list[str]:
        """Send until the daemon is killed; the ids of the events that were pushed meanwhile."""
        ear = PushRecorder(self.bob)
        senders = CommandSenders(self.daemon.port, [one.letter for one in send_tasks])
        senders.start()
        senders.wait_for_posts(self.random.randrange(10, len(send_tasks)))
        # Any moment in the life of a command, unless there is none left.
        senders.done.wait(self.random.uniform(0, WHOLE_COMMAND_SECONDS))
        self.daemon.kill()
        senders.join()
        ear.join()
        self.posted = {post.marker: post.status for post in senders.posts}
        self.assertLessEqual(set(self.posted.values()), {200, None}, senders.replies)
        for one in send_tasks:
            one.status = self.posted.get(one.letter.marker)
            one.reply = senders.replies.get(one.letter.marker, {})
        return ear.pushed

    def look(self) -> None:
        """What Bob has at this moment."""
        self.kept = Counter(one["payload"] for one in self.bob.items("EVENTS", "events"))
        self.waiting = {one["id"]: one["payload"] for one in self.bob.pending()}
        self.assertEqual(len(set(self.waiting.values())), len(self.waiting))

    def has_happened(self, send_task: CommandAttempt) -> bool:
        """Whether it was carried out; all of it or nothing."""
        there = {"event": set(self.waiting.values()), "batch": set(self.kept), "acknowledgement": set(self.waiting)}
        found = [part in there[send_task.kind] for part in send_task.parts]
        self.assertEqual(len(set(found)), 1, (send_task.kind, found))
        return found[0] is (send_task.kind != "acknowledgement")

    def post_again(self, send_tasks: Iterable[CommandAttempt]) -> dict[str, str]:
        """The very same bytes once more; the code of each reply, or its type."""
        senders = CommandSenders(self.daemon.port, [one.letter for one in send_tasks])
        senders.start()
        senders.join()
        return {marker: str(reply.get("code", reply["type"])) for marker, reply in senders.replies.items()}

    def check_ids(self, send_tasks: Iterable[CommandAttempt]) -> None:
        """An event has the id that its sender was told."""
        told = {one.reply["pendingEventId"]: one.parts[0] for one in send_tasks if one.kind == "event" and one.reply}
        self.assertEqual({id_: self.waiting.get(id_) for id_ in told}, told)

    def test_a_socket_that_was_authenticated(self) -> None:
        """The message that opened a socket opens none after a crash; who was registered still is."""
        greeting = self.bob.greeting()
        self.open(greeting)
        self.daemon.kill()
        self.daemon.start()
        line = RawWebSocket(self.daemon_client)
        line.say(greeting)
        heard, end = line.rest()
        self.assertEqual((heard, end.code), ([b'{"type":"AUTH_FAILED","code":"INVALID_MESSAGE"}'], 4002))
        self.open(self.bob.greeting())

    def open(self, greeting: dict[str, Any]) -> None:
        """Open a socket with this, and leave it."""
        line = RawWebSocket(self.daemon_client)
        line.say(greeting)
        self.assertEqual(line.hear(), {"type": "AUTH_SUCCESS"})
        line.close()


class MongoDBKillTests(KillTests):
    """The same with a MongoDB server, which lives on."""

    rounds = max(2, ROUNDS // 3)

    def storage(self) -> dict[str, Any]:
        return fresh_storage(self)

    def books(self) -> StoreLedger:
        return read_daemon_mongo_ledger(self.daemon)
