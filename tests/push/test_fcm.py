"""Firebase Cloud Messaging: messages, access tokens, and what each answer means."""

from __future__ import annotations

import stat

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from twisted.internet.defer import Deferred, gatherResults

from mediatord.errors import StartupError
from mediatord.push import fcm
from mediatord.push.devices import FCMDevice
from mediatord.push.fcm import FCMService, load_fcm_credentials
from mediatord.push.service import PushAlert, PushResult, Wakeup
from mediatord.runtime.secret_files import SecretFileError
from tests.push import fcm_server as answers
from tests.push.fcm_server import SEND_PATH, FCMServer
from tests.push.push_test_case import PushTestCase, begin
from tests.push.scripted_server import Answer

DEVICE = FCMDevice("registration-token-1", "android")
WAKEUP = Wakeup("mediator-1")


class FCMTestCase(PushTestCase):
    """FCM on loopback, and a service that sends to it."""

    def setUp(self) -> None:
        super().setUp()
        self.server = FCMServer(self.certificate)
        self.start(self.server)
        self.credentials = self.server.write_credentials(self.directory / "fcm.json")
        self.service = self.make_service()

    def make_service(self, alert: PushAlert | None = None) -> FCMService:
        """A service with the credentials of the server."""
        return FCMService(load_fcm_credentials(self.credentials), self.client, url=self.server.url, alert=alert)

    async def send(self, wakeup: Wakeup = WAKEUP, device: FCMDevice = DEVICE) -> PushResult:
        """Send a wake-up."""
        return await self.service.send(device, wakeup)


class MessageTests(FCMTestCase):
    """What FCM receives."""

    async def test_message(self) -> None:
        """A message of high priority, which replaces the one before, with nothing but the id of the mediator."""
        self.assertEqual(await self.send(), PushResult("sent", "", 200))
        [message] = self.server.delivered
        collapse = message["android"].pop("collapse_key")
        self.assertEqual(len(collapse), 32)
        self.assertEqual(
            message,
            {
                "token": DEVICE.token,
                "data": {"mediator": "mediator-1"},
                "android": {"priority": "HIGH", "ttl": "2419200s"},
            },
        )
        await self.send()
        await self.send(Wakeup("mediator-2"))
        keys = [one["android"]["collapse_key"] for one in self.server.delivered[1:]]
        self.assertEqual([key == collapse for key in keys], [True, False])
        self.assertEqual(self.server.received[0].path, SEND_PATH)

    async def test_ios(self) -> None:
        """A background notification, which wakes the app and shows nothing."""
        await self.send(device=FCMDevice("token", "iOS"))
        [message] = self.server.delivered
        headers = message["apns"]["headers"]
        self.assertEqual(headers["apns-push-type"], "background")
        self.assertEqual(headers["apns-priority"], "5")
        self.assertLessEqual(len(headers["apns-collapse-id"]), 64)
        self.assertGreater(int(headers["apns-expiration"]), self.reactor.seconds())
        self.assertEqual(message["apns"]["payload"], {"aps": {"content-available": 1}})
        self.assertNotIn("android", message)

    async def test_message_ids(self) -> None:
        """Are text, as all data of FCM; they are left out where the message would be too large."""
        await self.send(Wakeup("mediator-1", ("a", "b")))
        await self.send(Wakeup("mediator-1", ("x" * 100,) * 50))
        first, second = self.server.delivered
        self.assertEqual(orjson.loads(first["data"]["message_ids"]), ["a", "b"])
        self.assertNotIn("message_ids", second["data"])

    async def test_too_large(self) -> None:
        """A message that is too large without ids is not sent."""
        self.service = self.make_service(PushAlert(title="x" * 5000))
        self.assertEqual(await self.send(), PushResult("rejected", "too_large"))
        self.assertEqual(self.server.received, [])

    async def test_alert(self) -> None:
        """A visible notification only if it is configured, by text or by keys of the app's texts."""
        self.service = self.make_service(PushAlert(title="Wallet", body="A message waits", body_key="WAITING"))
        await self.send()
        await self.send(device=FCMDevice("token", "ios"))
        android, ios = self.server.delivered
        notification = android["android"]["notification"]
        self.assertEqual(len(notification.pop("tag")), 32)
        self.assertEqual(notification, {"title": "Wallet", "body_loc_key": "WAITING"})
        self.assertEqual(ios["apns"]["headers"]["apns-push-type"], "alert")
        self.assertEqual(ios["apns"]["payload"]["aps"]["alert"], {"title": "Wallet", "loc-key": "WAITING"})

    async def test_connection_is_kept(self) -> None:
        """All messages, one after the other, go over one connection."""
        for _ in range(5):
            await self.send()
        self.assertEqual((len(self.server.delivered), self.server.connections), (5, 1))

    async def test_connection_that_the_server_closed(self) -> None:
        """Is replaced."""
        await self.send()
        self.server.abort_connections()
        self.assertEqual((await self.send()).outcome, "sent")

    def test_invalid_url(self) -> None:
        """Is one line for the operator."""
        credentials = load_fcm_credentials(self.credentials)
        with pytest.raises(StartupError, match=r"\Apush\.fcm\.url: [^\n]*\Z"):
            FCMService(credentials, self.client, url="https://user@fcm.example")

    async def test_host(self) -> None:
        """All devices are at one host."""
        self.assertEqual(self.service.host_of(DEVICE), self.server.url.removeprefix("https://"))


