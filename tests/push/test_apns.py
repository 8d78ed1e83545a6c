"""Wake-ups by APNs over TLS on loopback, against a service made from Apple's documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from h2.errors import ErrorCodes
from twisted.internet import reactor as _reactor  # noqa: TID251  sockets and TLS are the subject
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.ssl import Certificate
from twisted.internet.task import Clock
from twisted.logger import LogEvent, LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import OperatorError
from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.push.apns import APNsCredentials, APNsService, ProviderToken, load_apns_credentials
from mediatord.push.devices import APNsDevice
from mediatord.push.service import IPushService, PushAlert, PushResult, Wakeup
from tests.certificate_authority import CertificateAuthority
from tests.net.clocked_reactor import ClockedReactor
from tests.net.http2_server import close_connection, go_away_after, go_away_before, hang, refuse, reset, respond
from tests.net.outbound_test_case import FakeResolver
from tests.push.fake_apns import FakeAPNs, answer

NAME = "api.push.example"
TEAM, KEY_ID, TOPIC = "TEAM567890", "KEY4567890", "com.example.wallet"
TOKEN = "00fc13adff785122b4ad28809a3420982341241421348097878e577c991de8f0"
MEDIATOR = "n2Zb-m9Qd0w"
DEVICE = APNsDevice(TOKEN)
WAKEUP = Wakeup(MEDIATOR)


class APNsTestCase(TestCase):
    """The service, and a fake of Apple's."""

    def setUp(self) -> None:
        temporary = TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        authority = CertificateAuthority(directory)
        self.reactor = ClockedReactor(_reactor, FakeResolver({NAME: ["127.0.0.1"]}))
        self.clock = self.reactor.clock
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.credentials = APNsCredentials(self.key, KEY_ID, TEAM, TOPIC)
        public = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.fake = FakeAPNs(public, team=TEAM, key_id=KEY_ID, topic=TOPIC, seconds=self.clock.seconds)
        port = self.fake.server.listen(_reactor, authority.issue(NAME, [NAME]))
        self.addCleanup(port.stopListening)
        self.url = f"https://{NAME}:{port.getHost().port}"
        self.outbound = OutboundHTTPClient(
            self.reactor,
            allow_private=[IPv4Network("127.0.0.0/8")],
            trust_root=Certificate.loadPEM(authority.path.read_bytes()),
        )
        self.service = self.make_service()

    def make_service(self, alert: PushAlert | None = None) -> APNsService:
        """A service that uses the fake."""
        service = APNsService(self.outbound, self.credentials, self.url, alert)
        self.addCleanup(lambda: Deferred.fromCoroutine(service.close()))
        return service

    def send(self, device: APNsDevice = DEVICE, wakeup: Wakeup = WAKEUP) -> Deferred[PushResult]:
        """Send a wake-up."""
        return Deferred.fromCoroutine(self.service.send(device, wakeup))


def warnings(events: Sequence[LogEvent]) -> list[str]:
    """Texts of warnings."""
    return [str(formatEvent(event)) for event in events if event["log_level"] is LogLevel.warn]


