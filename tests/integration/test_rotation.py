"""New keys, limits and certificates for a running daemon: existing wallets and sockets keep working (SIGHUP)."""

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
from tests.integration.test_lifecycle import DaemonTestCase, send_request
from tests.integration.test_workers import MAX_SOCKETS, await_workers, pid_of
from tests.mongod import fresh_database, shared_replica_set

reactor: Any = _reactor

POLL_SECONDS = 0.05


def wait_for(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    """
    Poll a condition.

    :raise AssertionError: it does not become true in time.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(POLL_SECONDS)


def read_did(daemon: Daemon) -> str:
    """The DID served by any process."""
    return send_request(daemon.port, "GET", "/did")[2].decode()


def run_keys(daemon: Daemon, *arguments: str) -> None:
    """Run `mediatord keys`."""
    assert _run_command(["keys", *arguments, "--config", str(daemon.config)]) == 0


def reload(daemon: Daemon, line: str) -> None:
    """Send SIGHUP and wait for this line once more."""
    count_before = daemon.output().count(line)
    os.kill(daemon.pid, signal.SIGHUP)
    wait_for(lambda: daemon.output().count(line) > count_before, daemon.output)


def rotate_keys(daemon: Daemon) -> str:
    """Rotate and reload; return the DID once every process serves it."""
    former_did = read_did(daemon)
    run_keys(daemon, "rotate")
    os.kill(daemon.pid, signal.SIGHUP)
    wait_for(lambda: all(read_did(daemon) != former_did for _ in range(MAX_SOCKETS)), daemon.output)
    return read_did(daemon)


def mediator_by_web_did(daemon: Daemon) -> DIDCommMediator:
    """The mediator as its did:web describes it now."""
    document = encoding.loads_object(send_request(daemon.port, "GET", "/.well-known/did.json")[2])
    return DIDCommMediator.from_document(parse_did_document(document["id"], document))


class RotationTestCase(DaemonTestCase):
    """Tests for one process and for several."""

    settings: dict[str, Any] = {}

    def start_all_workers(self) -> Daemon:
        """A daemon whose processes all serve."""
        daemon = self.start_daemon(self.settings)
        if self.settings:
            await_workers(daemon, self.settings["workers"])
        return daemon

    async def assert_pushed(self, sender: DIDCommWallet, socket: Any, marker: str) -> None:
        """A message sent with the mediator's DID that this wallet knows is pushed to the other's socket."""
        (forward,) = prepare_forwards(socket.wallet, marker, 1)
        self.assertEqual((await sender.post(forward.body)).status, 202)
        delivered = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        self.assertEqual(read_marker(socket.wallet, delivered), forward.marker)
        await socket.acknowledge([delivered])


class _RotationTests(RotationTestCase):
    async def test_open_sockets_survive_rotation(self) -> None:
        """
        A DIDComm and a Decentrl socket keep receiving over two rotations, while wallets use the DIDs that they know,
        and a new wallet gets the new one.
        """
        daemon = self.start_all_workers()
        first = read_did(daemon)
        first_wallet = await enrol_wallet(daemon, reactor)
        socket = await self.open_socket(first_wallet)
        await socket.live()
        alice, bob = await deferToThread(self.register_identities, daemon)
        decentrl_socket = await deferToThread(bob.open_socket)
        self.addCleanup(decentrl_socket.close)
        wallets, dids = [first_wallet], [first]
        for round_number in range(2):
            # Started now, as it answers pings: a socket that does not for half a minute is closed.
            push = deferToThread(decentrl_socket.receive)
            dids.append(await deferToThread(rotate_keys, daemon))
            new_wallet = await enrol_wallet(daemon, reactor)
            wallets.append(new_wallet)
            self.assertEqual(new_wallet.mediator.did, dids[-1])
            for wallet in wallets:
                await self.assert_pushed(wallet, socket, f"turn {round_number}")
                await wallet.ping()  # answered by the addressed DID, as the wallet checks
                self.assertEqual(await wallet.grant(), (dids[-1],))
            self.assertEqual((await deferToThread(alice.send_event, bob)).status, 200)
            self.assertEqual((await push)["type"], "PENDING_EVENTS")
        self.assertEqual(len(set(dids)), 3)
        self.assertIsNone(socket.close_code)
        document = encoding.loads_object((await deferToThread(send_request, daemon.port, "GET", "/"))[2])
        self.assertEqual(document["alsoKnownAs"], dids[::-1])
        self.assertIn(
            dids[-1],
            encoding.loads_object((await deferToThread(send_request, daemon.port, "GET", "/invitation"))[2])["from"],
        )
        await self.stop(daemon)

    def register_identities(self, daemon: Daemon) -> tuple[RawDecentrlClient, RawDecentrlClient]:
        """Two identities that may send to each other."""
        daemon_client = DaemonClient(daemon)
        alice, bob = RawDecentrlClient(daemon_client, "alice"), RawDecentrlClient(daemon_client, "bob")
        for identity in (alice, bob):
            identity.register()
        bob.permit_sender(alice)
        return alice, bob


def common_name(connection: ssl.SSLSocket) -> str:
    """Common name of the server's certificate."""
    certificate: Any = connection.getpeercert()
    return str(dict(pair for (pair,) in certificate["subject"])["commonName"])


def health_over(connection: ssl.SSLSocket) -> int:
    """Status of `GET /health` on a persistent connection."""
    http = HTTPConnection("localhost")
    http.sock = connection
    http.request("GET", "/health")
    response = http.getresponse()
    response.read()
    return response.status


class OneProcessTests(_RotationTests):
    """A daemon without workers, of which `tests/app/test_reloaded_settings.py` tests the rest."""


class WorkersTests(_RotationTests):
    """A daemon of two workers."""

    settings = {"workers": 2, "node": "n"}

    async def test_former_web_keys_stay_valid(self) -> None:
        """
        Messages for the former `#prekey` are decrypted and answered with that key, registrations too. Contracts
        signed by the mediator stay valid.
        """
        daemon = self.start_all_workers()
        daemon_client = await deferToThread(DaemonClient, daemon)
        old = await deferToThread(mediator_by_web_did, daemon)
        wallet = DIDCommWallet.generate(old, open_http(reactor), reactor)
        await wallet.enrol()
        carol, dave = RawDecentrlClient(daemon_client, "carol"), RawDecentrlClient(daemon_client, "dave")
        signed = await deferToThread(dave.register)
        await deferToThread(rotate_keys, daemon)
        new = await deferToThread(mediator_by_web_did, daemon)
        self.assertEqual(old.did, new.did)
        self.assertNotEqual(old.document.key_agreement[0], new.document.key_agreement[0])
        for _ in range(4):  # any process may answer
            await wallet.ping()
        self.assertEqual(await wallet.grant(), (old.did,))
        fresh = DIDCommWallet.generate(new, open_http(reactor), reactor)
        self.assertEqual(await fresh.enrol(), (old.did,))
        await deferToThread(carol.register)
        # Signed by the mediator with a former key.
        self.assertEqual((await deferToThread(dave.save_contract, signed)).status, 200)
        await self.stop(daemon)

    async def test_retired_did_is_refused(self) -> None:
        """It is named as no longer accepted; everything else keeps working."""
        daemon = self.start_all_workers()
        old = await enrol_wallet(daemon, reactor)
        live = await self.open_socket(old)
        await live.live()
        await deferToThread(rotate_keys, daemon)
        new = await enrol_wallet(daemon, reactor)
        await deferToThread(run_keys, daemon, "retire", "prekey", "--yes")
        await deferToThread(reload, daemon, f"DIDs no longer accepted: {old.mediator.did[:60]}")
        await deferToThread(wait_for, lambda: self.all_processes_refuse(daemon, old), daemon.output)
        await new.ping()
        self.assertIsNone(live.close_code)
        await self.stop(daemon)

    def all_processes_refuse(self, daemon: Daemon, wallet: DIDCommWallet) -> bool:
        """Whether no process decrypts messages for the DID that this wallet knows."""
        (message_envelope,) = prepare_forwards(wallet, "late", 1)
        return all(
            send_request(daemon.port, "POST", "/didcomm", message_envelope.body)[0] == 400 for _ in range(MAX_SOCKETS)
        )

    def test_unusable_files_change_nothing(self) -> None:
        """One line each; the next reload applies valid files."""
        daemon = self.start_all_workers()
        did, path = read_did(daemon), daemon.directory / "keys.jwks"
        valid_text, text = path.read_bytes(), daemon.config.read_text("utf-8")
        rejected_line = "configuration rejected, keeping the previous settings: "
        path.write_bytes(valid_text[:100])
        reload(daemon, f"{rejected_line}{path} is not a private key set")
        path.write_bytes(valid_text)
        path.chmod(0o644)
        reload(daemon, f"{rejected_line}{path} is accessible to other users (mode 0644); run: chmod 600 {path}")
        path.unlink()
        create_keys(path)
        reload(daemon, f"{rejected_line}{path} has none of the keys in use; restart to change the identity")
        path.write_bytes(valid_text)
        daemon.config.write_text(
            yaml.safe_dump(merge_settings(yaml.safe_load(text), {"log": {"level": "loud"}})), "utf-8"
        )
        reload(daemon, f"{rejected_line}{daemon.config}:")
        self.assertEqual({read_did(daemon) for _ in range(MAX_SOCKETS)}, {did})
        # Workers apply it a little later than it is logged.
        wait_for(
            lambda: b"mediator_config_last_reload_success 0.0" in send_request(daemon.port, "GET", "/metrics")[2],
            daemon.output,
        )
        daemon.config.write_text(text, "utf-8")
        reload(daemon, "configuration reloaded")
        wait_for(
            lambda: b"mediator_config_last_reload_success 1.0" in send_request(daemon.port, "GET", "/metrics")[2],
            daemon.output,
        )
        daemon.stop()

    def test_new_limits_apply_at_once(self) -> None:
        """To open sockets and connections as well."""
        daemon = self.start_all_workers()
        large = b'{"protected":"' + b"x" * 20_000 + b'"}'
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", large)[0], 400)
        values = daemon.configuration()
        limits = {"max_message_bytes": 10_000, "did_per_minute": 5}
        daemon.config.write_text(yaml.safe_dump(merge_settings(values, {"limits": limits})), "utf-8")
        os.kill(daemon.pid, signal.SIGHUP)
        wait_for(
            lambda: all(send_request(daemon.port, "POST", "/didcomm", large)[0] == 413 for _ in range(MAX_SOCKETS)),
            daemon.output,
        )
        self.assertNotIn("restart to apply", daemon.output())
        daemon.config.write_text(yaml.safe_dump(values), "utf-8")
        os.kill(daemon.pid, signal.SIGHUP)
        wait_for(
            lambda: all(send_request(daemon.port, "POST", "/didcomm", large)[0] == 400 for _ in range(MAX_SOCKETS)),
            daemon.output,
        )
        daemon.stop()

    def test_new_certificate_applies_to_new_connections(self) -> None:
        """One that cannot be read changes nothing."""
        directory = Path(tempfile.mkdtemp(prefix="mediatord-rotation-"))
        self.addCleanup(shutil.rmtree, directory)
        authority, port = CertificateAuthority(directory), find_free_port()
        first_certificate = authority.issue("first", ["127.0.0.1"])
        certificate_file = directory / "used.pem"
        shutil.copy(first_certificate, certificate_file)
        daemon = prepare_daemon(self.settings)
        self.addCleanup(daemon.clean)
        endpoint = f"ssl:{port}:interface=127.0.0.1:privateKey={certificate_file}:certKey={certificate_file}"
        listen = {"listen": [f"tcp:{daemon.port}:interface=127.0.0.1", endpoint]}
        daemon.config.write_text(yaml.safe_dump(merge_settings(daemon.configuration(), listen)), "utf-8")
        daemon.start()
        context = ssl.create_default_context(cafile=authority.path)
        with self.open_tls_connection(context, port) as before:
            self.assertEqual(common_name(before), "first")
            self.assertEqual(health_over(before), 200)
            shutil.copy(authority.issue("second", ["127.0.0.1"]), certificate_file)
            reload(daemon, f"certificate of 127.0.0.1:{port} renewed, valid until ")
            wait_for(
                lambda: all(self.certificate_name(context, port) == "second" for _ in range(MAX_SOCKETS)),
                daemon.output,
            )
            self.assertEqual(health_over(before), 200)
            certificate_file.write_text("-----BEGIN CERTIFICATE-----\n")
            reload(daemon, f"keeping the current certificate of 127.0.0.1:{port}: cannot use its key or certificate")
            self.assertEqual({self.certificate_name(context, port) for _ in range(MAX_SOCKETS)}, {"second"})
            certificate_file.unlink()
            reload(
                daemon,
                f"keeping the current certificate of 127.0.0.1:{port}: {certificate_file}: No such file or directory",
            )
            wait_for(
                lambda: b"mediator_config_last_reload_success 0.0" in send_request(daemon.port, "GET", "/metrics")[2],
                daemon.output,
            )
            self.assertEqual(health_over(before), 200)
        expiry = b'mediator_certificate_expiry_timestamp_seconds{listener="127.0.0.1:%d"}' % port
        wait_for(lambda: expiry in send_request(daemon.port, "GET", "/metrics")[2], daemon.output)
        daemon.stop()

    def open_tls_connection(self, context: ssl.SSLContext, port: int) -> ssl.SSLSocket:
        """A TLS connection."""
        raw = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        return context.wrap_socket(raw, server_hostname="127.0.0.1")

    def certificate_name(self, context: ssl.SSLContext, port: int) -> str:
        """Common name of the certificate of a new connection."""
        with self.open_tls_connection(context, port) as connection:
            return common_name(connection)

    def test_replacement_worker_uses_the_same_keys(self) -> None:
        """Neither the keys at start, nor those that were not reloaded yet."""
        daemon = self.start_all_workers()
        new = rotate_keys(daemon)
        run_keys(daemon, "rotate")
        os.kill(pid_of(daemon, "n-1"), signal.SIGKILL)
        daemon.await_output("was killed by SIGKILL")
        await_workers(daemon, 2)
        self.assertEqual({read_did(daemon) for _ in range(MAX_SOCKETS)}, {new})
        daemon.stop()


class ClusterTests(RotationTestCase):
    """Nodes whose key files are replaced one after the other."""

    async def test_rollout_in_two_rounds_refuses_no_did(self) -> None:
        """
        No node publishes a DID that another cannot decrypt, and none is refused because a node has not reloaded,
        neither after rotating nor after retiring.
        """
        cluster = DaemonCluster(shared_replica_set().uri(self.make_database()), ("a", "b"))
        self.addCleanup(cluster.clean)
        await deferToThread(cluster.start)
        a, b = cluster.nodes
        first_wallet = await enrol_wallet(a, reactor)
        socket = await self.open_socket(wallet_at_node(first_wallet, b.port, reactor))
        await socket.live()
        await deferToThread(run_keys, a, "rotate", "--prepare")
        for node in (a, b):
            await deferToThread(self.copy_keys, node, a, "accepted, but not yet published")
        self.assertEqual({read_did(a), read_did(b)}, {first_wallet.mediator.did})
        await deferToThread(run_keys, a, "rotate")
        await deferToThread(self.copy_keys, a, a, "current DID: ")
        new = DIDCommWallet.generate(await discover_mediator(open_http(reactor), a.url), open_http(reactor), reactor)
        self.assertNotEqual(new.mediator.did, first_wallet.mediator.did)
        self.assertEqual(await deferToThread(read_did, b), first_wallet.mediator.did)
        wallet_at_b = wallet_at_node(new, b.port, reactor)
        await wallet_at_b.enrol()
        await self.assert_pushed_to(wallet_at_b, socket)
        await deferToThread(a.restart)
        await deferToThread(self.copy_keys, b, a, "current DID: ")
        self.assertEqual(await deferToThread(read_did, b), new.mediator.did)
        await deferToThread(run_keys, a, "retire", "prekey", "--yes")
        await deferToThread(a.restart)
        await new.ping()
        await wallet_at_b.ping()
        self.assertIsNone(socket.close_code)
        self.assertNotIn("have different DIDs", a.output() + b.output())
        await deferToThread(cluster.stop)

    async def assert_pushed_to(self, sender: DIDCommWallet, socket: Any) -> None:
        """A message encrypted for the DID that the sender knows is pushed to this socket."""
        message_envelope = wrap_in_forwards(
            self.encrypt_for(socket.wallet), socket.wallet.did, [sender.mediator.did], sender.documents.resolve
        )
        self.assertEqual((await sender.post(message_envelope)).status, 202)
        delivered = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        self.assertEqual(read_marker(socket.wallet, delivered), "sealed")

    def encrypt_for(self, recipient: DIDCommWallet) -> bytes:
        """A message for the recipient."""
        message = compose_message(BASIC_MESSAGE, {"content": "sealed"}, to=[recipient.did])
        return anoncrypt(message, recipient.identity.document)

    def make_database(self) -> str:
        """A database of its own."""
        context = fresh_database()
        self.addCleanup(context.__exit__, None, None, None)
        return context.__enter__()

    def copy_keys(self, node: Daemon, source: Daemon, line: str) -> None:
        """Give a node the key file of another one, and reload."""
        if node is not source:
            shutil.copy(source.directory / "keys.jwks", node.directory / "keys.jwks")
        reload(node, line)


del _RotationTests