class AnswerTests(FCMTestCase):
    """What each answer means."""

    async def test_answers(self) -> None:
        """Only answers about the device remove it; credentials at fault are tried again."""
        for answer, expected in (
            (answers.UNREGISTERED, PushResult("gone", "UNREGISTERED", 404)),
            (answers.INVALID_TOKEN, PushResult("gone", "INVALID_ARGUMENT", 400)),
            (answers.INVALID_TOKEN_TEXT, PushResult("gone", "INVALID_ARGUMENT", 400)),
            (answers.INVALID_ARGUMENT, PushResult("rejected", "INVALID_ARGUMENT", 400)),
            (answers.SENDER_ID_MISMATCH, PushResult("mismatch", "SENDER_ID_MISMATCH", 403)),
            (answers.PERMISSION_DENIED, PushResult("retry", "PERMISSION_DENIED", 403)),
            (answers.fcm_error(404, "NOT_FOUND"), PushResult("retry", "NOT_FOUND", 404)),
            (answers.QUOTA_EXCEEDED, PushResult("retry", "QUOTA_EXCEEDED", 429, 60.0)),
            (answers.UNAVAILABLE, PushResult("retry", "UNAVAILABLE", 503, 7.0)),
            (answers.INTERNAL, PushResult("retry", "INTERNAL", 500)),
            (answers.THIRD_PARTY_AUTH_ERROR, PushResult("rejected", "THIRD_PARTY_AUTH_ERROR", 401)),
            (Answer(307, headers={"Location": "/"}), PushResult("rejected", "unknown", 307)),
            (Answer(404, b"secret text"), PushResult("retry", "unknown", 404)),
            (Answer(400, b'{"error":{"status":"secret"}}'), PushResult("rejected", "unknown", 400)),
            (Answer(400, b'{"error":{"details":[7,{"fieldViolations":7}]}}'), PushResult("rejected", "unknown", 400)),
            (Answer(503, b"[" * 100_000), PushResult("retry", "unknown", 503)),
            (Answer(503, behaviour="oversize"), PushResult("retry", "unknown", 503)),
        ):
            self.server.script.append(answer)
            self.assertEqual(await self.send(), expected)
        self.assertEqual(len(self.server.tokens.received), 1)

    async def test_unregistered_device(self) -> None:
        """Is gone, and others are not."""
        self.server.unregistered.add(DEVICE.token)
        self.assertEqual((await self.send()).outcome, "gone")
        self.assertEqual((await self.send(device=FCMDevice("other", "android"))).outcome, "sent")

    async def test_failures_of_the_connection(self) -> None:
        """Are tried again, whatever they are."""
        await self.send()
        for behaviour in ("hang", "stall", "reset"):
            self.server.always = Answer(behaviour=behaviour)
            self.shorten_timeout(fcm, self.server.always)
            result = await self.send()
            self.assertEqual((result.outcome, result.status), ("retry", None), behaviour)
        self.server.always = None
        self.assertEqual((await self.send()).outcome, "sent")

    async def test_blocked_address(self) -> None:
        """A service at an address that must not be connected to: nothing is known about the device."""
        credentials = load_fcm_credentials(self.credentials)
        self.service = FCMService(credentials, self.client, url="https://10.0.0.1")
        self.assertEqual(await self.send(), PushResult("retry", "AddressOffLimits"))