class NotificationTests(APNsTestCase):
    """What is sent."""

    async def test_background(self) -> None:
        """Without alert the app is woken in the background; nothing is told but the mediator."""
        service: IPushService[APNsDevice] = self.service
        self.assertEqual(await service.send(DEVICE, WAKEUP), PushResult("sent", "", 200))
        (notification,) = self.fake.notifications
        self.assertEqual(notification.device_token, TOKEN)
        self.assertEqual(notification.payload, {"aps": {"content-available": 1}, "mediator": MEDIATOR})
        headers = dict(notification.headers)
        del headers["authorization"]
        expected = {
            ":method": "POST",
            ":scheme": "https",
            ":authority": self.url.removeprefix("https://"),
            ":path": f"/3/device/{TOKEN}",
            "apns-topic": TOPIC,
            "apns-push-type": "background",
            "apns-priority": "5",
            "apns-expiration": str(int(self.clock.seconds()) + 86_400),
            "apns-collapse-id": MEDIATOR,
            "content-type": "application/json",
            "content-length": str(len(self.fake.server.requests[0].body)),
        }
        self.assertEqual(headers, expected)
        self.assertEqual((service.name, service.host_of(DEVICE)), ("apns", NAME))

    async def test_path_of_a_proxy(self) -> None:
        """A path in the URL precedes the path of the service."""
        self.url += "/proxy"
        self.service = self.make_service()
        self.assertEqual(await self.send(), PushResult("rejected", "BadPath", 404))
        self.assertEqual(self.fake.server.requests[0].path, f"/proxy/3/device/{TOKEN}")

    async def test_alert(self) -> None:
        """With text the notification is visible; a key is sent in place of a text."""
        for alert, shown in (
            (PushAlert("Wallet", "New message"), {"title": "Wallet", "body": "New message"}),
            (PushAlert(body_key="NEW", title="Wallet", body="unused"), {"loc-key": "NEW", "title": "Wallet"}),
            (PushAlert(title_key="TITLE", body="Text"), {"title-loc-key": "TITLE", "body": "Text"}),
        ):
            self.service = self.make_service(alert)
            self.fake.tokens.clear()
            self.assertEqual((await self.send()).outcome, "sent")
            notification = self.fake.notifications[-1]
            self.assertEqual(notification.payload["aps"], {"alert": shown, "content-available": 1})
            headers = notification.headers
            self.assertEqual((headers["apns-push-type"], headers["apns-priority"]), ("alert", "10"))

    async def test_alert_without_text(self) -> None:
        """An alert without text and key wakes the app only."""
        self.service = self.make_service(PushAlert())
        await self.send()
        self.assertEqual(self.fake.notifications[0].headers["apns-push-type"], "background")

    async def test_message_ids(self) -> None:
        """Ids are sent as given; as many as fit into 4096 bytes."""
        await self.send(wakeup=Wakeup(MEDIATOR, ("one", "two")))
        self.assertEqual(self.fake.notifications[0].payload["message_ids"], ["one", "two"])
        ids = tuple(f"{number:036}" for number in range(200))
        self.assertEqual((await self.send(wakeup=Wakeup(MEDIATOR, ids))).outcome, "sent")
        sent = self.fake.notifications[1].payload["message_ids"]
        self.assertEqual(tuple(sent), ids[: len(sent)])
        size = len(self.fake.server.requests[1].body)
        self.assertTrue(4096 - 39 < size <= 4096, size)

    async def test_collapse_id(self) -> None:
        """A mediator id that is no collapse id is replaced by a digest, always the same."""
        for mediator in ("m" * 65, "m" * 65, "médiateur", ""):
            self.assertEqual((await self.send(wakeup=Wakeup(mediator))).outcome, "sent")
        ids = [notification.headers["apns-collapse-id"] for notification in self.fake.notifications]
        self.assertEqual(ids[0], ids[1])
        self.assertEqual(len(set(ids)), 3)
        await self.send(wakeup=Wakeup("m" * 64))
        self.assertEqual(self.fake.notifications[-1].headers["apns-collapse-id"], "m" * 64)

    async def test_invalid_device_tokens(self) -> None:
        """What is no device token is not put into a path, and is forgotten."""
        for token in ("", "abc", "../../x", "ab/cd", "ab?c=dd", "ab\r\n", "é" * 32, "ab" * 101):
            self.assertEqual(await self.send(APNsDevice(token)), PushResult("gone", "BadDeviceToken"))
        self.assertEqual(self.fake.server.connections, [])

    async def test_one_connection_and_one_token(self) -> None:
        """A thousand wake-ups, at once and later, need one connection and one token."""
        results = await gatherResults([self.send() for _ in range(999)])
        self.clock.advance(1700)
        results.append(await self.send())
        self.assertEqual({result.outcome for result in results}, {"sent"})
        self.assertEqual(len(self.fake.notifications), 1000)
        self.assertEqual((len(self.fake.server.connections), len(self.fake.tokens)), (1, 1))


