"""
What counts as knowledge of waiting messages: a request that shows all of them, and nothing else. The whole mediator
in memory, with a scripted push service.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.decentrl import event_push
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS
from tests.decentrl.test_push_devices import SET, seal_device
from tests.in_memory_identities import InMemoryIdentity, register_two_identities
from tests.in_memory_mediator import MP, InMemoryMediator, InMemoryWallet, pack_forward
from tests.push.registries import FCM
from tests.push.scripted_service import ScriptedService

# More than any pause of the default settings.
LONG = 60


class PollTestCase(SynchronousTestCase):
    """A mediator, and a push service whose wake-ups are counted."""

    in_memory: InMemoryMediator

    def setUp(self) -> None:
        self.fcm = ScriptedService("fcm")

    def pass_time(self, seconds: float = 1.0) -> None:
        """In steps as small as those of the schedule."""
        self.in_memory.clock.pump([0.1] * round(seconds * 10))

    def count_wakeups(self) -> int:
        """Number of wake-ups once all that are due were sent."""
        self.pass_time(LONG)
        return len(self.fcm.requests)

    @contextmanager
    def arriving_during(self, store: Any, operation: str, arrive: Callable[[], object]) -> Iterator[None]:
        """Let something arrive after the store has read, and before its result is there."""
        read = getattr(store, operation)

        def read_and_arrive(*arguments: Any, **options: Any) -> Deferred[Any]:
            result: Deferred[Any] = read(*arguments, **options)
            setattr(store, operation, read)
            self.in_memory.clock.advance(0.01)
            arrive()
            return result

        with patch.object(store, operation, read_and_arrive):
            yield


class DIDCommTests(PollTestCase):
    """Requests of Message Pickup."""

    def setUp(self) -> None:
        super().setUp()
        self.in_memory = InMemoryMediator(self, push_service=self.fcm)
        self.alice = InMemoryWallet(self.in_memory).enrol()
        self.alice.answer(PUSH_PROTOCOLS["fcm"].type("set"), FCM)
        self.pass_time()

    def deliver(self) -> None:
        """A message for Alice."""
        reply = self.in_memory.receive(pack_forward(self.in_memory, self.alice.did, self.alice.make_payload()))
        self.assertEqual(reply.status, 202)

    def acknowledge(self, *ids: str, return_route: str = "all") -> None:
        """Alice acknowledges messages."""
        reply = self.alice.ask(f"{MP}/messages-received", {"message_id_list": ids}, return_route=return_route)
        self.assertEqual(reply.status, 200 if return_route == "all" else 202)

    def test_shown_messages_wake_nobody(self) -> None:
        """Status, delivery and change of live mode show all that waits."""
        for type_ in ("status-request", "delivery-request", "live-delivery-change"):
            self.deliver()
            self.alice.answer(f"{MP}/{type_}", {"limit": 10, "live_delivery": False})
            self.assertEqual(self.count_wakeups(), 0, type_)

    def test_acknowledgement(self) -> None:
        """It shows nothing, whether its reply contains a status or goes nowhere."""
        for number, return_route in enumerate(("all", "none"), 1):
            self.deliver()
            (shown,) = self.alice.fetch()
            self.pass_time()
            self.deliver()
            self.acknowledge(shown.id, return_route=return_route)
            self.assertEqual(self.count_wakeups(), number)
            self.acknowledge(*(one.id for one in self.alice.fetch()))

    def test_arrival_during_the_read(self) -> None:
        """A message that came too late for the reply."""
        for number, (operation, type_) in enumerate(
            (
                ("get_queue_status", "status-request"),
                ("fetch_messages", "delivery-request"),
                ("get_queue_status", "live-delivery-change"),
            ),
            1,
        ):
            with self.arriving_during(self.in_memory.store, operation, self.deliver):
                self.alice.answer(f"{MP}/{type_}", {"limit": 10, "live_delivery": False})
            self.assertEqual(self.count_wakeups(), number, type_)

    def test_one_recipient_did(self) -> None:
        """A request about one recipient DID shows nothing of the others."""
        for number, type_ in enumerate(("status-request", "delivery-request"), 1):
            self.deliver()
            self.alice.answer(f"{MP}/{type_}", {"limit": 10, "recipient_did": self.alice.did})
            self.assertEqual(self.count_wakeups(), number, type_)
            self.alice.answer(f"{MP}/status-request")
            self.pass_time()

    def test_refused_request(self) -> None:
        """Live mode is not possible over HTTP."""
        self.deliver()
        self.alice.ask(f"{MP}/live-delivery-change", {"live_delivery": True})
        self.assertEqual(self.count_wakeups(), 1)


class DecentrlTests(PollTestCase):
    """Commands and sockets of Decentrl."""

    def setUp(self) -> None:
        super().setUp()
        self.in_memory, self.alice, self.bob = register_two_identities(
            self, push_service=self.fcm, push={"decentrl": True}
        )
        self.bob.save_contract_with(self.alice)
        self.bob.answer(SET, **seal_device(self.bob, {"service": "fcm", **FCM}))
        self.pass_time()

    def send(self, recipient: InMemoryIdentity | None = None) -> str:
        """An event for Bob; its id."""
        id_: str = json.loads(self.alice.send_event(recipient or self.bob).body)["pendingEventId"]
        return id_

    def acknowledge(self, *ids: str) -> None:
        """Bob acknowledges events."""
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids)

    def test_shown_events_wake_nobody(self) -> None:
        """A query shows all that waits."""
        self.send()
        self.bob.pending()
        self.assertEqual(self.count_wakeups(), 0)

    def test_acknowledgement(self) -> None:
        """Its reply is empty."""
        shown = self.send()
        self.bob.pending()
        self.pass_time()
        self.send()
        self.acknowledge(shown)
        self.assertEqual(self.count_wakeups(), 1)

    def test_arrival_during_the_read(self) -> None:
        """An event that came too late for the reply."""
        with self.arriving_during(self.in_memory.store.decentrl, "pending_events", self.send):
            self.assertEqual(self.bob.pending(), [])
        self.assertEqual(self.count_wakeups(), 1)

    def test_one_sender(self) -> None:
        """A query about one sender shows nothing of the others."""
        self.send()
        self.bob.query("PENDING_EVENTS", "pending_events", filter={"sender_did": self.bob.did})
        self.assertEqual(self.count_wakeups(), 1)

    def test_authentication_of_a_socket(self) -> None:
        """It shows nothing of what waits; what comes later is pushed."""
        self.send()
        socket = self.bob.connect()
        self.assertEqual(self.count_wakeups(), 1)
        self.send()
        self.assertIn("PENDING_EVENTS", [frame["type"] for frame in socket.take_frames()])
        self.assertEqual(self.count_wakeups(), 1)

    def test_socket_closes_without_an_acknowledgement(self) -> None:
        """An event that was pushed to a dead socket wakes once it is closed."""
        self.bob.pending()
        socket = self.bob.connect()
        self.send()
        self.assertEqual(self.count_wakeups(), 0)
        socket.disconnect()
        self.assertEqual(self.count_wakeups(), 1)

    def test_socket_closes_after_an_acknowledgement(self) -> None:
        """Nothing waits any more; or what waits was not pushed to it, and was shown."""
        self.send()
        socket = self.bob.connect()
        self.bob.pending()
        self.acknowledge(self.send())
        socket.disconnect()
        self.assertEqual(self.count_wakeups(), 0)

    def test_one_of_several_sockets_closes(self) -> None:
        """While another has the event, nobody is woken; after the last one, once."""
        self.bob.pending()
        first, second = self.bob.connect(), self.bob.connect()
        self.send()
        first.disconnect()
        self.assertEqual(self.count_wakeups(), 0)
        second.disconnect()
        self.assertEqual(self.count_wakeups(), 1)

    def test_pushes_are_remembered_within_a_bound(self) -> None:
        """Of one too many, the oldest wakes at once."""
        self.bob.pending()
        socket = self.bob.connect()
        self.patch(event_push, "_MAX_REMEMBERED_PUSHES", 2)
        oldest = self.send()
        self.send()
        self.assertEqual(self.count_wakeups(), 0)
        newest = self.send()
        self.assertFalse(self.in_memory.decentrl.event_pusher.was_pushed(oldest))
        self.assertTrue(self.in_memory.decentrl.event_pusher.was_pushed(newest))
        self.assertEqual(self.count_wakeups(), 1)
        socket.disconnect()
        self.assertEqual(self.count_wakeups(), 2)
