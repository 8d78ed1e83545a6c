"""Commands answered 200 survive the death of the daemon and are never carried out again (DCTRL-0004 12.2)."""

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
from tests.integration.cluster import make_mongo_storage
from tests.integration.message_load import LoadSenders, PreparedForward, SendAttempt, prepare_daemon
from tests.integration.raw_decentrl_client import JSON, DaemonClient, RawDecentrlClient, RawWebSocket
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.ledger_checks import read_shared_mongo_ledger

# `make durability` runs more rounds. The first one has nothing to acknowledge.
ROUNDS = int(os.environ.get("DURABILITY_ROUNDS", "3"))
EVENTS, BATCHES, ACKNOWLEDGEMENTS = 120, 60, 40
EVENTS_PER_BATCH = 4
IDS_PER_ACKNOWLEDGEMENT = 3
# Longer than the daemon takes for one command.
WHOLE_COMMAND_SECONDS = 0.02

Kind = Literal["event", "batch", "acknowledgement"]


@dataclass(slots=True)
class CommandAttempt:
    """
    A command and its outcome.

    :param prepared: the command.
    :param parts: payloads that it adds; for an acknowledgement, ids that it removes.
    :param status: response status; None without a response.
    :param reply: reply of a success.
    """

    kind: Kind
    prepared: PreparedForward
    parts: tuple[str, ...]
    status: int | None = None
    reply: dict[str, Any] = field(default_factory=dict)


class CommandSenders(LoadSenders):
    """Connections that post commands in a closed loop. :ivar replies: by marker."""

    def __init__(self, port: int, commands: Sequence[PreparedForward]) -> None:
        super().__init__(port, commands)
        self.replies: dict[str, dict[str, Any]] = {}

    def _send(self, connection: HTTPConnection, command: PreparedForward, post: SendAttempt) -> None:
        connection.request("POST", "/", command.body, {"Content-Type": JSON})
        response = connection.getresponse()
        reply = encoding.loads_object(response.read())
        with self._changed:
            post.status = response.status
            self.replies[command.marker] = reply
            self._answers += 1
            self._changed.notify_all()