class AnswerTests(APNsTestCase):
    """Apple's answers."""

    async def test_table(self) -> None:
        """Each documented answer has its outcome; the reason and the status are passed on."""
        for status, outcome, reasons in (
            (400, "gone", "BadDeviceToken DeviceTokenNotForTopic"),
            (410, "gone", "Unregistered ExpiredToken"),
            (403, "retry", "InvalidProviderToken BadEnvironmentKeyIdInToken UnrelatedKeyIdInToken"),
            (429, "retry", "TooManyRequests TooManyProviderTokenUpdates"),
            (500, "retry", "InternalServerError"),
            (503, "retry", "ServiceUnavailable Shutdown"),
            (400, "retry", "IdleTimeout"),
            (
                400,
                "rejected",
                "BadCollapseId BadExpirationDate BadMessageId BadPriority BadTopic DuplicateHeaders InvalidPushType "
                "MissingDeviceToken MissingTopic PayloadEmpty TopicDisallowed",
            ),
            (403, "rejected", "BadCertificate BadCertificateEnvironment Forbidden MissingProviderToken"),
            (404, "rejected", "BadPath"),
            (405, "rejected", "MethodNotAllowed"),
            (413, "rejected", "PayloadTooLarge"),
        ):
            for reason in reasons.split():
                self.fake.server.script.append(answer(status, reason))
                result = await self.send()
                self.assertEqual((result.outcome, result.reason, result.status), (outcome, reason, status))

    async def test_unregistered_device(self) -> None:
        """A device that Apple no longer knows is gone; others are not."""
        self.fake.unregistered.add(TOKEN)
        self.assertEqual(await self.send(), PushResult("gone", "Unregistered", 410))
        self.assertEqual((await self.send(APNsDevice("ab" * 32))).outcome, "sent")

    async def test_undocumented_answers(self) -> None:
        """Of other answers only the status counts, and nothing of them is passed on."""
        for status, body, outcome in (
            (400, b'{"reason":"secret"}', "rejected"),
            (410, b"secret", "gone"),
            (418, b'["reason"]', "rejected"),
            (502, b'{"reason":7}', "retry"),
            (302, b"", "rejected"),
            (429, b'{"reason":["Unregistered"]}', "retry"),
        ):
            self.fake.server.script.append(respond(status, body=body))
            self.assertEqual(await self.send(), PushResult(outcome, "", status))  # type: ignore[arg-type]

    async def test_retry_after(self) -> None:
        """Retry-After is passed on if it is a number of seconds."""
        for value, seconds in (("17", 17.0), ("-1", None), ("soon", None), ("1" * 7, None), ("", None)):
            self.fake.server.script.append(answer(503, "Shutdown", retry_after=value))
            self.assertEqual(await self.send(), PushResult("retry", "Shutdown", 503, seconds))

    async def test_bad_key(self) -> None:
        """A key that Apple does not accept is retried slowly, and the operator is warned, once a minute."""
        self.credentials = self.credentials._replace(private_key=ec.generate_private_key(ec.SECP256R1()))
        self.service = self.make_service()
        with capturedLogs() as events:
            for _ in range(3):
                self.assertEqual(await self.send(), PushResult("retry", "InvalidProviderToken", 403, 600.0))
            self.assertEqual(len(warnings(events)), 1)
            self.clock.advance(60)
            await self.send()
        texts = warnings(events)
        self.assertEqual(len(texts), 2)
        self.assertIn("push.apns.key_file", texts[0])
        for part in (TOKEN, "bearer", KEY_ID):
            self.assertNotIn(part, "".join(texts))


