"""New keys, limits and certificates for a daemon that runs: wallets and sockets of before go on (SIGHUP)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import yaml
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread

from mediatord.cli.commands import _run_command
from mediatord.identity.key_file import create_keys
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_document import parse_did_document
from mediatord.wallet.didcomm_client import DIDCommMediator, DIDCommWallet, discover_mediator, open_http
from mediatord.wallet.didcomm_messages import BASIC_MESSAGE, anoncrypt, compose_message, wrap_in_forwards
from mediatord.wallet.temporary_daemon import find_free_port
from tests.certificate_authority import CertificateAuthority
from tests.integration.cluster import DaemonCluster, wallet_at_node
from tests.integration.daemon import Daemon, merge_settings
from tests.integration.message_load import (
    PATIENCE_SECONDS,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    read_marker,
)
from tests.integration.raw_decentrl_client import DaemonClient, RawDecentrlClient
from tests.integration.test_lifecycle import DaemonTestCase, ask
from tests.integration.test_workers import ENOUGH_SOCKETS, await_workers, pid_of
from tests.mongod import fresh_database, shared_replica_set

reactor: Any = _reactor

LOOK_SECONDS = 0.05


def await_true(met: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """
    Look again and again.

    :raise AssertionError: it does not come true.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(LOOK_SECONDS)


def did_of(daemon: Daemon) -> str:
    """What is served as the DID, by whichever process."""
    return ask(daemon.port, "GET", "/did")[2].decode()


def keys(daemon: Daemon, *arguments: str) -> None:
    """Run `mediatord keys`."""
    assert _run_command(["keys", *arguments, "--config", str(daemon.config)]) == 0


def reload(daemon: Daemon, line: str) -> None:
    """Have it read its files again; this is what it says then, once more than before."""
    before = daemon.output().count(line)
    os.kill(daemon.pid, signal.SIGHUP)
    await_true(lambda: daemon.output().count(line) > before, daemon.output)


def rotated(daemon: Daemon) -> str:
    """Rotate and reload; the DID that every process serves by then."""
    before = did_of(daemon)
    keys(daemon, "rotate")
    os.kill(daemon.pid, signal.SIGHUP)
    await_true(lambda: all(did_of(daemon) != before for _ in range(ENOUGH_SOCKETS)), daemon.output)
    return did_of(daemon)


def at_web_did(daemon: Daemon) -> DIDCommMediator:
    """The mediator as its did:web describes it now."""
    document = encoding.loads_object(ask(daemon.port, "GET", "/.well-known/did.json")[2])
    return DIDCommMediator.from_document(parse_did_document(document["id"], document))


class RotationTestCase(DaemonTestCase):
    """What holds for one process, and for several."""

    settings: dict[str, Any] = {}

    def a_crew(self) -> Daemon:
        """A daemon whose processes all serve."""
        daemon = self.a_daemon(self.settings)
        if self.settings:
            await_workers(daemon, self.settings["workers"])
        return daemon

    async def pushes(self, sender: DIDCommWallet, live: Any, marker: str) -> None:
        """What this wallet sends by the mediator's DID that it knows arrives on the other's socket."""
        (letter,) = prepare_forwards(live.wallet, marker, 1)
        self.assertEqual((await sender.post(letter.body)).status, 202)
        delivered = await live.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        self.assertEqual(read_marker(live.wallet, delivered), letter.marker)
        await live.acknowledge([delivered])


