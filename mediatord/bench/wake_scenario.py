"""What wake-ups cost: forwards to sleeping wallets with registered devices, beside the same without push."""

from __future__ import annotations

import os
import sqlite3
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from itertools import chain, islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from mediatord.bench.load_generator import Load, TargetServer
from mediatord.bench.measured_mediator import MeasuredMediator, StoredMessageCheck, count_stored_rows, open_mediator
from mediatord.bench.plan import BenchmarkPlan
from mediatord.bench.processes import (
    CoreAssignment,
    assign_cores,
    cpu_seconds,
    list_children,
    pin_to_cores,
    read_command,
    read_line,
    spawn_module,
)
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    Figures,
    ResultTable,
    format_size,
    safe_ratio,
    scenario,
)
from mediatord.bench.storage_and_log_scenarios import add_accounts
from mediatord.bench.wallet_group import build_inner_envelope
from mediatord.identity.key_file import load_keys
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.push.devices import DeviceSealer, FCMDevice
from mediatord.push.sender_process import SENDER_SUBCOMMAND
from mediatord.wallet.didcomm_messages import anoncrypt, build_forward

DEVICES = 100_000
WAKEUPS_PER_SECOND = 1_000
# Of these, as many forwards as a conversation has in the seconds before its recipient wakes up.
FORWARDS_PER_WAKEUP = 8
# More than are woken within `push.min_interval`, so that each is woken when its messages come.
_RECIPIENTS_SECONDS = 25
_WAKEUPS, _CPU_US, _OF_WITHOUT = "wake-ups/s", "us CPU", "x without push"
_SENDER_US = "us CPU of the sender"
_WITHOUT, _REGISTERED = "without push", "wallets without a device"
_WITH, _WITH_PROCESS = "push in the daemon", "push, sender_process"


