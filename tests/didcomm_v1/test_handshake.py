"""Connecting with wallets of DIDComm v1: requests of every form, refusals, repetition, limits, and disconnecting."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from twisted.internet.defer import fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RegistrationCapacityExceeded, StoreUnavailable
from mediatord.identity.invitation import make_v1_invitation
from mediatord.identity.key_file import retire_keys, retire_root_secret, rotate_keys
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.did_document import DIDForm
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt, pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.protocol.didcomm_v1.message import OLD_PREFIX, V1Message
from mediatord.ratelimit.admission import RequestReply
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.wallet.didcomm_v1_messages import (
    HandshakeProtocol,
    V1Handshake,
    V1Invitation,
    V1Mediator,
    compose_v1_message,
    unpack_v1_message,
)
from tests.didcomm_v1.in_memory_wallet import get_identity, make_key, pack_forward
from tests.in_memory_mediator import PEER, InMemoryMediator
from tests.observability.counter_oracle import read_lines

FORMS: tuple[tuple[HandshakeProtocol, DIDForm], ...] = (
    ("didexchange/1.1", "did:peer:4"),
    ("didexchange/1.1", "did:peer:2"),
    ("didexchange/1.1", "did:peer:1"),
    ("didexchange/1.0", "did:peer:4"),
    ("didexchange/1.0", "nym"),
    ("connections/1.0", "nym"),
)
ALL: dict[str, Any] = {"return_route": "all"}


class HandshakeTestCase(SynchronousTestCase):
    """A mediator, and the invitation as wallets read it."""

    settings: dict[str, Any] = {}  # noqa: RUF012  of a test case

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, **self.settings)
        made = make_v1_invitation(
            self.in_memory.config.public_url, self.in_memory.base.identity.now.root_secret, "mediatord"
        )
        self.invitation = V1Invitation.from_url(made.url)
        self.connections = self.in_memory.store.v1_connections

    def start(self, name: str = "wallet", **options: Any) -> V1Handshake:
        """The wallet's side of a handshake with a key of this name."""
        return V1Handshake(self.invitation, make_key(name), **options)

    def send(self, message: dict[str, Any], key: SigningKey, to: str | None = None, **options: Any) -> RequestReply:
        """Send a message to the key of the invitation, or another one."""
        packed = pack_authcrypt(encoding.dumps(message), to or self.invitation.key, key)
        return self.in_memory.receive(packed, **options)

    def open(self, reply: RequestReply, key: SigningKey) -> V1Message:
        """The message in a reply."""
        self.assertEqual(reply.media_type, "application/didcomm-envelope-enc")
        return unpack_v1_message(reply.body, {key.did_key: key}).message

    def connect(self, handshake: V1Handshake, **changed: Any) -> V1Mediator:
        """Send the request; what its response says, which is checked as the strictest library does."""
        reply = self.send(handshake.make_request() | changed, handshake.key)
        self.assertEqual(reply.status, 200)
        opened = unpack_v1_message(reply.body, {handshake.key.did_key: handshake.key})
        return handshake.read_response(opened)

    def ask(
        self, mediator: V1Mediator, key: SigningKey, type_: str, members: dict[str, Any] | None = None
    ) -> RequestReply:
        """Send a request to the key of a connection."""
        return self.send(compose_v1_message(type_, members, return_route="all"), key, mediator.key)

    def find(self, key: SigningKey) -> V1Connection | None:
        """What is stored of a wallet."""
        found: V1Connection | None = self.successResultOf(self.connections.get_connection(key.did_key))
        return found

    def assert_reported(self, message: dict[str, Any], key: SigningKey, name: str = "problem-report") -> None:
        """A request is refused with a report in its thread, and nothing is stored."""
        reply = self.send(message, key)
        self.assertEqual(reply.status, 200)
        report = self.open(reply, key)
        self.assertEqual(report.members["@type"].rpartition("/")[2], name)
        self.assertEqual(report.members["problem-code"], "request_not_accepted")
        self.assertEqual(report.members["description"]["code"], "request_not_accepted")
        self.assertEqual(report.thid, message["@id"])
        self.assertEqual(self.successResultOf(self.connections.count_connections()), (0, 0))


