"""What the endpoints of Web Push, which clients register, can take from the rest of the process."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from threading import Event
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import TestCase

from mediatord.app.push import SenderSpec, build_services, load_push_credentials
from mediatord.config.settings import Config
from mediatord.identity.key_file import create_keys
from mediatord.net import name_lookups
from mediatord.net.outbound_http import LOCAL_LIMIT_REASONS
from mediatord.push.devices import WebPushDevice
from mediatord.push.service import IPushService, PushResult, Wakeup
from tests.integration.test_outbound import NamedReactor
from tests.net.outbound_test_case import FakeResolver
from tests.push.web_push_server import encode_base64url

_P256DH = ec.generate_private_key(ec.SECP256R1()).public_key().public_numbers()


class WebPushClientTests(TestCase):
    """The client that the daemon makes."""

    timeout = 60

    def setUp(self) -> None:
        self.release = Event()
        self.addCleanup(self.release.set)
        self.looked_up: list[str] = []
        self.patch(name_lookups, "getaddrinfo", self.look_up)
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        create_keys(directory / "keys.jwks")
        key = ec.generate_private_key(ec.SECP256R1())
        vapid = directory / "vapid.pem"
        vapid.touch(0o600)
        vapid.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        web_push = {"key_file": "vapid.pem", "contact": "mailto:admin@mediator.example"}
        settings = {"storage": {"backend": "memory"}, "push": {"web_push": web_push}}
        self.names = FakeResolver({})
        config = Config.model_validate(settings).resolved(directory)
        spec = SenderSpec(config.push, config.outbound, "mediator-1")
        services, _ = build_services(NamedReactor(self.names), spec, load_push_credentials(config.push))
        self.service: IPushService[WebPushDevice] = services["web_push"]
        self.addCleanup(self.service.close)

    def look_up(self, name: str, *_: Any, **__: Any) -> list[Any]:
        """As the platform, with a server that does not answer before the end of the test."""
        self.looked_up.append(name)
        self.release.wait()
        return []

    def wake(self, host: str) -> Deferred[PushResult]:
        """Send a wake-up to an endpoint."""
        point = encode_base64url(b"\4" + _P256DH.x.to_bytes(32) + _P256DH.y.to_bytes(32))
        device = WebPushDevice(f"https://{host}/send", point, encode_base64url(bytes(16)))
        return Deferred.fromCoroutine(self.service.send(device, Wakeup("mediator-1")))

    async def test_slow_names_are_kept_from_the_resolver_of_others(self) -> None:
        """A few are looked up in threads of their own; more are refused at once."""
        sent = [self.wake(f"slow{number}.example") for number in range(100)]
        self.assertEqual(self.names.asked, [])
        waiting = [one for one in sent if not one.called]
        self.assertEqual(len(waiting), name_lookups.MAX_LOOKUPS)
        refused = await gatherResults(one for one in sent if one.called)
        self.assertEqual(set(refused), {PushResult("retry", "ResolverBusy")})
        self.assertIn("ResolverBusy", LOCAL_LIMIT_REASONS)
        self.release.set()
        self.assertEqual({result.reason for result in await gatherResults(waiting)}, {"NameUnknown"})
        self.assertEqual(len(self.looked_up), name_lookups.MAX_LOOKUPS)
