"""What a daemon takes over while it runs, in memory: keys, limits, certificates (SIGHUP)."""

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
    """A mediator whose keys are rotated, and Bob who knows it by the DID that it had."""

    def setUp(self) -> None:
        super().setUp()
        self.path = self.site_fixture.config.identity.keys

    def fits(self, keys: Any) -> MediatorIdentity:
        """For the key file."""
        return MediatorIdentity(keys, self.site_fixture.config.public_url)

    def reload(self) -> list[str]:
        """What is said."""
        with capturedLogs() as said:
            self.site_fixture.base.reloader.reload(lambda: self.site_fixture.config)
        return [formatEvent(event) for event in said]

    def rotate(self, **how: Any) -> str:
        """Rotate and reload; the DID that is served."""
        rotate_keys(self.path, self.fits, **how)
        self.reload()
        return self.site_fixture.request("GET", "/did").body.decode()

    def now_at(self, did: str) -> None:
        """From now on strangers know the mediator by this DID."""
        self.site_fixture.did, self.site_fixture.document = did, resolve_local(did)

    def test_pages(self) -> None:
        """All that is told of the mediator is of the new keys."""
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

    def test_what_is_said(self) -> None:
        """The new DID, one that is prepared, and each that is accepted no more; nothing while nothing changes."""
        quiet = "configuration reloaded"
        self.assertEqual(self.reload(), [quiet])
        rotate_keys(self.path, self.fits, prepare=True)
        (prepared,) = self.fits(load_keys(self.path)).prepared_dids
        self.assertEqual(self.reload(), [quiet, f"the DID {prepared[:60]}… is accepted but not published yet"])
        rotate_keys(self.path, self.fits)
        self.assertEqual(self.reload(), [quiet, f"current DID: {prepared[:60]}…; 1 former DIDs still accepted"])
        retire_keys(self.path, "prekey", self.fits)
        self.assertEqual(self.reload(), [quiet, f"no longer accepted: {self.site_fixture.did[:60]}…"])
        self.assertEqual(self.reload(), [quiet])

    def test_a_live_socket(self) -> None:
        """It stays, is answered and written to from the DID that it addressed, and gets what comes by the new one."""
        old = self.site_fixture.did
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        new = self.rotate()
        self.now_at(new)
        self.forward(self.bob, "by the new DID")
        (pushed,) = websocket_client.texts()
        self.assertEqual(self.bob.open(pushed).sender, old)
        self.now_at(old)
        websocket_client.send(self.pings("still")[0])
        (answer,) = websocket_client.texts()
        self.assertEqual(self.bob.open(answer).sender, old)

    def test_the_web_did(self) -> None:
        """What is sealed for `#prekey` of before opens, and is answered with the key that it was sealed for."""
        identity = self.site_fixture.base.identity.now
        document = parse_did_document(identity.web_did, identity.web_document)
        carol = InMemoryWallet(self.site_fixture)
        carol.documents.add(document)
        self.site_fixture.did, self.site_fixture.document = identity.web_did, document
        message = carol.pack(PING, id="before")
        self.rotate()
        answered = self.site_fixture.receive(message)
        self.assertEqual(answered.status, 200)
        # Checked with the key in the document that Carol has.
        self.assertEqual(carol.open(answered.body).sender, identity.web_did)

    def test_a_grant(self) -> None:
        """Who asks by the former DID is answered from it, and given the new one to hand out."""
        old, new = self.site_fixture.did, self.rotate()
        answer = self.bob.answer(f"{CM3}/mediate-request")
        self.assertEqual((answer.sender, answer.body), (old, {"routing_did": [new]}))

    def test_our_own(self) -> None:
        """Nobody can register a DID of ours, whether it was or will be."""
        rotate_keys(self.path, self.fits)
        rotate_keys(self.path, self.fits, prepare=True)
        self.reload()
        identity = self.site_fixture.base.identity.now
        dids = [identity.did, *identity.former_peer_dids, *identity.prepared_dids]
        self.assertEqual(len(dids), 3)
        updates = [{"recipient_did": did, "action": "add"} for did in dids]
        updated = self.bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual({one["result"] for one in updated}, {"client_error"})

    def test_prepared(self) -> None:
        """It opens, and is told to nobody."""
        before = self.site_fixture.request("GET", "/").body
        self.assertEqual(self.rotate(prepare=True), self.site_fixture.did)
        self.assertEqual(self.site_fixture.request("GET", "/").body, before)
        (coming,) = self.site_fixture.base.identity.now.prepared_dids
        self.now_at(coming)
        self.forward(self.bob)
        # Some other node has told it already: nobody is sent back to the one before.
        answer = InMemoryWallet(self.site_fixture).answer(f"{CM3}/mediate-request")
        self.assertEqual((answer.sender, answer.body), (coming, {"routing_did": [coming]}))

    def test_retired(self) -> None:
        """What is for it is refused like anything that nobody can open."""
        raw = pack_forward(self.site_fixture, self.bob.did, self.bob.letter("late"))
        self.rotate()
        retire_keys(self.path, "prekey", self.fits)
        self.reload()
        self.assertEqual(self.site_fixture.receive(raw, peer="203.0.113.9").status, 400)

    def test_a_file_that_cannot_be_used(self) -> None:
        """Nothing changes, the settings included."""
        did = self.site_fixture.did
        self.path.write_bytes(b"{}")
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "log": {**values["log"], "level": "warn"}})
        with capturedLogs() as said:
            self.site_fixture.base.reloader.reload(lambda: new)
        self.assertEqual(
            [formatEvent(event) for event in said],
            [
                f"configuration rejected, previous settings stay in force: {self.path} is not a set of private keys: "
                "expected a JWK set with kid and d"
            ],
        )
        self.assertEqual(self.site_fixture.base.reloader.config.log.level, "info")
        self.assertEqual(self.site_fixture.request("GET", "/did").body.decode(), did)
        self.assertEqual(self.site_fixture.counter("mediator_config_last_reload_success"), 0)

    def test_former_dids(self) -> None:
        """Those of the configuration count at once, too."""
        former = "did:web:old.example"
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "identity": {**values["identity"], "former_dids": [former]}})
        with capturedLogs() as said:
            self.site_fixture.base.reloader.reload(lambda: new)
            self.site_fixture.base.reloader.reload(lambda: self.site_fixture.config)
        self.assertEqual(
            [formatEvent(event) for event in said],
            ["configuration reloaded"] * 2 + [f"no longer accepted: {former}"],
        )