class _Rotation(RotationTestCase):
    async def test_sockets_of_before_go_on(self) -> None:
        """
        A DIDComm and a Decentrl socket stay open and go on receiving over two rotations, while wallets of every
        generation use the DID that they know, and a new one is given the new.
        """
        daemon = self.a_crew()
        first = did_of(daemon)
        old = await enrol_wallet(daemon, reactor)
        live = await self.a_socket(old)
        await live.live()
        alice, bob = await deferToThread(self.residents, daemon)
        line = await deferToThread(bob.socket)
        self.addCleanup(line.close)
        wallets, dids = [old], [first]
        for turn in range(2):
            # Begun now, as it answers pings: a socket that does not, for half a minute or so, is closed.
            heard = deferToThread(line.hear)
            dids.append(await deferToThread(rotated, daemon))
            fresh = await enrol_wallet(daemon, reactor)
            wallets.append(fresh)
            self.assertEqual(fresh.mediator.did, dids[-1])
            for wallet in wallets:
                await self.pushes(wallet, live, f"turn {turn}")
                await wallet.ping()  # answered by who was asked, which the wallet checks
                self.assertEqual(await wallet.grant(), (dids[-1],))
            self.assertEqual((await deferToThread(alice.tell, bob)).status, 200)
            self.assertEqual((await heard)["type"], "PENDING_EVENTS")
        self.assertEqual(len(set(dids)), 3)
        self.assertIsNone(live.close_code)
        document = encoding.loads_object((await deferToThread(ask, daemon.port, "GET", "/"))[2])
        self.assertEqual(document["alsoKnownAs"], dids[::-1])
        self.assertIn(
            dids[-1], encoding.loads_object((await deferToThread(ask, daemon.port, "GET", "/invitation"))[2])["from"]
        )
        await self.stop(daemon)

    def residents(self, daemon: Daemon) -> tuple[RawDecentrlClient, RawDecentrlClient]:
        """Two who may write to each other."""
        daemon_client = DaemonClient(daemon)
        alice, bob = RawDecentrlClient(daemon_client, "alice"), RawDecentrlClient(daemon_client, "bob")
        for one in (alice, bob):
            one.register()
        bob.befriend(alice)
        return alice, bob

    async def test_who_has_the_web_did_of_before(self) -> None:
        """
        What is sealed for `#prekey` as it was opens, and is answered with that key; so does a registration. Contracts
        that the mediator has signed stay signed.
        """
        daemon = self.a_crew()
        daemon_client = await deferToThread(DaemonClient, daemon)
        old = await deferToThread(at_web_did, daemon)
        wallet = DIDCommWallet.generate(old, open_http(reactor), reactor)
        await wallet.enrol()
        carol, dave = RawDecentrlClient(daemon_client, "carol"), RawDecentrlClient(daemon_client, "dave")
        signed = await deferToThread(dave.register)
        await deferToThread(rotated, daemon)
        new = await deferToThread(at_web_did, daemon)
        self.assertEqual(old.did, new.did)
        self.assertNotEqual(old.document.key_agreement[0], new.document.key_agreement[0])
        for _ in range(4):  # whichever process answers
            await wallet.ping()
        self.assertEqual(await wallet.grant(), (old.did,))
        fresh = DIDCommWallet.generate(new, open_http(reactor), reactor)
        self.assertEqual(await fresh.enrol(), (old.did,))
        await deferToThread(carol.register)
        # Signed by the mediator with a key that it had.
        self.assertEqual((await deferToThread(dave.save, signed)).status, 200)
        await self.stop(daemon)

    async def test_retired(self) -> None:
        """Its DID is named as no longer accepted, and is not; everything else goes on."""
        daemon = self.a_crew()
        old = await enrol_wallet(daemon, reactor)
        live = await self.a_socket(old)
        await live.live()
        await deferToThread(rotated, daemon)
        new = await enrol_wallet(daemon, reactor)
        await deferToThread(keys, daemon, "retire", "prekey", "--yes")
        await deferToThread(reload, daemon, f"no longer accepted: {old.mediator.did[:60]}")
        await deferToThread(await_true, lambda: self.all_refuse(daemon, old), daemon.output)
        await new.ping()
        self.assertIsNone(live.close_code)
        await self.stop(daemon)

    def all_refuse(self, daemon: Daemon, wallet: DIDCommWallet) -> bool:
        """Whether nobody opens what is for the DID that this wallet knows."""
        (letter,) = prepare_forwards(wallet, "late", 1)
        return all(ask(daemon.port, "POST", "/didcomm", letter.body)[0] == 400 for _ in range(ENOUGH_SOCKETS))

    def test_files_that_cannot_be_used(self) -> None:
        """One line each, and nothing changes; the next reload takes what is right again."""
        daemon = self.a_crew()
        did, path = did_of(daemon), daemon.directory / "keys.jwks"
        whole, text = path.read_bytes(), daemon.config.read_text("utf-8")
        refused = "configuration rejected, keeping the previous settings: "
        path.write_bytes(whole[:100])
        reload(daemon, f"{refused}{path} is not a private key set")
        path.write_bytes(whole)
        path.chmod(0o644)
        reload(daemon, f"{refused}{path} is accessible to other users (mode 0644); run: chmod 600 {path}")
        path.unlink()
        create_keys(path)
        reload(daemon, f"{refused}{path} has none of the keys in use; restart to change the identity")
        path.write_bytes(whole)
        daemon.config.write_text(
            yaml.safe_dump(merge_settings(yaml.safe_load(text), {"log": {"level": "loud"}})), "utf-8"
        )
        reload(daemon, f"{refused}{daemon.config}:")
        self.assertEqual({did_of(daemon) for _ in range(ENOUGH_SOCKETS)}, {did})
        # Workers come to know it a little later than it is said.
        await_true(
            lambda: b"mediator_config_last_reload_success 0.0" in ask(daemon.port, "GET", "/metrics")[2],
            daemon.output,
        )
        daemon.config.write_text(text, "utf-8")
        reload(daemon, "configuration reloaded")
        await_true(
            lambda: b"mediator_config_last_reload_success 1.0" in ask(daemon.port, "GET", "/metrics")[2],
            daemon.output,
        )
        daemon.stop()

    def test_limits(self) -> None:
        """They count at once, for sockets and connections that are open as well."""
        daemon = self.a_crew()
        large = b'{"protected":"' + b"x" * 20_000 + b'"}'
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", large)[0], 400)
        values = daemon.configuration()
        limits = {"max_message_bytes": 10_000, "did_per_minute": 5}
        daemon.config.write_text(yaml.safe_dump(merge_settings(values, {"limits": limits})), "utf-8")
        os.kill(daemon.pid, signal.SIGHUP)
        await_true(
            lambda: all(ask(daemon.port, "POST", "/didcomm", large)[0] == 413 for _ in range(ENOUGH_SOCKETS)),
            daemon.output,
        )
        self.assertNotIn("a restart is needed", daemon.output())
        daemon.config.write_text(yaml.safe_dump(values), "utf-8")
        os.kill(daemon.pid, signal.SIGHUP)
        await_true(
            lambda: all(ask(daemon.port, "POST", "/didcomm", large)[0] == 400 for _ in range(ENOUGH_SOCKETS)),
            daemon.output,
        )
        daemon.stop()

    def test_certificate(self) -> None:
        """Another one is shown to whoever connects from then on; one that cannot be read changes nothing."""
        directory = Path(tempfile.mkdtemp(prefix="mediatord-rotation-"))
        self.addCleanup(shutil.rmtree, directory)
        authority, port = CertificateAuthority(directory), find_free_port()
        shown = authority.issue("first", ["127.0.0.1"])
        used = directory / "used.pem"
        shutil.copy(shown, used)
        daemon = prepare_daemon(self.settings)
        self.addCleanup(daemon.clean)
        endpoint = f"ssl:{port}:interface=127.0.0.1:privateKey={used}:certKey={used}"
        listen = {"listen": [f"tcp:{daemon.port}:interface=127.0.0.1", endpoint]}
        daemon.config.write_text(yaml.safe_dump(merge_settings(daemon.configuration(), listen)), "utf-8")
        daemon.start()
        context = ssl.create_default_context(cafile=authority.path)
        with self.connected(context, port) as before:
            self.assertEqual(name_of(before), "first")
            self.assertEqual(health_over(before), 200)
            shutil.copy(authority.issue("second", ["127.0.0.1"]), used)
            reload(daemon, f"certificate of 127.0.0.1:{port} renewed, valid until ")
            await_true(
                lambda: all(self.shown(context, port) == "second" for _ in range(ENOUGH_SOCKETS)), daemon.output
            )
            self.assertEqual(health_over(before), 200)
            used.write_text("-----BEGIN CERTIFICATE-----\n")
            reload(daemon, f"keeping the current certificate of 127.0.0.1:{port}: cannot use its key or certificate")
            self.assertEqual({self.shown(context, port) for _ in range(ENOUGH_SOCKETS)}, {"second"})
            used.unlink()
            reload(daemon, f"keeping the current certificate of 127.0.0.1:{port}: {used}: No such file or directory")
            await_true(
                lambda: b"mediator_config_last_reload_success 0.0" in ask(daemon.port, "GET", "/metrics")[2],
                daemon.output,
            )
            self.assertEqual(health_over(before), 200)
        expiry = b'mediator_certificate_expiry_timestamp_seconds{listener="127.0.0.1:%d"}' % port
        await_true(lambda: expiry in ask(daemon.port, "GET", "/metrics")[2], daemon.output)
        daemon.stop()

    def connected(self, context: ssl.SSLContext, port: int) -> ssl.SSLSocket:
        """A TLS connection."""
        raw = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        return context.wrap_socket(raw, server_hostname="127.0.0.1")

    def shown(self, context: ssl.SSLContext, port: int) -> str:
        """The name in the certificate that somebody gets who connects now."""
        with self.connected(context, port) as connection:
            return name_of(connection)


