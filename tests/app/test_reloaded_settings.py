"""Settings that a reload applies: keys, limits, certificates (SIGHUP)."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cryptography.x509.oid import NameOID
from OpenSSL import SSL
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import formatEvent
from twisted.logger._capture import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.key_file import load_keys, retire_keys, rotate_keys
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.listeners import Listener, find_certificate_files
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.protocol.didcomm.did_methods import resolve_local
from tests.certificate_authority import CertificateAuthority
from tests.http.in_memory_site import InMemorySite
from tests.http.test_websocket import HIGH_LIMITS, SocketTestCase
from tests.in_memory_mediator import CM3, MP, PING, InMemoryWallet, pack_forward


class KeysTests(SocketTestCase):
    """A mediator whose keys are rotated, and Bob, who knows its former DID."""

    def setUp(self) -> None:
        super().setUp()
        self.path = self.site_fixture.config.identity.keys

    def config_for(self, keys: Any) -> MediatorIdentity:
        """The configuration for these keys."""
        return MediatorIdentity(keys, self.site_fixture.config.public_url)

    def reload(self) -> list[str]:
        """Reload and return what is logged."""
        with capturedLogs() as log_events:
            self.site_fixture.base.reloader.reload(lambda: self.site_fixture.config)
        return [formatEvent(event) for event in log_events]

    def rotate(self, **how: Any) -> str:
        """Rotate and reload; return the served DID."""
        rotate_keys(self.path, self.config_for, **how)
        self.reload()
        return self.site_fixture.request("GET", "/did").body.decode()

    def address_mediator_by(self, did: str) -> None:
        """Have further senders use this DID of the mediator."""
        self.site_fixture.did, self.site_fixture.document = did, resolve_local(did)

    def test_documents(self) -> None:
        """All documents have the new keys."""
        before = {
            path: self.site_fixture.request("GET", path).body for path in ("/", "/invitation", "/invitationOOB")
        }
        for_people = {"Accept": "text/html"}
        self.assertIn(
            self.site_fixture.did, self.site_fixture.request("GET", "/invitation", headers=for_people).body.decode()
        )
        short_url = f"/oob?_oobid={self.site_fixture.request('GET', '/invitation').json['id']}"
        did = self.rotate()
        self.assertNotEqual(did, self.site_fixture.did)
        for path, body in before.items():
            self.assertNotEqual(self.site_fixture.request("GET", path).body, body)
        self.assertEqual(self.site_fixture.request("GET", "/invitation").json["from"], did)
        self.assertEqual(self.site_fixture.request("GET", short_url).json["from"], did)
        page = self.site_fixture.request("GET", "/invitation", headers=for_people).body.decode()
        self.assertIn(did, page)
        self.assertNotIn(self.site_fixture.did, page)
        document = self.site_fixture.request("GET", "/.well-known/did.json").json
        self.assertEqual(document["alsoKnownAs"], [did, self.site_fixture.did])

    def test_log_lines(self) -> None:
        """The new DID, a prepared one, and each that is no longer accepted; nothing without a change."""
        quiet = "configuration reloaded"
        self.assertEqual(self.reload(), [quiet])
        rotate_keys(self.path, self.config_for, prepare=True)
        (prepared,) = self.config_for(load_keys(self.path)).prepared_dids
        self.assertEqual(self.reload(), [quiet, f"prepared DID {prepared[:60]}…: accepted, but not yet published"])
        rotate_keys(self.path, self.config_for)
        self.assertEqual(self.reload(), [quiet, f"current DID: {prepared[:60]}…; 1 former DIDs still accepted"])
        retire_keys(self.path, "prekey", self.config_for)
        self.assertEqual(self.reload(), [quiet, f"DIDs no longer accepted: {self.site_fixture.did[:60]}…"])
        self.assertEqual(self.reload(), [quiet])

    def test_live_socket(self) -> None:
        """It stays open, gets replies and pushes from the DID that it addressed, also of messages to the new one."""
        old = self.site_fixture.did
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        new = self.rotate()
        self.address_mediator_by(new)
        self.forward(self.bob, "by the new DID")
        (pushed,) = websocket_client.texts()
        self.assertEqual(self.bob.open(pushed).sender, old)
        self.address_mediator_by(old)
        websocket_client.send(self.pings("still")[0])
        (answer,) = websocket_client.texts()
        self.assertEqual(self.bob.open(answer).sender, old)

    def test_did_web(self) -> None:
        """Envelopes for the former `#prekey` are decrypted, and answered with that key."""
        identity = self.site_fixture.base.identity.now
        document = parse_did_document(identity.web_did, identity.web_document)
        carol = InMemoryWallet(self.site_fixture)
        carol.documents.add(document)
        self.site_fixture.did, self.site_fixture.document = identity.web_did, document
        message = carol.pack(PING, id="before")
        self.rotate()
        answered = self.site_fixture.receive(message)
        self.assertEqual(answered.status, 200)
        # Verified with the key in the document that Carol has.
        self.assertEqual(carol.open(answered.body).sender, identity.web_did)

    def test_grant(self) -> None:
        """A request to the former DID is answered from it, and grants the new one."""
        old, new = self.site_fixture.did, self.rotate()
        answer = self.bob.answer(f"{CM3}/mediate-request")
        self.assertEqual((answer.sender, answer.body), (old, {"routing_did": [new]}))

    def test_own_dids_cannot_be_registered(self) -> None:
        """No account can register a former, current or prepared DID of the mediator."""
        rotate_keys(self.path, self.config_for)
        rotate_keys(self.path, self.config_for, prepare=True)
        self.reload()
        identity = self.site_fixture.base.identity.now
        dids = [identity.did, *identity.former_peer_dids, *identity.prepared_dids]
        self.assertEqual(len(dids), 3)
        updates = [{"recipient_did": did, "action": "add"} for did in dids]
        updated = self.bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual({item["result"] for item in updated}, {"client_error"})

    def test_prepared_keys(self) -> None:
        """They decrypt, and are not published."""
        before = self.site_fixture.request("GET", "/").body
        self.assertEqual(self.rotate(prepare=True), self.site_fixture.did)
        self.assertEqual(self.site_fixture.request("GET", "/").body, before)
        (coming,) = self.site_fixture.base.identity.now.prepared_dids
        self.address_mediator_by(coming)
        self.forward(self.bob)
        # Another node has published the new DID: this one must not publish the former.
        answer = InMemoryWallet(self.site_fixture).answer(f"{CM3}/mediate-request")
        self.assertEqual((answer.sender, answer.body), (coming, {"routing_did": [coming]}))

    def test_retired_keys(self) -> None:
        """Messages for them are undecryptable."""
        raw = pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload("late"))
        self.rotate()
        retire_keys(self.path, "prekey", self.config_for)
        self.reload()
        self.assertEqual(self.site_fixture.receive(raw, peer="203.0.113.9").status, 400)

    def test_unusable_file(self) -> None:
        """Nothing changes, settings included."""
        did = self.site_fixture.did
        self.path.write_bytes(b"{}")
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "log": {**values["log"], "level": "warn"}})
        with capturedLogs() as log_events:
            self.site_fixture.base.reloader.reload(lambda: new)
        self.assertEqual(
            [formatEvent(event) for event in log_events],
            [
                f"configuration rejected, keeping the previous settings: {self.path} is not a private key set: "
                "expected a JWK set with kid and d"
            ],
        )
        self.assertEqual(self.site_fixture.base.reloader.config.log.level, "info")
        self.assertEqual(self.site_fixture.request("GET", "/did").body.decode(), did)
        self.assertEqual(self.site_fixture.counter("mediator_config_last_reload_success"), 0)

    def test_former_dids(self) -> None:
        """Configured former DIDs count at once, too."""
        former = "did:web:old.example"
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "identity": {**values["identity"], "former_dids": [former]}})
        with capturedLogs() as log_events:
            self.site_fixture.base.reloader.reload(lambda: new)
            self.site_fixture.base.reloader.reload(lambda: self.site_fixture.config)
        self.assertEqual(
            [formatEvent(event) for event in log_events],
            ["configuration reloaded"] * 2 + [f"DIDs no longer accepted: {former}"],
        )


class LimitsTests(SocketTestCase):
    settings = {"limits": HIGH_LIMITS}

    def set_limits(self, **limits: int) -> None:
        """Reload with other limits."""
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "limits": {**values["limits"], **limits}})
        self.site_fixture.base.reloader.reload(lambda: new)

    def test_message_size(self) -> None:
        """Of bodies, of frames on open and new sockets, and in the disclosed features."""
        before = self.site_fixture.websocket_client()
        self.set_limits(max_message_bytes=10_000)
        self.assertEqual(self.site_fixture.request("POST", "/didcomm", b"x" * 10_001).status, 413)
        for websocket_client in (before, self.site_fixture.websocket_client()):
            websocket_client.send(b"x" * 10_001)
            self.assertEqual(websocket_client.close_code(), 1009)
        self.set_limits(max_message_bytes=200_000)
        self.assertEqual(self.site_fixture.request("POST", "/didcomm", b"x" * 10_001).status, 400)
        query = {"queries": [{"feature-type": "constraint", "match": "max_receive_bytes"}]}
        answer = self.bob.answer("https://didcomm.org/discover-features/2.0/queries", query)
        self.assertIn("200000", str(answer.body))

    def test_rates(self) -> None:
        """Lower and higher rates; use within the current minute counts."""

        def sent() -> int:
            raw = [pack_forward(self.site_fixture, self.bob.did, self.bob.make_payload(str(n))) for n in range(9)]
            return sum(self.site_fixture.receive(item, peer="203.0.113.8").status == 202 for item in raw)

        self.assertEqual(sent(), 9)
        self.set_limits(ip_per_minute=12)
        self.assertEqual(sent(), 3)
        self.set_limits(ip_per_minute=16)
        self.assertEqual(sent(), 4)
        self.set_limits(ip_per_minute=2)
        self.assertEqual(sent(), 0)
        self.site_fixture.clock.advance(60)
        self.assertEqual(sent(), 2)

    def test_sockets_per_address(self) -> None:
        """Open sockets stay."""
        websocket_clients = [self.site_fixture.websocket_client() for _ in range(3)]
        self.set_limits(max_connections_per_ip=3)
        self.assertEqual(self.site_fixture.upgrade()[1].status, 429)
        self.set_limits(max_connections_per_ip=4)
        self.assertEqual(self.site_fixture.upgrade()[1].status, 101)
        for websocket_client in websocket_clients:
            websocket_client.send(self.pings("a")[0])
            self.assertEqual(len(websocket_client.texts()), 1)

    def test_send_queues(self) -> None:
        """A lower limit applies to open sockets; frames already queued stay."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        websocket_client.texts()
        websocket_client.transport.peer_stalled = True

        def kept() -> int:
            for _ in range(20):
                message = self.bob.make_payload("x" * 20_000)
                self.site_fixture.receive(pack_forward(self.site_fixture, self.bob.did, message), peer="203.0.113.9")
            return int(websocket_client.transport.protocol._send_queue.queued_bytes)  # type: ignore[attr-defined]

        before = kept()
        self.assertGreater(before, 300_000)
        self.set_limits(max_outbox_bytes=before)
        self.assertEqual(kept(), before)
        self.set_limits(max_outbox_bytes=before + 100_000)
        self.assertTrue(before < kept() <= before + 100_000)

    def test_unread_responses(self) -> None:
        """In total, and an eighth of it per address."""
        unread = self.site_fixture.site.unread
        self.assertTrue(unread.has_room("203.0.113.9", 1_000_000))
        self.set_limits(max_unread_bytes=4_000_000)
        self.assertFalse(unread.has_room("203.0.113.9", 1_000_000))
        self.assertTrue(unread.has_room("203.0.113.9", 500_000))