class ConnectTests(HandshakeTestCase):
    def test_every_form(self) -> None:
        """Each protocol and form of DID is answered in the same form, and the wallet can request mediation then."""
        for number, (protocol, form) in enumerate(FORMS):
            handshake = self.start(f"wallet {number}", protocol=protocol, form=form)
            mediator = self.connect(handshake)
            endpoint = f"{self.in_memory.config.public_url}/didcomm"
            self.assertEqual((mediator.http_uri, mediator.ws_uri), (endpoint, "ws" + endpoint.removeprefix("http")))
            self.assertEqual(mediator.did.startswith("did:peer:"), form != "nym")
            self.assertEqual(mediator.did[:10] == form, form != "nym")
            own_key = get_identity(self.in_memory).connection_key(handshake.key.did_key).did_key
            self.assertEqual(mediator.key, own_key)
            stored = self.find(handshake.key)
            assert stored is not None
            self.assertEqual(stored.own_key, own_key)
            self.assertEqual(stored.request_id, handshake.request_id)
            self.assertEqual((stored.endpoint, stored.routing_keys), (None, ()))
            completed = self.send(handshake.make_complete(), handshake.key, mediator.key)
            self.assertEqual((completed.status, completed.body), (202, b""))
            grant = self.ask(mediator, handshake.key, "coordinate-mediation/1.0/mediate-request")
            self.assertEqual(self.open(grant, handshake.key).type.name, "mediate-grant")
        self.assertEqual(self.successResultOf(self.connections.count_connections()), (len(FORMS), 0))

    def test_old_prefix(self) -> None:
        """A request with the former prefix is answered with it, also in the signed field."""
        for protocol in ("didexchange/1.1", "connections/1.0"):
            handshake = self.start(protocol, protocol=protocol, prefix=OLD_PREFIX)
            request = handshake.make_request()
            response = self.open(self.send(request, handshake.key), handshake.key)
            self.assertEqual(response.type.prefix, OLD_PREFIX)
            field = response.members.get("connection~sig")
            if field is not None:
                self.assertTrue(field["@type"].startswith(OLD_PREFIX))

    def test_higher_minor(self) -> None:
        """A later minor version is served as the highest that is known."""
        handshake = self.start()
        request = handshake.make_request()
        request["@type"] = request["@type"].replace("1.1", "1.9")
        self.assertEqual(self.open(self.send(request, handshake.key), handshake.key).type.minor, 1)

    def test_without_pthid(self) -> None:
        """Connections requests name no invitation: then the response names none."""
        handshake = self.start(protocol="connections/1.0")
        request = handshake.make_request() | {"~thread": {"thid": handshake.request_id}}
        response = self.open(self.send(request, handshake.key), handshake.key)
        self.assertEqual((response.thid, response.pthid), (handshake.request_id, None))

    def test_former_invitation(self) -> None:
        """The response names the invitation that the wallet has, whatever its id."""
        handshake = self.start()
        request = handshake.make_request() | {"~thread": {"thid": handshake.request_id, "pthid": "a-former-one"}}
        self.assertEqual(self.open(self.send(request, handshake.key), handshake.key).pthid, "a-former-one")

    def test_endpoint(self) -> None:
        """The endpoint of the wallet is stored."""
        handshake = self.start(endpoint="http://wallet.example/in")
        self.connect(handshake)
        stored = self.find(handshake.key)
        assert stored is not None
        self.assertEqual(stored.endpoint, "http://wallet.example/in")

    def test_repeated_request(self) -> None:
        """The same request in a new envelope, and a new one of the same wallet, get the same key and DID."""
        handshake = self.start()
        mediator = self.connect(handshake)
        self.send(handshake.make_complete(), handshake.key, mediator.key)
        self.ask(mediator, handshake.key, "coordinate-mediation/1.0/mediate-request")
        self.assertEqual(self.connect(handshake), mediator)
        again = self.start(endpoint="http://wallet.example/in")
        self.assertEqual(self.connect(again), mediator)
        stored = self.find(handshake.key)
        assert stored is not None
        self.assertEqual((stored.request_id, stored.endpoint), (again.request_id, "http://wallet.example/in"))
        self.assertEqual(self.successResultOf(self.connections.count_connections()), (1, 0))

    def test_replayed_request(self) -> None:
        """The last request of a wallet has no second effect; an earlier one is refused."""
        in_memory = self.in_memory
        requests = []
        for endpoint in ("http://former.example/", "http://present.example/"):
            handshake = self.start(endpoint=endpoint)
            requests.append(
                pack_authcrypt(encoding.dumps(handshake.make_request()), self.invitation.key, handshake.key)
            )
            self.assertIn(in_memory.receive(requests[-1]).status, (200, 202))
        self.assertIn(in_memory.receive(requests[1]).status, (200, 202))
        for seconds in (0.0, 500.0):
            in_memory.clock.advance(seconds)
            report = self.open(in_memory.receive(requests[0]), make_key("wallet"))
            self.assertEqual(report.type.name, "problem-report")
            stored = self.find(make_key("wallet"))
            assert stored is not None
            self.assertEqual(stored.endpoint, "http://present.example/")

    def test_other_wallet_gets_other_key(self) -> None:
        """Each wallet has a key of the mediator of its own."""
        self.assertNotEqual(self.connect(self.start("one")).key, self.connect(self.start("two")).key)

    def test_reply_without_return_route(self) -> None:
        """A wallet that asks for no reply on the connection, and has no endpoint, gets it there all the same."""
        handshake = self.start()
        reply = self.send(handshake.make_request() | {"~transport": {}}, handshake.key)
        self.assertEqual(self.open(reply, handshake.key).type.name, "response")

    def test_nothing_of_the_wallet_is_logged(self) -> None:
        """Neither label nor endpoint nor the DID of the connection is in the event log."""
        handshake = self.start(label="Secret label", endpoint="http://secret.example")
        self.connect(handshake)
        self.in_memory.clock.advance(0)
        text = repr(read_lines(self.in_memory.config.log.directory))
        for secret in ("Secret", "secret.example", handshake.make_document().did[:30]):
            self.assertNotIn(secret, text)
        self.assertIn("didexchange/1.1/request", text)