def name_of(connection: ssl.SSLSocket) -> str:
    """Common name of the server's certificate."""
    certificate: Any = connection.getpeercert()
    return str(dict(pair for (pair,) in certificate["subject"])["commonName"])


def health_over(connection: ssl.SSLSocket) -> int:
    """Status of `GET /health` on a connection that stays open."""
    http = HTTPConnection("localhost")
    http.sock = connection
    http.request("GET", "/health")
    response = http.getresponse()
    response.read()
    return response.status


class OneProcessTests(_Rotation):
    """A daemon as it is by default."""


class WorkersTests(_Rotation):
    """A daemon of two workers."""

    settings = {"workers": 2, "node": "n"}

    def test_who_replaces_a_worker(self) -> None:
        """It has the keys that the others have: neither those of the start, nor those that nobody has read yet."""
        daemon = self.a_crew()
        new = rotated(daemon)
        keys(daemon, "rotate")
        os.kill(pid_of(daemon, "n-1"), signal.SIGKILL)
        daemon.await_output("was killed by SIGKILL")
        await_workers(daemon, 2)
        self.assertEqual({did_of(daemon) for _ in range(ENOUGH_SOCKETS)}, {new})
        daemon.stop()


class ClusterTests(RotationTestCase):
    """Nodes that get the file one after the other."""

    async def test_in_two_rounds(self) -> None:
        """
        No node hands out a DID that another cannot open, and none is refused because another has not reloaded yet:
        neither after rotating nor after retiring.
        """
        cluster = DaemonCluster(shared_replica_set().uri(self.database()), ("a", "b"))
        self.addCleanup(cluster.clean)
        await deferToThread(cluster.start)
        a, b = cluster.nodes
        old = await enrol_wallet(a, reactor)
        live = await self.a_socket(wallet_at_node(old, b.port, reactor))
        await live.live()
        await deferToThread(keys, a, "rotate", "--prepare")
        for node in (a, b):
            await deferToThread(self.given, node, a, "is accepted, but not published")
        self.assertEqual({did_of(a), did_of(b)}, {old.mediator.did})
        await deferToThread(keys, a, "rotate")
        await deferToThread(self.given, a, a, "current DID: ")
        new = DIDCommWallet.generate(await discover_mediator(open_http(reactor), a.url), open_http(reactor), reactor)
        self.assertNotEqual(new.mediator.did, old.mediator.did)
        self.assertEqual(await deferToThread(did_of, b), old.mediator.did)
        elsewhere = wallet_at_node(new, b.port, reactor)
        await elsewhere.enrol()
        await self.pushes_to(elsewhere, live)
        await deferToThread(a.restart)
        await deferToThread(self.given, b, a, "current DID: ")
        self.assertEqual(await deferToThread(did_of, b), new.mediator.did)
        await deferToThread(keys, a, "retire", "prekey", "--yes")
        await deferToThread(a.restart)
        await new.ping()
        await elsewhere.ping()
        self.assertIsNone(live.close_code)
        self.assertNotIn("have different DIDs", a.output() + b.output())
        await deferToThread(cluster.stop)

    async def pushes_to(self, sender: DIDCommWallet, live: Any) -> None:
        """A letter that is sealed for the DID that the sender knows arrives on this socket."""
        letter = wrap_in_forwards(
            self.sealed(live.wallet), live.wallet.did, [sender.mediator.did], sender.documents.resolve
        )
        self.assertEqual((await sender.post(letter)).status, 202)
        delivered = await live.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        self.assertEqual(read_marker(live.wallet, delivered), "sealed")

    def sealed(self, recipient: DIDCommWallet) -> bytes:
        """What only the recipient can open."""
        message = compose_message(BASIC_MESSAGE, {"content": "sealed"}, to=[recipient.did])
        return anoncrypt(message, recipient.identity.document)

    def database(self) -> str:
        """One of its own."""
        fresh = fresh_database()
        self.addCleanup(fresh.__exit__, None, None, None)
        return fresh.__enter__()

    def given(self, node: Daemon, source: Daemon, line: str) -> None:
        """Have a node read the file that another one has."""
        if node is not source:
            shutil.copy(source.directory / "keys.jwks", node.directory / "keys.jwks")
        reload(node, line)


del _Rotation