class AccessTokenTests(FCMTestCase):
    """Access tokens."""

    async def test_one_request_for_all(self) -> None:
        """Who sends while a token is fetched waits for that one."""
        results = await gatherResults([begin(self.send()) for _ in range(30)])
        self.assertEqual({result.outcome for result in results}, {"sent"})
        self.assertEqual(len(self.server.tokens.received), 1)
        self.assertLessEqual(self.server.connections, 8)

    async def test_renewed_before_its_end(self) -> None:
        """While the former one is still valid."""
        self.server.tokens.lifetime = 10
        await self.send()
        self.reactor.offset = 4
        await self.send()
        self.assertEqual(len(self.server.tokens.received), 1)
        self.reactor.offset = 6
        await self.send()
        self.assertEqual(len(self.server.tokens.received), 2)
        used = [request.headers["authorization"] for request in self.server.received]
        self.assertEqual([header[-1] for header in used], ["1", "1", "2"])

    async def test_refused_token_is_renewed_once(self) -> None:
        """By all who were refused together; each sends again."""
        await self.send()
        self.server.refused.update(self.server.tokens.issued)
        results = await gatherResults([begin(self.send()) for _ in range(10)])
        self.assertEqual({result.outcome for result in results}, {"sent"})
        self.assertEqual(len(self.server.tokens.received), 2)

    async def test_service_that_refuses_all_tokens(self) -> None:
        """Is not sent one token after the other: a token is replaced once a minute at most."""
        self.server.always = answers.UNAUTHENTICATED
        for _ in range(4):
            self.assertEqual(await self.send(), PushResult("retry", "UNAUTHENTICATED", 401))
        self.assertEqual(len(self.server.tokens.received), 2)
        self.assertEqual(len(self.server.received), 5)

    async def test_failing_token_endpoint(self) -> None:
        """All who wait are to try again; nobody asks it before the pause is over, and then one does."""
        self.server.tokens.always = Answer.of_json(503, {}, Retry_After="1")
        results = await gatherResults([begin(self.send()) for _ in range(10)])
        self.assertEqual({(result.outcome, result.reason) for result in results}, {("retry", "token_refused")})
        self.assertEqual({result.retry_after for result in results}, {2.0})
        later = await self.send()
        self.assertEqual(later.outcome, "retry")
        self.assertLessEqual(later.retry_after or 0.0, 2.0)
        self.assertEqual(len(self.server.tokens.received), 1)
        self.reactor.offset = 2.5
        results = await gatherResults([begin(self.send()) for _ in range(10)])
        self.assertEqual({result.retry_after for result in results}, {4.0})
        self.assertEqual(len(self.server.tokens.received), 2)
        self.server.tokens.always = None
        self.reactor.offset = 7.0
        self.assertEqual((await self.send()).outcome, "sent")
        self.assertEqual((len(self.server.tokens.received), len(self.server.received)), (3, 1))

    async def test_failures_of_the_token_endpoint(self) -> None:
        """Each is named by a documented code or a word of ours."""
        for answer, reason in (
            (Answer.of_json(400, {"error": "invalid_grant"}), "invalid_grant"),
            (Answer.of_json(401, {"error": "secret"}), "token_refused"),
            (Answer.of_json(200, {}), "token_invalid"),
            (Answer.of_json(200, {"access_token": "a\r\nb", "expires_in": 5}), "token_invalid"),
            (Answer.of_json(200, {"access_token": "a", "expires_in": True}), "token_invalid"),
            (Answer(200, b"[]"), "token_invalid"),
            (Answer(behaviour="oversize"), "token_invalid"),
            (Answer(307, headers={"Location": "/token"}), "token_refused"),
            (Answer(behaviour="reset"), "ResponseNeverReceived"),
        ):
            service = self.make_service()
            self.server.tokens.always = answer
            result = await service.send(DEVICE, WAKEUP)
            self.assertEqual((result.outcome, result.reason), ("retry", reason))
        self.server.tokens.always = Answer(behaviour="hang")
        self.shorten_timeout(fcm, self.server.tokens.always)
        hung = await self.make_service().send(DEVICE, WAKEUP)
        self.assertEqual(hung.outcome, "retry")
        self.assertEqual(self.server.received, [])

    async def test_close(self) -> None:
        """Whoever waits is told to try again."""
        self.server.tokens.always = Answer(behaviour="hang")
        arrived: Deferred[None] = Deferred()
        self.server.tokens.on_request = lambda: arrived.callback(None)
        sending = begin(self.send())
        await arrived
        await self.service.close()
        self.assertEqual((await sending).outcome, "retry")


class CredentialsTests(FCMTestCase):
    """The key file of the service account."""

    def test_valid_file(self) -> None:
        """Is read without sending anything; its representation has no key."""
        credentials = load_fcm_credentials(self.credentials)
        self.assertEqual((credentials.project, credentials.email), (answers.PROJECT, answers.EMAIL))
        self.assertNotIn("signer", repr(credentials))
        self.assertEqual(self.server.tokens.received, [])

    def test_invalid_files(self) -> None:
        """Each gets one line, which has nothing of the key."""
        content = self.server.tokens.credentials
        other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        for invalid, text in (
            (b"", "expected the JSON key file"),
            (b"[]", "expected the JSON key file"),
            (orjson.dumps({**content, "project_id": ""}), "project_id is missing"),
            (orjson.dumps({**content, "token_uri": "none"}), "token_uri is not a URL"),
            (orjson.dumps({**content, "private_key": content["private_key"][:99]}), "not an RSA key"),
            (orjson.dumps({**content, "private_key": other.decode()}), "not an RSA key"),
            (orjson.dumps({**content, "private_key": 5}), "private_key is missing"),
        ):
            self.credentials.write_bytes(invalid)
            with pytest.raises(SecretFileError, match=text) as caught:
                load_fcm_credentials(self.credentials)
            self.assertNotIn("\n", str(caught.value))
            self.assertNotIn("PRIVATE", str(caught.value))

    def test_file_that_others_can_read(self) -> None:
        """Is refused, as is one that is not there."""
        self.credentials.chmod(0o644)
        self.assertEqual(stat.S_IMODE(self.credentials.stat().st_mode), 0o644)
        self.assertRaises(SecretFileError, load_fcm_credentials, self.credentials)
        self.assertRaises(SecretFileError, load_fcm_credentials, self.directory / "none")