class RefusalTests(HandshakeTestCase):
    def test_key_of_somebody_else(self) -> None:
        """The sender of the envelope has to be a key of the document."""
        for protocol, form in FORMS:
            request = self.start("victim", protocol=protocol, form=form).make_request()
            name = "problem_report" if protocol == "didexchange/1.0" else "problem-report"
            self.assert_reported(request, make_key("thief"), name)

    def test_unusable_requests(self) -> None:
        """No DID, a DID that is not resolved, a document that is not signed, or not attached."""
        handshake = self.start(form="did:peer:1")
        request = handshake.make_request()
        unsigned = dict(request["did_doc~attach"], data={"base64": request["did_doc~attach"]["data"]["base64"]})
        changes: tuple[dict[str, Any], ...] = (
            {"did": None},
            {"did": "did:web:a.example"},
            {"did_doc~attach": None},
            {"did_doc~attach": unsigned},
        )
        for number, changed in enumerate(changes):
            self.assert_reported(request | changed | {"@id": f"request-{number}"}, handshake.key)

    def test_to_key_of_connection(self) -> None:
        """A request to another key than that of the invitation is refused."""
        handshake = self.start()
        mediator = self.connect(handshake)
        for to in (mediator.key, get_identity(self.in_memory).routing_key.did_key):
            reply = self.send(self.start().make_request(), handshake.key, to)
            self.assertEqual(reply.fault.__name__ if reply.fault else "", "MisaddressedMessage")

    def test_anonymous_request(self) -> None:
        """A request under anoncrypt proves nothing, and cannot be answered."""
        packed = pack_anoncrypt(encoding.dumps(self.start().make_request()), self.invitation.key)
        reply = self.in_memory.receive(packed)
        self.assertEqual((reply.status, reply.body), (400, b""))

    def test_other_messages_to_key_of_invitation(self) -> None:
        """They need a connection."""
        key = make_key("wallet")
        for type_ in (
            *("didexchange/1.1/complete", "connections/1.0/problem-report", "out-of-band/1.1/handshake-reuse"),
            *("did-rotate/1.0/hangup", "did-rotate/1.0/rotate", "coordinate-mediation/1.0/mediate-request"),
        ):
            reply = self.send(compose_v1_message(type_, return_route="all"), key)
            self.assertEqual((reply.status, reply.body), (400, b""))

    def test_no_report_of_a_report(self) -> None:
        """A report is never answered."""
        handshake = self.start()
        mediator = self.connect(handshake)
        for type_ in ("didexchange/1.1/problem_report", "didexchange/1.0/problem-report"):
            reply = self.ask(mediator, handshake.key, type_, {"description": {"code": "response_not_accepted"}})
            self.assertEqual((reply.status, reply.body), (202, b""))

    def test_replayed_request(self) -> None:
        """The same envelope again changes nothing."""
        handshake = self.start()
        packed = pack_authcrypt(encoding.dumps(handshake.make_request()), self.invitation.key, handshake.key)
        self.assertEqual(self.in_memory.receive(packed).status, 200)
        newer = self.start(endpoint="http://wallet.example")
        self.connect(newer)
        reply = self.in_memory.receive(packed)
        self.assertEqual(reply.fault.__name__ if reply.fault else "", "ReplayedMessage")
        stored = self.find(handshake.key)
        assert stored is not None
        self.assertEqual(stored.endpoint, "http://wallet.example")


