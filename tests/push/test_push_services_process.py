"""The push services in a process of their own, and a client that verifies their certificate."""

from __future__ import annotations

import tempfile
from ipaddress import ip_network
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.net.outbound_http import ConnectionLimits, OutboundHTTPClient
from mediatord.push.devices import FCMDevice, WebPushDevice
from mediatord.push.fcm import FCMService, load_fcm_credentials
from mediatord.push.service import PushResult, Wakeup
from mediatord.push.web_push import VAPIDKey, WebPushService
from tests.push.fcm_server import UNREGISTERED
from tests.push.push_services_process import run_push_services
from tests.push.push_test_case import MovableReactor
from tests.push.scripted_server import Answer
from tests.push.web_push_server import encode_base64url

pytestmark = pytest.mark.system


class PushServicesProcessTests(TestCase):
    """Script and record of both services."""

    timeout = 120

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        running = run_push_services(Path(directory.name))
        self.services = running.__enter__()
        self.addCleanup(running.__exit__, None, None, None)
        authority = Certificate.loadPEM(self.services.authority.read_bytes())
        self.client = OutboundHTTPClient(
            MovableReactor(),
            allow_private=[ip_network("127.0.0.0/8")],
            trust_root=trustRootFromCertificates([authority]),
            keep=ConnectionLimits(),
        )
        self.addCleanup(self.client.close)

    async def test_fcm(self) -> None:
        """Answers as scripted, then as FCM does."""
        credentials = load_fcm_credentials(self.services.fcm_credentials)
        service = FCMService(credentials, self.client, url=self.services.fcm_url)
        device, wakeup = FCMDevice("token", "android"), Wakeup("mediator-1")
        await deferToThread(self.services.set_answers, "fcm", [UNREGISTERED])
        outcomes = [(await service.send(device, wakeup)).outcome for _ in range(2)]
        self.assertEqual(outcomes, ["gone", "sent"])
        received = await deferToThread(self.services.get_received)
        self.assertEqual(received["requests"], {"fcm": 2, "token": 1, "web_push": 0})
        self.assertEqual([message["data"] for message in received["fcm"]], [{"mediator": "mediator-1"}])

    async def test_web_push(self) -> None:
        """Delivers what the user agent decrypts; answers as scripted until told otherwise."""
        private = ec.generate_private_key(ec.SECP256R1())
        numbers = private.public_key().public_numbers()
        key = VAPIDKey(private, encode_base64url(b"\4" + numbers.x.to_bytes(32) + numbers.y.to_bytes(32)))
        service = WebPushService(key, "mailto:operator@mediator.example", self.client)
        subscription = await deferToThread(self.services.subscribe, key.public)
        device = WebPushDevice(subscription["endpoint"], **subscription["keys"])
        busy = Answer(503, headers={"Retry-After": "5"})
        await deferToThread(self.services.set_answers, "web_push", always=busy)
        for _ in range(2):
            result = await service.send(device, Wakeup("mediator-1"))
            self.assertEqual(result, PushResult("retry", "unavailable", 503, 5.0))
        await deferToThread(self.services.set_answers, "web_push")
        self.assertEqual((await service.send(device, Wakeup("mediator-1"))).outcome, "sent")
        received = await deferToThread(self.services.get_received)
        self.assertEqual(received["web_push"], {device.endpoint: ['{"mediator":"mediator-1"}']})
        self.assertEqual(received["connections"]["web_push"], 1)
