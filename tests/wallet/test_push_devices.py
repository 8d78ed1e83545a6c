"""Wallets register devices for push notifications at a mediator."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import Message
from mediatord.protocol.didcomm.push_notifications import PushServiceName
from mediatord.wallet.decentrl_client import (
    CommandRefused,
    DecentrlIdentity,
    DecentrlMediator,
    DecentrlWallet,
    PushDevices,
    read_mediator_document,
)
from mediatord.wallet.didcomm_client import PROBLEM_REPORT, HTTPResponse, MediationRequests, MediatorProblem
from mediatord.wallet.didcomm_messages import UnreadableMessage
from tests.in_memory_mediator import InMemoryMediator, InMemoryWallet
from tests.push.registries import APNS, FCM, MEDIATOR_ID, VAPID_PUBLIC_KEY, make_core_registry, make_subscription

DEVICES: tuple[tuple[PushServiceName, dict[str, Any]], ...] = (
    ("fcm", FCM),
    ("apns", APNS),
    ("web_push", make_subscription(expirationTime=4_000_000_000_000)),
)


class DIDCommRequests(MediationRequests):
    """Requests to an in-memory mediator."""

    def __init__(self, in_memory: InMemoryMediator) -> None:
        self.wallet = InMemoryWallet(in_memory).enrol()
        super().__init__(self.wallet.did)

    async def request(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message:
        """Send a request; its response."""
        answer = self.wallet.answer(type_, dict(body or {}), **headers)
        if answer.message.type.uri == PROBLEM_REPORT:
            raise MediatorProblem(200, encoding.loads_object(answer.plaintext))
        return answer.message


class DIDCommTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, devices=make_core_registry)
        self.alice = DIDCommRequests(self.in_memory)

    def test_devices(self) -> None:
        """A device of each service is registered, read and removed."""
        run = self.in_memory.run
        for service, values in DEVICES:
            self.assertIsNone(run(self.alice.get_push_device(service)))
            run(self.alice.set_push_device(service, values))
            self.assertEqual(run(self.alice.get_push_device(service)), values)
        for service, _ in DEVICES:
            run(self.alice.remove_push_devices(service))
            self.assertIsNone(run(self.alice.get_push_device(service)))

    def test_key(self) -> None:
        """The key of the mediator is one that browsers accept."""
        key = self.in_memory.run(self.alice.vapid_public_key())
        self.assertEqual(key, VAPID_PUBLIC_KEY)
        self.assertEqual(len(base64.urlsafe_b64decode(key + "=")), 65)

    def test_refusals(self) -> None:
        """What the mediator refuses raises, also for a read."""
        work = Deferred.fromCoroutine(self.alice.set_push_device("apns", {"device_token": "x"}))
        self.assertEqual(self.failureResultOf(work, MediatorProblem).value.code, "e.p.msg.bad-body")
        self.alice = DIDCommRequests(InMemoryMediator(self))
        for refused in (self.alice.get_push_device("fcm"), self.alice.vapid_public_key()):
            problem = self.failureResultOf(Deferred.fromCoroutine(cast(Any, refused)), MediatorProblem)
            self.assertEqual(problem.value.code, "e.p.msg.unsupported")


class InMemoryDecentrlWallet(DecentrlWallet):
    """
    A wallet of an in-memory mediator.

    :ivar replies: what comes instead of the mediator's replies, if it is not empty.
    """

    def __init__(self, in_memory: InMemoryMediator) -> None:
        mediator = read_mediator_document(dict(in_memory.base.identity.now.web_document))
        identity = DecentrlIdentity.generate("alice", mediator.did)
        super().__init__(identity, mediator, cast(Any, None), in_memory.clock)
        self._in_memory = in_memory
        self.replies: list[dict[str, Any]] = []

    async def post(self, body: bytes, *, at: DecentrlMediator | None = None) -> HTTPResponse:
        """Serve a command."""
        if self.replies:
            return HTTPResponse(200, {"content-type": "application/json"}, encoding.dumps(self.replies.pop()))
        reply = self._in_memory.receive_command(body)
        return HTTPResponse(reply.status, {"content-type": "application/json"}, reply.body)


class DecentrlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, devices=make_core_registry)
        self.alice = InMemoryDecentrlWallet(self.in_memory)
        self.in_memory.run(self.alice.register())

    def test_devices(self) -> None:
        """A device of each service is registered, read and removed."""
        run = self.in_memory.run
        services = ("fcm", "apns", "web_push")
        self.assertEqual(run(self.alice.push_devices()), PushDevices(services, MEDIATOR_ID, VAPID_PUBLIC_KEY, []))
        for service, values in DEVICES:
            run(self.alice.set_push_device(service, values))
            self.in_memory.clock.advance(1)
        wanted = [{"service": service, **values} for service, values in DEVICES]
        self.assertEqual(run(self.alice.push_devices()).devices, wanted)
        run(self.alice.remove_push_devices("fcm"))
        self.assertEqual(run(self.alice.push_devices()).devices, wanted[1:])

    def test_refusals(self) -> None:
        """What the mediator refuses raises."""
        work = Deferred.fromCoroutine(self.alice.set_push_device("apns", {"device_token": "x"}))
        self.assertEqual(self.failureResultOf(work, CommandRefused).value.code, "INVALID_COMMAND")

    def test_invalid_replies(self) -> None:
        """A list that does not open, or is none."""
        for payload in (
            {},
            None,
            {"services": [], "mediator": "x", "encrypted_push_devices": "x", "ephemeral_public_key": "x"},
        ):
            self.alice.replies = [{"type": "SUCCESS", "payload": payload}]
            self.failureResultOf(Deferred.fromCoroutine(self.alice.push_devices()), UnreadableMessage)


@pytest.mark.parametrize("service", ["fcm", "apns", "web_push"])
def test_devices_are_not_shown(service: str) -> None:
    """Neither by a list of devices where it is logged by mistake."""
    assert "secret" not in repr(PushDevices((service,), MEDIATOR_ID, None, [{"device_token": "secret"}]))