class DeniedTests(HandshakeTestCase):
    settings = {"didcomm": {"deny": [make_key("denied").did_key]}}  # noqa: RUF012  of a test case

    def test_denied_wallet(self) -> None:
        """A key that is denied gets no connection, in no form; the event log has the denial."""
        handshake = self.start("denied")
        self.assert_reported(handshake.make_request(), handshake.key)
        (denial,) = self.in_memory.events("acct.deny")
        self.assertEqual((denial["proto"], denial["reason"]), ("didcomm_v1", "policy"))
        self.connect(self.start("another"))


class LimitTests(HandshakeTestCase):
    settings = {  # noqa: RUF012  of a test case
        "didcomm_v1": {"connections_per_minute": 3, "max_pending_connections": 2},
    }

    def test_connections_per_minute(self) -> None:
        """Requests count against the limit of the address, valid or not; one beyond it costs no further work."""
        handshake = self.start()
        for _ in range(3):
            self.send(handshake.make_request() | {"did": "x"}, handshake.key)
        reply = self.send(handshake.make_request(), handshake.key)
        self.assertEqual((reply.status, reply.body), (429, b""))
        self.assertIsNotNone(reply.retry_after)
        (hit,) = self.in_memory.events("limit.hit")
        self.assertEqual(hit["limit"], "connections_per_minute")
        self.assertEqual(self.send(handshake.make_request(), handshake.key, peer="203.0.113.9").status, 200)

    def test_pending_connections(self) -> None:
        """
        However many connect from however many addresses, the next wallet is served: it takes the place of the oldest
        connection without an account.
        """
        first, second, third = (self.start(name) for name in ("one", "two", "three"))
        self.connect(first)
        self.in_memory.clock.advance(1)
        mediator = self.connect(second)
        self.in_memory.clock.advance(1)
        self.connect(third)
        self.assertIsNone(self.find(first.key))
        self.in_memory.clock.advance(60)
        self.ask(mediator, second.key, "coordinate-mediation/1.0/mediate-request")
        self.connect(first)
        found = [self.find(one.key) is not None for one in (first, second, third)]
        self.assertEqual(found, [True, True, True])