class TokenTests(APNsTestCase):
    """The authentication token over time."""

    async def test_renewal(self) -> None:
        """The token is renewed after 50 minutes, once for all who send then."""
        for _ in range(3):
            await gatherResults([self.send() for _ in range(10)])
            self.clock.advance(3000)
        self.assertEqual(len(self.fake.notifications), 30)
        self.assertEqual(len(self.fake.tokens), 3)

    async def test_expired_token(self) -> None:
        """A token that Apple calls expired is replaced if it is older than 20 minutes, and the wake-up sent again."""
        await self.send()
        self.clock.advance(1231)
        self.fake.server.script.extend([answer(403, "ExpiredProviderToken")] * 5)
        results = await gatherResults([self.send() for _ in range(5)])
        self.assertEqual(results, [PushResult("sent", "", 200)] * 5)
        self.assertEqual(len(self.fake.tokens), 2)

    async def test_expired_token_within_20_minutes(self) -> None:
        """Within 20 minutes it is not replaced, however often Apple says so; the wait is told."""
        await self.send()
        self.clock.advance(1000)
        self.fake.server.default = answer(403, "ExpiredProviderToken")
        with capturedLogs() as events:
            for _ in range(5):
                self.assertEqual(await self.send(), PushResult("retry", "ExpiredProviderToken", 403, 230.0))
        self.assertEqual(len(warnings(events)), 1)
        self.fake.server.default = self.fake.process
        self.clock.advance(230)
        self.fake.server.script.append(answer(403, "ExpiredProviderToken"))
        self.assertEqual((await self.send()).outcome, "sent")
        self.assertEqual(len(self.fake.tokens), 2)

    async def test_still_expired(self) -> None:
        """If the new token is refused as well, there is no third request."""
        await self.send()
        self.clock.advance(1231)
        self.fake.server.script.extend([answer(403, "ExpiredProviderToken")] * 2)
        self.assertEqual(await self.send(), PushResult("retry", "ExpiredProviderToken", 403))
        self.assertEqual(len(self.fake.server.requests), 3)

    def test_clock_set_back(self) -> None:
        """A token of the far future is replaced; a small step back changes nothing."""
        clock = Clock()
        clock.rightNow = 1e9
        token = ProviderToken(self.credentials, clock)
        first = token.get()
        clock.rightNow -= 60.0
        self.assertEqual(token.get(), first)
        clock.rightNow -= 3600.0
        self.assertNotEqual(token.get(), first)


class FailureTests(APNsTestCase):
    """Failures of connections: each wake-up is sent, or fails as one to be retried."""

    async def test_lost_and_reset(self) -> None:
        """Where Apple may have processed it, it is to be retried; the next one is sent."""
        for action, reason in (
            (close_connection, "ConnectionLost"),
            (reset(ErrorCodes.INTERNAL_ERROR), "StreamReset"),
        ):
            self.fake.server.script.append(action)
            self.assertEqual(await self.send(), PushResult("retry", reason))
            self.assertEqual((await self.send()).outcome, "sent")

    async def test_goaway_and_refused_streams(self) -> None:
        """GOAWAY in flight and refused streams lose nothing, and send nothing twice."""
        self.fake.server.script.extend([refuse, go_away_before, go_away_after])
        results = await gatherResults([self.send() for _ in range(20)])
        self.assertEqual({result.outcome for result in results}, {"sent"})
        # One was answered by the script.
        self.assertEqual(len(self.fake.notifications), 19)

    async def test_time_out(self) -> None:
        """A request that is not answered fails after 10 seconds; the connection is kept."""
        self.fake.server.script.append(hang)
        sent = self.send()
        await self.fake.server.until_requests(1)
        self.clock.advance(10)
        self.assertEqual(await sent, PushResult("retry", "TimeoutError"))
        self.assertEqual((await self.send()).outcome, "sent")
        self.assertEqual(len(self.fake.server.connections), 1)

    async def test_time_out_covers_renewal(self) -> None:
        """Both requests together have 10 seconds."""
        await self.send()
        self.clock.advance(1231)

        def expire(request: Any) -> None:
            self.clock.advance(6)
            answer(403, "ExpiredProviderToken")(request)

        self.fake.server.script.extend([expire, hang])
        sent = self.send()
        await self.fake.server.until_requests(3)
        self.clock.advance(4)
        self.assertEqual(await sent, PushResult("retry", "TimeoutError"))

    async def test_blocked_address(self) -> None:
        """An address that is not allowed is not connected to."""
        self.outbound = OutboundHTTPClient(self.reactor)
        self.service = self.make_service()
        self.assertEqual(await self.send(), PushResult("retry", "AddressOffLimits"))

    async def test_close(self) -> None:
        """Closing ends what is in progress."""
        self.fake.server.script.append(hang)
        sent = self.send()
        await self.fake.server.until_requests(1)
        await self.service.close()
        self.assertEqual(await sent, PushResult("retry", "Closed"))
        self.assertEqual(self.clock.getDelayedCalls(), [])