@scenario(
    "Waking sleeping wallets",
    (PER_SECOND, PER_CPU_SECOND, _WAKEUPS, _CPU_US, _SENDER_US, _OF_WITHOUT, "p50 ms", "p99 ms"),
)
def measure_wakeups(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards at a fixed rate to accounts with a device each, several for each wake-up, to FCM over TLS."""
    cores, rate = assign_cores(), float(WAKEUPS_PER_SECOND * FORWARDS_PER_WAKEUP)
    contenders: dict[str, Contender] = {}
    with ExitStack() as stack:
        settings = stack.enter_context(_run_fcm(cores))
        for name, environment, devices in (
            (_WITHOUT, {}, 0),
            (_REGISTERED, settings, 0),
            (_WITH, settings, DEVICES),
            (_WITH_PROCESS, settings | {"MEDIATORD_PUSH__SENDER_PROCESS": "true"}, DEVICES),
        ):
            mediator = stack.enter_context(open_mediator(plan, cores, environment))
            load = _SleepingWallets(plan, mediator, table.failures, devices)
            for sender in load.list_senders():
                os.sched_setaffinity(sender, cores.clients)
            load.run(rate, plan.warm_up_seconds)
            contenders[name] = partial(load.run, rate, plan.seconds)
        results = table.compare(contenders, plan.rounds, "", {_OF_WITHOUT: (_WITHOUT, _CPU_US)})
    ratio = results.ratio(_WITH_PROCESS, _WITHOUT, _CPU_US)
    table.add_target(f"CPU per forward with {WAKEUPS_PER_SECOND} wake-ups/s, x without", 1.05, ratio, most=True)
    each = {name: _compute_wakeup_us(table, name) for name in (_WITH, _WITH_PROCESS)}
    table.notes = [
        f"{format_size(plan.sizes[0])}, {rate:.0f} forwards a second offered, {FORWARDS_PER_WAKEUP} for each account "
        f"in a row, about what the daemon accepts on one core; {DEVICES:,} accounts, with push {DEVICES:,} devices "
        "with FCM.",
        f"A wake-up costs the daemon {each[_WITH]:.0f} us of CPU time, all of it: looking it up, claiming it, the "
        f"request over TLS, and recording it. With push.sender_process it costs the daemon {each[_WITH_PROCESS]:.0f} "
        "us; the request is made by a process of its own, beside the clients; its CPU time per forward has a column, "
        f"and is in no other. {cores.note}",
        load.stored_check.note,
    ]


def _compute_wakeup_us(table: ResultTable, name: str) -> float:
    """CPU time of the daemon for one wake-up."""
    found = table.rows[name]
    more = found[_CPU_US] - table.rows[_WITHOUT][_CPU_US]
    return safe_ratio(more * found[PER_SECOND], found[_WAKEUPS])


@contextmanager
def _run_fcm(cores: CoreAssignment) -> Iterator[dict[str, str]]:
    """A push service that accepts everything; yields the settings of daemons that use it."""
    with TemporaryDirectory(prefix="mediatord-bench-") as place, ExitStack() as stack:
        certificate, credentials = Path(place) / "certificate.pem", Path(place) / "credentials.json"
        _write_certificate(certificate)
        with pin_to_cores(cores.clients):
            process = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "fcm", str(certificate)))
        url = f"https://127.0.0.1:{read_line(process)}"
        _write_credentials(credentials, url)
        yield {
            "SSL_CERT_FILE": str(certificate),
            "MEDIATORD_PUSH__FCM__CREDENTIALS": str(credentials),
            "MEDIATORD_PUSH__FCM__URL": url,
            "MEDIATORD_OUTBOUND__ALLOW_PRIVATE": '["127.0.0.0/8"]',
        }


class _SleepingWallets:
    """
    Accounts without a socket, and forwards to them.

    :param devices: number of the accounts that have a device.
    """

    def __init__(self, plan: BenchmarkPlan, mediator: MeasuredMediator, failures: list[str], devices: int) -> None:
        self._mediator = mediator
        self._connections = plan.clients
        group = mediator.enrol(1)
        mediator.restart(change=lambda database: _add_sleeping_accounts(database, mediator, devices))
        with closing(sqlite3.connect(mediator.database)) as connection:
            rows = connection.execute("SELECT did FROM account ORDER BY random()").fetchall()
        # The payloads are for nobody: no wallet reads them.
        inner = build_inner_envelope(group.wallets[0].identity, plan.sizes[0])
        recipients = islice((did for (did,) in rows), WAKEUPS_PER_SECOND * _RECIPIENTS_SECONDS)
        hop = group.hop
        forwards = (anoncrypt(build_forward(did, [inner], to=[hop.did]), hop.document) for did in recipients)
        self._bodies = list(chain.from_iterable(repeat(forward, FORWARDS_PER_WAKEUP) for forward in forwards))
        self._sent = 0
        self.stored_check = StoredMessageCheck(partial(count_stored_rows, mediator.database), failures)

    def run(self, rate: float, seconds: float) -> Figures:
        """Post, and count what was sent; a run goes on where the one before has ended."""
        server = TargetServer(f"{self._mediator.url}/didcomm", self._mediator.pid)
        before, sender_before = self._count_sent(), self._read_sender_seconds()
        number = round(rate * seconds)
        start, self._sent = self._sent, (self._sent + number) % len(self._bodies)
        bodies = (self._bodies * 2)[start : start + number]
        result = Load([server], bodies, self._connections, seconds, rate=rate, even=True).result()
        sender_seconds = self._read_sender_seconds() - sender_before
        # It is a child of the daemon, whose CPU time includes that of its children.
        result.cpu_seconds -= sender_seconds
        figures = self.stored_check.check(result)
        return figures | {
            _WAKEUPS: safe_ratio(self._count_sent() - before, result.seconds),
            _SENDER_US: 1e6 * safe_ratio(sender_seconds, result.accepted),
            _CPU_US: 1e6 * safe_ratio(result.cpu_seconds, result.accepted),
        }

    def list_senders(self) -> list[int]:
        """The process that makes requests, if the daemon has one."""
        return [pid for pid in list_children(self._mediator.pid) if SENDER_SUBCOMMAND in read_command(pid)]

    def _read_sender_seconds(self) -> float:
        return sum(map(cpu_seconds, self.list_senders()))

    def _count_sent(self) -> float:
        with urllib.request.urlopen(f"{self._mediator.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if _is_sent_series(line))


def _is_sent_series(line: str) -> bool:
    return line.startswith("mediator_push_requests_total{") and 'outcome="sent"' in line


def _add_sleeping_accounts(database: Path, mediator: MeasuredMediator, devices: int) -> None:
    """Add accounts to the database of a stopped daemon, and a device to the first of them."""
    add_accounts(database, DEVICES)
    keys = load_keys(mediator.require_daemon().directory / "keys.jwks")
    secrets = MediatorIdentity(keys, mediator.url).sealing_secrets
    sealer = DeviceSealer(lambda: secrets, os.urandom)
    with closing(sqlite3.connect(database)) as connection, connection:
        ids = connection.execute("SELECT id FROM account ORDER BY id LIMIT ?", [devices]).fetchall()
        sealed = (
            (device.id, owner, device.service, device.sealed)
            for (owner,) in ids
            for device in [sealer.seal(FCMDevice(f"token-{owner:0140d}", "android"))]
        )
        connection.executemany("INSERT INTO device (id, owner, service, sealed) VALUES (?, ?, ?, ?)", sealed)


def _write_certificate(path: Path) -> None:
    """A self-signed certificate for loopback, with its key."""
    key = rsa.generate_private_key(65_537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + certificate.public_bytes(Encoding.PEM))


def _write_credentials(path: Path, url: str) -> None:
    """The key file of a service account."""
    key = rsa.generate_private_key(65_537, 2048)
    content = {
        "type": "service_account",
        "project_id": "bench",
        "private_key_id": "1",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        "client_email": "bench@bench.iam.gserviceaccount.com",
        "token_uri": f"{url}/token",
    }
    path.touch(0o600)
    path.write_bytes(orjson.dumps(content))