class QuotaTests(HandshakeTestCase):
    settings = {  # noqa: RUF012  of a test case
        "limits": {"registration_bytes_per_address_per_day": 3000},
        "didcomm_v1": {"connections_per_minute": 1000},
    }

    def test_bytes_of_connections_are_charged(self) -> None:
        """New connections are charged to the address, repeated ones only for what they add."""
        connected = 0
        while True:
            handshake = self.start(f"wallet {connected}")
            reply = self.send(handshake.make_request(), handshake.key)
            if reply.status != 200:
                break
            self.connect(handshake)
            self.connect(handshake)
            connected += 1
        self.assertEqual(reply.status, 429)
        # Two keys and the id of the request: 56 + 56 + 36 bytes.
        self.assertEqual(connected, 3000 // 148)

    def test_failed_store_is_refunded(self) -> None:
        """What was not stored is not charged; the wallet may try the same message again."""
        handshake = self.start()
        packed = pack_authcrypt(encoding.dumps(handshake.make_request()), self.invitation.key, handshake.key)
        for error, status in ((StoreUnavailable(), 503), (RegistrationCapacityExceeded(), 503)):
            for _ in range(20):
                with self.failing("put_connection", error):
                    self.assertEqual(self.in_memory.receive(packed).status, status)
        self.assertEqual(self.in_memory.receive(packed).status, 200)

    def failing(self, operation: str, error: Exception) -> Any:
        """Make an operation of the connections fail within a context."""
        return patch.object(self.connections, operation, lambda *args, **options: fail(error))


class ConnectedTests(HandshakeTestCase):
    """A wallet with an account and a registered key."""

    def setUp(self) -> None:
        super().setUp()
        self.handshake = self.start()
        self.key, self.recipient = self.handshake.key, make_key("recipient")
        self.mediator = self.connect(self.handshake)
        self.ask(self.mediator, self.key, "coordinate-mediation/1.0/mediate-request")
        update = {"updates": [{"recipient_key": self.recipient.did_key, "action": "add"}]}
        self.ask(self.mediator, self.key, "coordinate-mediation/1.0/keylist-update", update)

    def forward(self) -> int:
        """Forward a message to the wallet; the status."""
        payload = pack_anoncrypt(b"{}", self.recipient.did_key)
        reply = self.in_memory.receive(pack_forward(self.in_memory, self.recipient.did_key, payload), peer=PEER)
        return reply.status

    def test_reuse(self) -> None:
        """`handshake-reuse` is accepted in its thread."""
        message = compose_v1_message(
            "out-of-band/1.0/handshake-reuse", thread={"thid": "reuse-0001", "pthid": self.invitation.id}, **ALL
        )
        accepted = self.open(self.send(message, self.key, self.mediator.key), self.key)
        self.assertEqual(accepted.members["@type"], "https://didcomm.org/out-of-band/1.0/handshake-reuse-accepted")
        self.assertEqual((accepted.thid, accepted.pthid), ("reuse-0001", self.invitation.id))

    def test_rotation_is_refused(self) -> None:
        """The wallet stays what it is."""
        reply = self.ask(self.mediator, self.key, "did-rotate/1.0/rotate", {"to_did": "did:web:a.example"})
        report = self.open(reply, self.key)
        self.assertEqual((report.type.family, report.type.name), ("did-rotate", "problem-report"))
        self.assertEqual(report.members["problem-code"], "e.did.method_unsupported")
        self.assertEqual(self.forward(), 202)
        self.hang_up()

    def hang_up(self) -> None:
        """Disconnect: no answer."""
        reply = self.ask(self.mediator, self.key, "did-rotate/1.0/hangup")
        self.assertEqual((reply.status, reply.body), (202, b""))

    def test_hangup(self) -> None:
        """Account, connection, registered keys and queued messages are removed; the wallet can connect again."""
        for _ in range(3):
            self.assertEqual(self.forward(), 202)
        self.hang_up()
        self.assertIsNone(self.find(self.key))
        self.assertIsNone(self.successResultOf(self.in_memory.store.get_account(self.key.did_key)))
        self.assertEqual(len(self.in_memory.events("msg.remove")), 3)
        reply = self.ask(self.mediator, self.key, "messagepickup/2.0/status-request")
        self.assertEqual((reply.status, reply.body), (400, b""))
        owner = self.successResultOf(self.in_memory.store.find_owner(self.recipient.did_key))
        self.assertIsNone(owner)
        self.assertEqual(self.connect(self.start()).key, self.mediator.key)

    def reload(self) -> None:
        """Have the mediator read its keys again, as at SIGHUP."""
        self.in_memory.base.reloader.reload(lambda: self.in_memory.config)

    def test_connection_outlasts_keys(self) -> None:
        """After a rotation and the retirement of the oldest keys, wallet and invitation are served as before."""
        path = self.in_memory.config.identity.keys
        for change in (lambda: rotate_keys(path, str), lambda: retire_keys(path, "prekey", str)):
            change()
            self.reload()
            self.assertEqual(self.forward(), 202)
            self.assertEqual(self.ask(self.mediator, self.key, "trust_ping/1.0/ping").status, 200)
            self.assertEqual(self.connect(self.start()), self.mediator)
        self.connect(self.start("another"))

    def test_root_secret_is_retired(self) -> None:
        """Then the mediator has other keys: the wallet can only connect again, by the new invitation."""
        path = self.in_memory.config.identity.keys
        rotate_keys(path, str)
        retire_keys(path, "prekey", str)
        retire_root_secret(path, str)
        self.reload()
        self.assertEqual(self.ask(self.mediator, self.key, "trust_ping/1.0/ping").status, 400)
        self.assertEqual(self.send(self.start().make_request(), self.key).status, 400)
        root_secret = self.in_memory.base.identity.now.root_secret
        made = make_v1_invitation(self.in_memory.config.public_url, root_secret, "mediatord")
        self.invitation = V1Invitation.from_url(made.url)
        mediator = self.connect(self.start())
        self.assertNotEqual(mediator.key, self.mediator.key)
        self.assertEqual(self.ask(mediator, self.key, "messagepickup/2.0/status-request").status, 200)

    def test_hangup_is_repeated(self) -> None:
        """A hangup that the store fails in leaves the connection, so that the wallet can repeat it."""
        message = compose_v1_message("did-rotate/1.0/hangup", return_route="all")
        packed = pack_authcrypt(encoding.dumps(message), self.mediator.key, self.key)
        self.forward()
        administration = self.in_memory.store.administration
        for operation in ("unregister_recipients", "list_queued_dids", "purge", "remove_account"):
            with patch.object(administration, operation, lambda *args: fail(StoreUnavailable())):
                self.assertEqual(self.in_memory.receive(packed).status, 503, operation)
        self.assertEqual(self.in_memory.receive(packed).status, 202)
        self.assertIsNone(self.find(self.key))
        self.assertIsNone(self.successResultOf(self.in_memory.store.get_account(self.key.did_key)))

    def test_hangup_while_mail_comes(self) -> None:
        """A message that arrives after the others were removed is removed, too."""
        administration, late = self.in_memory.store.administration, [self.recipient.did_key]
        list_queued_dids = administration.list_queued_dids

        def list_too_early(account: str) -> Any:
            listed = list_queued_dids(account)
            return succeed([]) if late and late.pop() else listed

        self.forward()
        with patch.object(administration, "list_queued_dids", list_too_early):
            self.hang_up()
        self.assertIsNone(self.find(self.key))
        self.assertEqual(len(self.in_memory.events("msg.remove")), 1)

    def test_hangup_ends_pushes(self) -> None:
        """The sockets of the wallet are those of no account any more."""
        socket, connections = self.in_memory.socket(), self.in_memory.base.connections
        type_, members = "messagepickup/2.0/live-delivery-change", {"live_delivery": True}
        message = compose_v1_message(type_, members, return_route="all")
        self.in_memory.receive(pack_authcrypt(encoding.dumps(message), self.mediator.key, self.key), socket)
        self.assertTrue(connections.is_subscribed(socket, self.key.did_key))
        self.hang_up()
        self.assertFalse(connections.is_subscribed(socket, self.key.did_key))

    def test_hangup_without_account(self) -> None:
        """A connection without an account is removed likewise."""
        handshake = self.start("another")
        mediator = self.connect(handshake)
        reply = self.ask(mediator, handshake.key, "did-rotate/1.0/hangup")
        self.assertEqual(reply.status, 202)
        self.assertIsNone(self.find(handshake.key))
        self.assertIsNotNone(self.find(self.key))

    def test_hangup_of_somebody_else(self) -> None:
        """Only the wallet of the connection can end it."""
        reply = self.ask(self.mediator, make_key("thief"), "did-rotate/1.0/hangup")
        self.assertEqual(reply.status, 400)
        self.assertIsNotNone(self.find(self.key))