class ConfigurationTests(SynchronousTestCase):
    """Mistakes are found without sending."""

    def setUp(self) -> None:
        temporary = TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "key.p8"
        self.write(ec.generate_private_key(ec.SECP256R1()))

    def write(self, key: Any, encryption: KeySerializationEncryption | None = None) -> None:
        """Write a private key."""
        self.path.touch(0o600)
        self.path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()))

    def refuse(self, key_id: str = KEY_ID, team_id: str = TEAM, topic: str = TOPIC) -> str:
        """The one line that refuses credentials."""
        with self.assertRaises(OperatorError) as caught:
            load_apns_credentials(self.path, key_id, team_id, topic)
        self.assertEqual(len(str(caught.exception).splitlines()), 1)
        return str(caught.exception)

    def test_valid(self) -> None:
        """A key file as Apple issues it."""
        credentials = load_apns_credentials(self.path, KEY_ID, TEAM, TOPIC)
        self.assertEqual(credentials[1:], (KEY_ID, TEAM, TOPIC))

    def test_invalid_files(self) -> None:
        """Other keys, encrypted ones, and what is none, are refused by the name of the file."""
        for write in self.invalid_files():
            write()
            self.assertIn(f"{self.path} is not a signing key of APNs", self.refuse())

    def invalid_files(self) -> Iterator[Any]:
        """Ways to write something else."""
        yield lambda: self.write(rsa.generate_private_key(65_537, 2048))
        yield lambda: self.write(ec.generate_private_key(ec.SECP384R1()))
        yield lambda: self.write(ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"secret"))
        yield lambda: self.path.write_bytes(b"-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n")
        yield lambda: self.path.write_bytes(b"")

    def test_unreadable_files(self) -> None:
        """A file that is missing, or readable by others, is refused."""
        self.path.chmod(0o644)
        self.assertIn("chmod 600", self.refuse())
        self.path.unlink()
        self.assertIn("No such file", self.refuse())

    def test_invalid_values(self) -> None:
        """Ids and topic are checked: they become part of headers."""
        for value in ("", "short", "lower67890", "TEAM5678901", "TEAM56789\n"):
            self.assertIn("push.apns.key_id", self.refuse(key_id=value))
            self.assertIn("push.apns.team_id", self.refuse(team_id=value))
        for topic in ("", "com.example\r\n", "com example"):
            self.assertIn("push.apns.topic", self.refuse(topic=topic))

    def test_url_without_tls(self) -> None:
        """The URL must be https."""
        credentials = load_apns_credentials(self.path, KEY_ID, TEAM, TOPIC)
        outbound = OutboundHTTPClient(Clock())
        with self.assertRaises(OperatorError):
            APNsService(outbound, credentials, "http://api.push.example")