class CertificateTests(SynchronousTestCase):
    """A listener with TLS."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.authority = CertificateAuthority(self.directory)
        self.used = self.directory / "used.pem"
        shutil.copy(self.authority.issue("first", ["127.0.0.1"]), self.used)
        self.reactor: Any = MemoryReactorClock()

    def listener(self, port: int = 8443, more: str = "", before: str = "") -> Listener:
        """Build a listener."""
        endpoint = f"{before}ssl:{port}{more}:privateKey={self.used}:certKey={self.used}"
        listener = Listener(endpoint, Factory.forProtocol(Protocol), self.reactor)
        listener.privilegedStartService()
        return listener

    def served_name(self) -> str:
        """Common name of the certificate on a new connection."""
        connection = self.reactor.tcpServers[-1][1].buildProtocol(None)
        connection.makeConnection(StringTransport())
        certificate = connection.getHandle().get_certificate()
        assert certificate is not None
        (name,) = certificate.to_cryptography().subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(name.value)

    def reload_certificate(self, listener: Listener, outcome: bool) -> str:
        """Reload the certificate; return the log line."""
        with capturedLogs() as log_events:
            self.assertIs(listener.renew(), outcome)
        (event,) = log_events
        return formatEvent(event)

    def test_renewed(self) -> None:
        """New connections get the new certificate; the log has its expiry."""
        listener = self.listener()
        self.assertEqual(self.served_name(), "first")
        self.assertRegex(
            self.reload_certificate(listener, True),
            r"^certificate of \*:8443 unchanged, valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC$",
        )
        shutil.copy(self.authority.issue("second", ["127.0.0.1"]), self.used)
        self.assertIn("renewed, valid until", self.reload_certificate(listener, True))
        self.assertEqual(self.served_name(), "second")

    def test_not_renewed(self) -> None:
        """An unreadable certificate, or one that does not match its key, leaves the old one."""
        listener = self.listener(more=":interface=127.0.0.1")
        expiry = listener.certificate.expiry if listener.certificate else None
        other = self.authority.issue("other", ["127.0.0.1"]).read_bytes()
        first = self.used.read_bytes()
        begin = b"-----BEGIN PRIVATE KEY-----"
        mixed = first.partition(begin)[0] + begin + other.partition(begin)[2]
        for content in (b"", b"-----BEGIN CERTIFICATE-----\n", mixed, first.partition(begin)[0]):
            self.used.write_bytes(content)
            self.assertEqual(
                self.reload_certificate(listener, False),
                "keeping the current certificate of 127.0.0.1:8443: cannot use its key or certificate",
            )
        self.used.unlink()
        line = f"keeping the current certificate of 127.0.0.1:8443: {self.used}: No such file or directory"
        self.assertEqual(self.reload_certificate(listener, False), line)
        self.assertEqual(self.served_name(), "first")
        self.assertEqual(listener.certificate and listener.certificate.expiry, expiry)

    def test_behind_haproxy(self) -> None:
        """A listener with the PROXY protocol has a certificate like others."""
        listener = self.listener(before="haproxy:")
        shutil.copy(self.authority.issue("second", ["127.0.0.1"]), self.used)
        self.assertRegex(self.reload_certificate(listener, True), r"^certificate of \*:8443 renewed, valid until")
        self.assertEqual(self.served_name(), "second")
        self.used.write_bytes(b"")
        self.assertIn("cannot use its key or certificate", self.reload_certificate(listener, False))
        self.assertEqual(self.served_name(), "second")

    def test_chain(self) -> None:
        """Intermediate certificates in the file are sent as well, or those of a separate chain file."""
        between, other = (
            CertificateAuthority(self.directory, name, parent=self.authority) for name in ("Between", "Other")
        )
        self.used.write_bytes(between.issue("third", ["127.0.0.1"]).read_bytes() + between.path.read_bytes())
        self.assertEqual(self.served_chain(self.listener()), ["third", "Between"])
        self.assertEqual(self.served_chain(self.listener(more=f":extraCertChain={other.path}")), ["third", "Other"])
        listener = self.listener()
        self.used.write_bytes(other.issue("fourth", ["127.0.0.1"]).read_bytes() + other.path.read_bytes())
        self.reload_certificate(listener, True)
        self.assertEqual(self.served_chain(listener), ["fourth", "Other"])

    def test_endpoint_string_forms(self) -> None:
        """Parsed like Twisted's endpoint strings: named or positional arguments, with backslash escapes."""
        self.assertEqual(
            find_certificate_files(r"haproxy:ssl:443:certKey=/c\:1\=\.pem:privateKey=/k"),
            {"privateKey": Path("/k"), "certKey": Path("/c:1=.pem")},
        )
        self.assertEqual(
            find_certificate_files("ssl:443:/k:/c:interface=x"), {"privateKey": Path("/k"), "certKey": Path("/c")}
        )
        self.assertEqual(find_certificate_files("ssl:443:/k:/c:TLSv1_2_METHOD").keys(), {"privateKey", "certKey"})
        self.assertEqual(find_certificate_files("ssl:443"), {})

    def served_chain(self, listener: Listener) -> list[str]:
        """Common names of all certificates on a new connection."""
        assert listener.certificate
        server, client = (
            SSL.Connection(listener.certificate.getContext()),
            SSL.Connection(SSL.Context(SSL.TLS_METHOD)),
        )
        server.set_accept_state()
        client.set_connect_state()
        for _ in range(4):
            for one, another in ((client, server), (server, client)):
                with contextlib.suppress(SSL.WantReadError):
                    one.do_handshake()
                with contextlib.suppress(SSL.WantReadError):
                    another.bio_write(one.bio_read(1 << 16))
        chain = client.get_peer_cert_chain()
        assert chain
        names = [item.to_cryptography().subject.get_attributes_for_oid(NameOID.COMMON_NAME) for item in chain]
        return [str(name.value) for (name,) in names]

    def test_without_tls(self) -> None:
        """Nothing is logged."""
        listener = Listener("tcp:80", Factory(), self.reactor)
        with capturedLogs() as log_events:
            self.assertIs(listener.renew(), True)
        self.assertEqual(log_events, [])

    def test_unusable_at_start(self) -> None:
        """One line says why."""
        self.used.write_bytes(b"")
        with self.assertRaisesRegex(StartupError, "^cannot listen on ssl:.*: cannot use its key or certificate$"):
            self.listener()

    def test_expiry_metric(self) -> None:
        """The expiry is known from the start, and after each reload."""
        in_memory = InMemorySite(self)
        listener = self.listener()
        in_memory.base.reloader.add_listener(listener)
        assert listener.certificate is not None
        self.assertEqual(self.expiry(in_memory), listener.certificate.expiry.timestamp())
        shutil.copy(self.authority.issue("second", ["127.0.0.1"], expired=True), self.used)
        in_memory.base.reloader.reload(lambda: in_memory.config)
        self.assertEqual(self.expiry(in_memory), listener.certificate.expiry.timestamp())
        self.assertEqual(in_memory.counter("mediator_config_last_reload_success"), 1)
        self.used.unlink()
        in_memory.clock.advance(5)
        accepted = in_memory.counter("mediator_config_last_reload_success_timestamp_seconds")
        in_memory.base.reloader.reload(lambda: in_memory.config)
        self.assertEqual(in_memory.counter("mediator_config_last_reload_success"), 0)
        self.assertEqual(in_memory.counter("mediator_config_last_reload_success_timestamp_seconds"), accepted)

    def expiry(self, in_memory: InMemorySite) -> float:
        """The expiry by the metrics."""
        return in_memory.counter("mediator_certificate_expiry_timestamp_seconds", listener="*:8443")