class PushRecorder:
    """Reads a socket until it closes. :ivar event_ids: ids of the pushed events."""

    def __init__(self, identity: RawDecentrlClient) -> None:
        self.event_ids: list[str] = []
        self._socket = identity.open_socket()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when the socket has closed."""
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        for message in self._socket.messages():
            self.event_ids += [event["id"] for event in message.get("events", ())]


class KillTests(SynchronousTestCase):
    """SIGKILL in the middle of a load, and the state afterwards."""

    rounds = ROUNDS

    def storage(self) -> dict[str, Any]:
        """Storage settings of the daemon."""
        return {}

    def read_ledger(self) -> StoreLedger:
        """Read the store's ledger."""
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
        self.bob.permit_sender(self.alice)
        self.stored_payloads: Counter[str] = Counter()
        self.pending: dict[str, str] = {}

    def test_commands_survive_kill_and_happen_once(self) -> None:
        """
        What was answered 200 has happened; unanswered commands have happened completely or not at all; pushed events
        are stored; a repeated command is refused if, and only if, it was carried out.
        """
        for number in range(self.rounds):
            attempts = self.prepare_commands(number)
            pushed_ids = self.kill_under_load(attempts)
            self.daemon.start()
            sent = [attempt for attempt in attempts if attempt.prepared.marker in self.statuses]
            self.read_state()
            self.assertLessEqual(set(pushed_ids), set(self.pending))
            carried_out = {attempt.prepared.marker: self.was_carried_out(attempt) for attempt in sent}
            lost = [attempt for attempt in sent if attempt.status == 200 and not carried_out[attempt.prepared.marker]]
            self.assertEqual(lost, [])
            outcomes = self.repost(sent)
            expected = {
                marker: "DUPLICATE_NONCE" if has_happened else "SUCCESS"
                for marker, has_happened in carried_out.items()
            }
            self.assertEqual(outcomes, expected)
            self.read_state()
            self.assertEqual([attempt for attempt in sent if not self.was_carried_out(attempt)], [])
            self.assert_event_ids(sent)
            ledger = self.read_ledger().decentrl
            self.assertEqual((ledger.difference, ledger.waiting), (0, len(self.pending)))
        self.assertEqual(max(self.stored_payloads.values()), 1)
        self.assertGreater(len(self.stored_payloads), self.rounds)

    def prepare_commands(self, number: int) -> list[CommandAttempt]:
        """Commands in random order; acknowledgements are of events pending from earlier rounds."""
        alice, bob = self.alice, self.bob
        attempts = []
        for index in range(EVENTS):
            payload = f"event {number} {index}"
            raw = alice.command(payload, to=bob.did, channel=PRIVATE_CHANNEL)
            attempts.append(CommandAttempt("event", PreparedForward(payload, raw), (payload,)))
        for index in range(BATCHES):
            parts = tuple(f"batch {number} {index} {part}" for part in range(EVENTS_PER_BATCH))
            raw = bob.command(
                {"type": "SAVE_EVENTS", "events": [bob.stored_event(part, tags=("t",)) for part in parts]}
            )
            attempts.append(CommandAttempt("batch", PreparedForward(parts[0], raw), parts))
        ids = self.random.sample(
            sorted(self.pending), min(len(self.pending), ACKNOWLEDGEMENTS * IDS_PER_ACKNOWLEDGEMENT)
        )
        for start in range(0, len(ids), IDS_PER_ACKNOWLEDGEMENT):
            parts = tuple(ids[start : start + IDS_PER_ACKNOWLEDGEMENT])
            raw = bob.command({"type": "ACKNOWLEDGE_PENDING_EVENTS", "event_ids": list(parts)})
            attempts.append(CommandAttempt("acknowledgement", PreparedForward(f"acknowledge {parts[0]}", raw), parts))
        self.random.shuffle(attempts)
        return attempts

    def kill_under_load(self, attempts: list[CommandAttempt]) -> list[str]:
        """Send until the daemon is killed; return the ids of events pushed meanwhile."""
        recorder = PushRecorder(self.bob)
        senders = CommandSenders(self.daemon.port, [attempt.prepared for attempt in attempts])
        senders.start()
        senders.wait_for_posts(self.random.randrange(10, len(attempts)))
        # At a random moment in the processing of a command, unless none is left.
        senders.done.wait(self.random.uniform(0, WHOLE_COMMAND_SECONDS))
        self.daemon.kill()
        senders.join()
        recorder.join()
        self.statuses = {post.marker: post.status for post in senders.posts}
        self.assertLessEqual(set(self.statuses.values()), {200, None}, senders.replies)
        for attempt in attempts:
            attempt.status = self.statuses.get(attempt.prepared.marker)
            attempt.reply = senders.replies.get(attempt.prepared.marker, {})
        return recorder.event_ids

    def read_state(self) -> None:
        """Read Bob's stored and pending events."""
        self.stored_payloads = Counter(event["payload"] for event in self.bob.query("EVENTS", "events"))
        self.pending = {event["id"]: event["payload"] for event in self.bob.pending_events()}
        self.assertEqual(len(set(self.pending.values())), len(self.pending))

    def was_carried_out(self, attempt: CommandAttempt) -> bool:
        """Whether a command was carried out; it must be completely or not at all."""
        stored = {
            "event": set(self.pending.values()),
            "batch": set(self.stored_payloads),
            "acknowledgement": set(self.pending),
        }
        parts_found = [part in stored[attempt.kind] for part in attempt.parts]
        self.assertEqual(len(set(parts_found)), 1, (attempt.kind, parts_found))
        return parts_found[0] is (attempt.kind != "acknowledgement")

    def repost(self, attempts: Iterable[CommandAttempt]) -> dict[str, str]:
        """Post the same bytes again; code or type of each reply."""
        senders = CommandSenders(self.daemon.port, [attempt.prepared for attempt in attempts])
        senders.start()
        senders.join()
        return {marker: str(reply.get("code", reply["type"])) for marker, reply in senders.replies.items()}

    def assert_event_ids(self, attempts: Iterable[CommandAttempt]) -> None:
        """Each event has the id that its sender got."""
        reported = {
            attempt.reply["pendingEventId"]: attempt.parts[0]
            for attempt in attempts
            if attempt.kind == "event" and attempt.reply
        }
        self.assertEqual({id_: self.pending.get(id_) for id_ in reported}, reported)

    def test_refuses_repeated_authentication_after_kill(self) -> None:
        """The registration persists."""
        message = self.bob.authentication()
        self.authenticate(message)
        self.daemon.kill()
        self.daemon.start()
        socket = RawWebSocket(self.daemon_client)
        socket.send(message)
        frames, close = socket.read_until_close()
        self.assertEqual((frames, close.code), ([b'{"type":"AUTH_FAILED","code":"INVALID_MESSAGE"}'], 4002))
        self.authenticate(self.bob.authentication())

    def authenticate(self, message: dict[str, Any]) -> None:
        """Authenticate on a socket with this message, and close it."""
        socket = RawWebSocket(self.daemon_client)
        socket.send(message)
        self.assertEqual(socket.receive(), {"type": "AUTH_SUCCESS"})
        socket.close()


class MongoDBKillTests(KillTests):
    """The same with a MongoDB server, which keeps running."""

    rounds = max(2, ROUNDS // 3)

    def storage(self) -> dict[str, Any]:
        return make_mongo_storage(self)

    def read_ledger(self) -> StoreLedger:
        return read_shared_mongo_ledger(self.daemon)