class LimitsTests(SocketTestCase):
    settings = {"limits": HIGH_LIMITS}

    def limit(self, **limits: int) -> None:
        """Reload with other limits."""
        values = self.site_fixture.config.model_dump()
        new = Config.model_validate({**values, "limits": {**values["limits"], **limits}})
        self.site_fixture.base.reloader.reload(lambda: new)

    def test_size(self) -> None:
        """Of a body, of a frame on a socket that is open and on one that comes, and what is disclosed."""
        before = self.site_fixture.websocket_client()
        self.limit(max_message_bytes=10_000)
        self.assertEqual(self.site_fixture.request("POST", "/didcomm", b"x" * 10_001).status, 413)
        for websocket_client in (before, self.site_fixture.websocket_client()):
            websocket_client.send(b"x" * 10_001)
            self.assertEqual(websocket_client.close_code(), 1009)
        self.limit(max_message_bytes=200_000)
        self.assertEqual(self.site_fixture.request("POST", "/didcomm", b"x" * 10_001).status, 400)
        query = {"queries": [{"feature-type": "constraint", "match": "max_receive_bytes"}]}
        answer = self.bob.answer("https://didcomm.org/discover-features/2.0/queries", query)
        self.assertIn("200000", str(answer.body))

    def test_rates(self) -> None:
        """Lower and higher; what was used within the minute counts."""

        def sent() -> int:
            raw = [pack_forward(self.site_fixture, self.bob.did, self.bob.letter(str(n))) for n in range(9)]
            return sum(self.site_fixture.receive(one, peer="203.0.113.8").status == 202 for one in raw)

        self.assertEqual(sent(), 9)
        self.limit(ip_per_minute=12)
        self.assertEqual(sent(), 3)
        self.limit(ip_per_minute=16)
        self.assertEqual(sent(), 4)
        self.limit(ip_per_minute=2)
        self.assertEqual(sent(), 0)
        self.site_fixture.clock.advance(60)
        self.assertEqual(sent(), 2)

    def test_sockets_of_one_address(self) -> None:
        """Those that are open stay."""
        visitors = [self.site_fixture.websocket_client() for _ in range(3)]
        self.limit(max_connections_per_ip=3)
        self.assertEqual(self.site_fixture.upgrade()[1].status, 429)
        self.limit(max_connections_per_ip=4)
        self.assertEqual(self.site_fixture.upgrade()[1].status, 101)
        for websocket_client in visitors:
            websocket_client.send(self.pings("a")[0])
            self.assertEqual(len(websocket_client.texts()), 1)

    def test_outboxes(self) -> None:
        """A lower limit counts for sockets that are open; what waits there already goes on waiting."""
        websocket_client = self.site_fixture.websocket_client()
        websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        websocket_client.texts()
        websocket_client.transport.peer_stalled = True

        def kept() -> int:
            for _ in range(20):
                letter = self.bob.letter("x" * 20_000)
                self.site_fixture.receive(pack_forward(self.site_fixture, self.bob.did, letter), peer="203.0.113.9")
            return int(websocket_client.transport.protocol._send_queue.queued_bytes)  # type: ignore[attr-defined]

        before = kept()
        self.assertGreater(before, 300_000)
        self.limit(max_outbox_bytes=before)
        self.assertEqual(kept(), before)
        self.limit(max_outbox_bytes=before + 100_000)
        self.assertTrue(before < kept() <= before + 100_000)

    def test_unread_answers(self) -> None:
        """In all, and an eighth of that for one address."""
        unread = self.site_fixture.site.unread
        self.assertTrue(unread.has_room("203.0.113.9", 1_000_000))
        self.limit(max_unread_bytes=4_000_000)
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
        """One that listens."""
        endpoint = f"{before}ssl:{port}{more}:privateKey={self.used}:certKey={self.used}"
        listener = Listener(endpoint, Factory.forProtocol(Protocol), self.reactor)
        listener.privilegedStartService()
        return listener

    def name_shown(self) -> str:
        """Common name of the certificate that a connection gets now."""
        connection = self.reactor.tcpServers[-1][1].buildProtocol(None)
        connection.makeConnection(StringTransport())
        certificate = connection.getHandle().get_certificate()
        assert certificate is not None
        (name,) = certificate.to_cryptography().subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(name.value)

    def said(self, listener: Listener, outcome: bool) -> str:
        """In one line, when it reads its certificate again."""
        with capturedLogs() as said:
            self.assertIs(listener.renew(), outcome)
        (event,) = said
        return formatEvent(event)

    def test_renewed(self) -> None:
        """Whoever connects from then on gets the new one; the line says until when it is good."""
        listener = self.listener()
        self.assertEqual(self.name_shown(), "first")
        self.assertRegex(
            self.said(listener, True),
            r"^the certificate of \*:8443 is the same, good until 20\d\d-\d\d-\d\d \d\d:\d\d UTC$",
        )
        shutil.copy(self.authority.issue("second", ["127.0.0.1"]), self.used)
        self.assertIn("is a new one, good until", self.said(listener, True))
        self.assertEqual(self.name_shown(), "second")

    def test_not_renewed(self) -> None:
        """One that cannot be read, or does not go with its key, leaves the one of before."""
        listener = self.listener(more=":interface=127.0.0.1")
        expiry = listener.certificate.expiry if listener.certificate else None
        other = self.authority.issue("other", ["127.0.0.1"]).read_bytes()
        first = self.used.read_bytes()
        begin = b"-----BEGIN PRIVATE KEY-----"
        mixed = first.partition(begin)[0] + begin + other.partition(begin)[2]
        for content in (b"", b"-----BEGIN CERTIFICATE-----\n", mixed, first.partition(begin)[0]):
            self.used.write_bytes(content)
            self.assertEqual(
                self.said(listener, False),
                "the certificate of 127.0.0.1:8443 stays the same: its key or certificate cannot be used",
            )
        self.used.unlink()
        line = f"the certificate of 127.0.0.1:8443 stays the same: {self.used}: No such file or directory"
        self.assertEqual(self.said(listener, False), line)
        self.assertEqual(self.name_shown(), "first")
        self.assertEqual(listener.certificate and listener.certificate.expiry, expiry)

    def test_behind_haproxy(self) -> None:
        """A listener that is told by a proxy who its clients are has a certificate like any other."""
        listener = self.listener(before="haproxy:")
        shutil.copy(self.authority.issue("second", ["127.0.0.1"]), self.used)
        self.assertRegex(self.said(listener, True), r"^the certificate of \*:8443 is a new one, good until")
        self.assertEqual(self.name_shown(), "second")
        self.used.write_bytes(b"")
        self.assertIn("its key or certificate cannot be used", self.said(listener, False))
        self.assertEqual(self.name_shown(), "second")

    def test_what_is_between(self) -> None:
        """What follows it in its file is shown as well; a file that is named for that is what is shown instead."""
        between, other = (
            CertificateAuthority(self.directory, name, above=self.authority) for name in ("Between", "Other")
        )
        self.used.write_bytes(between.issue("third", ["127.0.0.1"]).read_bytes() + between.path.read_bytes())
        self.assertEqual(self.chain_shown(self.listener()), ["third", "Between"])
        self.assertEqual(self.chain_shown(self.listener(more=f":extraCertChain={other.path}")), ["third", "Other"])
        listener = self.listener()
        self.used.write_bytes(other.issue("fourth", ["127.0.0.1"]).read_bytes() + other.path.read_bytes())
        self.said(listener, True)
        self.assertEqual(self.chain_shown(listener), ["fourth", "Other"])

    def test_the_files_that_are_named(self) -> None:
        """As Twisted reads endpoint strings: by name or in order, a backslash before what is meant as it is."""
        self.assertEqual(
            find_certificate_files(r"haproxy:ssl:443:certKey=/c\:1\=\.pem:privateKey=/k"),
            {"privateKey": Path("/k"), "certKey": Path("/c:1=.pem")},
        )
        self.assertEqual(
            find_certificate_files("ssl:443:/k:/c:interface=x"), {"privateKey": Path("/k"), "certKey": Path("/c")}
        )
        self.assertEqual(find_certificate_files("ssl:443:/k:/c:TLSv1_2_METHOD").keys(), {"privateKey", "certKey"})
        self.assertEqual(find_certificate_files("ssl:443"), {})

    def chain_shown(self, listener: Listener) -> list[str]:
        """Common names of all certificates that a connection gets now."""
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
        names = [one.to_cryptography().subject.get_attributes_for_oid(NameOID.COMMON_NAME) for one in chain]
        return [str(name.value) for (name,) in names]

    def test_without_tls(self) -> None:
        """There is nothing to be said."""
        listener = Listener("tcp:80", Factory(), self.reactor)
        with capturedLogs() as said:
            self.assertIs(listener.renew(), True)
        self.assertEqual(said, [])

    def test_at_the_start(self) -> None:
        """What cannot be used is said in a line, as ever."""
        self.used.write_bytes(b"")
        with self.assertRaisesRegex(StartupError, "^cannot listen on ssl:.*: its key or certificate cannot be used$"):
            self.listener()

    def test_metric(self) -> None:
        """When it ends is known from the start, and after each reload."""
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
        taken = in_memory.counter("mediator_config_last_reload_success_timestamp_seconds")
        in_memory.base.reloader.reload(lambda: in_memory.config)
        self.assertEqual(in_memory.counter("mediator_config_last_reload_success"), 0)
        self.assertEqual(in_memory.counter("mediator_config_last_reload_success_timestamp_seconds"), taken)

    def expiry(self, in_memory: InMemorySite) -> float:
        """As the metrics say."""
        return in_memory.counter("mediator_certificate_expiry_timestamp_seconds", listener="*:8443")
