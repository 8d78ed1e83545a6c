"""
Scenarios of forwards: opening envelopes in this process, and posting forwards to a mediator.

The baseline `g` is the rate of X25519 key agreements of one core, by OpenSSL's own benchmark. Opening an envelope
takes one, in any implementation, so figures in units of g can be compared between machines.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from jwcrypto.jwe import JWE
from jwcrypto.jwk import JWK
from nacl import bindings

from mediatord.bench.didcomm_wallets import WalletGroup, build_forwards, build_inner_envelope
from mediatord.bench.load_generator import TargetServer, post_at_rate, post_for_seconds, read_bodies
from mediatord.bench.mediator_under_test import (
    ForwardLoad,
    StoredMessageCheck,
    open_temporary_directory,
    prepare_mediator,
)
from mediatord.bench.processes import assign_cores, pin_to_cores, read_line, spawn_module
from mediatord.bench.scenario import (
    CLIENT_US,
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    PER_CPU_SECOND,
    PER_SECOND,
    RECIPIENTS,
    WARM_UP_SHARE,
    BenchmarkPlan,
    Contender,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    format_size,
    latency_figures,
    run_interleaved,
    safe_ratio,
)
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.forward import FastForwardParser, read_next, read_payloads
from mediatord.protocol.didcomm.keys import PublicKey
from mediatord.protocol.didcomm.message import parse_message
from mediatord.protocol.encoding import decode_base64url
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey
from mediatord.wallet.temporary_daemon import run_temporary_daemon

_OPENSSL_ALGORITHM = "ecdhx25519"
_OF_G = "of g"


class KeyAgreementBaseline:
    """Measures g, by `openssl speed`, or through `cryptography` where that program is missing."""

    def __init__(self) -> None:
        self._program = shutil.which("openssl")
        self.name = f"openssl speed {_OPENSSL_ALGORITHM}" if self._program else "X25519 through cryptography"

    def run(self) -> Figures:
        """
        Measure for one second.

        :raise RuntimeError: openssl failed.
        """
        if self._program is None:
            return {PER_CPU_SECOND: _measure_cryptography_rate()}
        command = [self._program, "speed", "-mr", "-seconds", "1", _OPENSSL_ALGORITHM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
        return {PER_CPU_SECOND: parse_openssl_rate(done.stdout)}


def parse_openssl_rate(output: str) -> float:
    """
    Operations per second in the output of `openssl speed -mr`.

    :raise RuntimeError: there is no such line.
    """
    line = next((line for line in output.splitlines() if line.startswith("+F5:")), "")
    try:
        return float(line.split(":")[3])
    except (IndexError, ValueError):
        raise RuntimeError(f"openssl speed {_OPENSSL_ALGORITHM} gave no rate") from None


def _measure_cryptography_rate() -> float:
    key, peer = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
    start, done = process_time(), 0
    while (spent := process_time() - start) < 1.0:
        for _ in range(200):
            key.exchange(X25519PublicKey.from_public_bytes(peer))
        done += 200
    return done / spent


# Goals by size in bytes: the longer a message is, the larger the share of time in the same ciphers.
_JWCRYPTO_GOALS_BY_SIZE = {1024: 3.3}
_JWCRYPTO_GOAL = 3.0
_OPENING_OF_G_GOAL = 0.40
_SMALL_MESSAGE_BYTES = 1024

_OF_JWCRYPTO = "x jwcrypto"
_OPENED_ROW, _JWCRYPTO_ROW = "mediatord", "jwcrypto"
_FAST_FORWARD_ROW, _JWCRYPTO_FORWARD_ROW = "mediatord, fast path", "jwcrypto and json, forward read"
_GENERAL_FORWARD_ROW = "mediatord, general path"
_AUTHCRYPT_ROW = "mediatord, authcrypt opened"
_SEALED_ROW, _JWCRYPTO_SEALED_ROW = "mediatord, authcrypt sealed", "jwcrypto, anoncrypt sealed"
# jwcrypto has no ECDH-1PU: an authcrypt is compared with its anoncrypt, which takes one key agreement less.
_COMPARED_WITH = {
    _FAST_FORWARD_ROW: _JWCRYPTO_FORWARD_ROW,
    _GENERAL_FORWARD_ROW: _JWCRYPTO_FORWARD_ROW,
    _JWCRYPTO_FORWARD_ROW: _JWCRYPTO_FORWARD_ROW,
    _SEALED_ROW: _JWCRYPTO_SEALED_ROW,
    _JWCRYPTO_SEALED_ROW: _JWCRYPTO_SEALED_ROW,
}
# Rounds are short and many because nothing has to warm up: other load then disturbs all contenders alike.
_MESSAGES_PER_ROUND = 60
_ROUNDS_PER_SECOND = 5
# Concat KDF (reference 1.4): counter, algorithm, empty apu, length of the apv that follows; key length after it.
_KDF_PREFIX = b"\0\0\0\1" + b"\0\0\0\x0eECDH-ES+A256KW" + b"\0\0\0\0" + b"\0\0\0\x20"
_KDF_KEY_BITS = b"\0\0\1\0"

Item = TypeVar("Item")


def measure_envelopes(plan: BenchmarkPlan) -> ResultTable:
    """Opening and sealing in this process: mediatord, jwcrypto, and the bare cryptography, per second of CPU time."""
    identity = WalletIdentity.generate(endpoint="http://127.0.0.1/didcomm")
    mediator = DIDCommMediator.from_document(identity.document)
    wallets = tuple(WalletIdentity.generate(endpoint=mediator.did) for _ in range(_MESSAGES_PER_ROUND))
    group = WalletGroup(mediator, wallets)
    rows: dict[str, Figures] = {}
    targets = []
    agreement = KeyAgreementBaseline()
    for size in plan.sizes:
        name, baseline = format_size(size), agreement.run()[PER_CPU_SECOND]
        rounds = _compare_openers(identity.agreement, group, size, plan)
        for contender in rounds.found:
            figures = rounds.medians(contender)
            other = _COMPARED_WITH.get(contender, _JWCRYPTO_ROW)
            figures[_OF_JWCRYPTO] = rounds.ratio(contender, other, PER_CPU_SECOND)
            figures[_OF_G] = safe_ratio(figures[PER_CPU_SECOND], baseline)
            rows[f"{name}  {contender}"] = figures
        fast = rows[f"{name}  {_FAST_FORWARD_ROW}"]
        goal = _JWCRYPTO_GOALS_BY_SIZE.get(size, _JWCRYPTO_GOAL)
        targets.append(PerformanceTarget(f"fast path {name}, x jwcrypto", goal, fast[_OF_JWCRYPTO]))
        if size <= _SMALL_MESSAGE_BYTES:
            targets.append(PerformanceTarget(f"fast path {name}, of g", _OPENING_OF_G_GOAL, fast[_OF_G]))
    notes = (f"g: {agreement.name}, measured for a second before each size.",)
    columns = (PER_CPU_SECOND, _OF_JWCRYPTO, _OF_G)
    return ResultTable("Opening an envelope", columns, rows, tuple(targets), notes)


def _compare_openers(key: WalletKey, group: WalletGroup, size: int, plan: BenchmarkPlan) -> InterleavedResults:
    envelopes = build_forwards(group, size, _MESSAGES_PER_ROUND)
    public = key.private.public
    jwk, public_jwk = JWK(**key.private.jwk()), JWK(**public.jwk())
    parser = FastForwardParser(lambda kid: (key.private,) if kid == key.kid else ())
    plaintexts = [_open_envelope(raw, key) for raw in envelopes]
    senders = [wallet.agreement for wallet in group.wallets]
    to_senders = list(zip(plaintexts, senders, strict=True))
    authcrypts = [
        (jwe.encrypt_authcrypt(text, (sender.kid, sender.private), [(key.kid, public)]), sender.private.public)
        for text, sender in to_senders
    ]

    def read_forward(raw: bytes) -> tuple[str, bytes]:
        message = parse_message(_open_envelope(raw, key))
        return read_next(message), read_payloads(message)[0][0]

    def open_by_jwcrypto(raw: bytes) -> bytes:
        token = JWE()
        token.deserialize(raw.decode("ascii"), jwk)
        payload: bytes = token.payload
        return payload

    def read_by_jwcrypto(raw: bytes) -> tuple[str, bytes]:
        message = json.loads(open_by_jwcrypto(raw))
        payload = json.dumps(message["attachments"][0]["data"]["json"], separators=(",", ":"))
        return message["body"]["next"], payload.encode()

    def seal(item: tuple[bytes, WalletKey]) -> bytes:
        text, to = item
        return jwe.encrypt_authcrypt(text, (key.kid, key.private), [(to.kid, to.private.public)])

    def seal_by_jwcrypto(plaintext: bytes) -> str:
        token = JWE(plaintext, json.dumps({"alg": "ECDH-ES+A256KW", "enc": "A256CBC-HS512"}))
        token.add_recipient(public_jwk, json.dumps({"kid": key.kid}))
        sealed: str = token.serialize()
        return sealed

    parts = [_EnvelopeParts.from_envelope(raw) for raw in envelopes]
    return run_interleaved(
        {
            _OPENED_ROW: _cpu_time_contender(lambda raw: _open_envelope(raw, key), envelopes),
            _JWCRYPTO_ROW: _cpu_time_contender(open_by_jwcrypto, envelopes),
            "bare cryptography": _cpu_time_contender(lambda one: one.open(key.private.secret), parts),
            _FAST_FORWARD_ROW: _cpu_time_contender(parser.read, envelopes),
            _GENERAL_FORWARD_ROW: _cpu_time_contender(read_forward, envelopes),
            _JWCRYPTO_FORWARD_ROW: _cpu_time_contender(read_by_jwcrypto, envelopes),
            _AUTHCRYPT_ROW: _cpu_time_contender(lambda one: _open_envelope(one[0], key, one[1]), authcrypts),
            _SEALED_ROW: _cpu_time_contender(seal, to_senders),
            _JWCRYPTO_SEALED_ROW: _cpu_time_contender(seal_by_jwcrypto, plaintexts),
        },
        max(1, round(plan.rounds * plan.seconds * _ROUNDS_PER_SECOND)),
    )


def _cpu_time_contender(work: Callable[[Item], object], items: Sequence[Item]) -> Contender:
    def run() -> Figures:
        start = process_time()
        for item in items:
            work(item)
        return {PER_CPU_SECOND: len(items) / (process_time() - start)}

    return run


def _open_envelope(raw: bytes, key: WalletKey, sender: PublicKey | None = None) -> bytes:
    return jwe.decrypt_envelope(jwe.parse_envelope(raw), key.kid, key.private, sender)


@dataclass(frozen=True, slots=True)
class _EnvelopeParts:
    """A decoded envelope, of which only the cryptography is left to do."""

    ephemeral: bytes
    apv: bytes
    wrapped: bytes = field(repr=False)
    iv: bytes
    data: bytes = field(repr=False)
    mac_input: bytes = field(repr=False)
    tag: bytes

    @classmethod
    def from_envelope(cls, raw: bytes) -> _EnvelopeParts:
        """Decode an anoncrypt."""
        value = json.loads(raw)
        header = json.loads(decode_base64url(value["protected"]))
        aad = value["protected"].encode()
        iv, data, tag = (decode_base64url(value[name]) for name in ("iv", "ciphertext", "tag"))
        wrapped = decode_base64url(value["recipients"][0]["encrypted_key"])
        mac_input = aad + iv + data + (8 * len(aad)).to_bytes(8, "big")
        epk = PublicKey.from_jwk(header["epk"]).raw
        return cls(epk, decode_base64url(header["apv"]), wrapped, iv, data, mac_input, tag)

    def open(self, secret: bytes) -> bytes:
        """ECDH-ES on X25519, AES key wrap, A256CBC-HS512."""
        shared = bindings.crypto_scalarmult(secret, self.ephemeral)
        kek = hashlib.sha256(_KDF_PREFIX[:4] + shared + _KDF_PREFIX[4:] + self.apv + _KDF_KEY_BITS).digest()
        cek = aes_key_unwrap(kek, self.wrapped)
        if not hmac.compare_digest(hmac.digest(cek[:32], self.mac_input, "sha512")[:32], self.tag):
            raise ValueError("not authentic")
        cipher = Cipher(AES(cek[32:]), CBC(self.iv)).decryptor()
        padded = cipher.update(self.data) + cipher.finalize()
        return padded[: -padded[-1]]


_BARE_SCHEMA = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, recipient TEXT NOT NULL, payload BLOB NOT NULL,
    received_at REAL NOT NULL, expires_at REAL NOT NULL
) STRICT;
CREATE INDEX waiting ON message (recipient, seq);
"""
_BARE_INSERT = "INSERT INTO message (id, recipient, payload, received_at, expires_at) VALUES (?, ?, ?, ?, ?)"


@contextmanager
def _open_bare_sqlite(payloads: list[tuple[str, bytes]], batch: int, seconds: float) -> Iterator[Contender]:
    """
    The baseline of durability: inserts rows like the daemon's into a database, one transaction a batch.

    :param payloads: recipient DIDs and envelopes, repeated.
    :param batch: rows in a transaction.
    """
    ids, rows = iter(range(1 << 62)), cycle(payloads)

    def insert_batch(connection: sqlite3.Connection) -> float:
        start = perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        values: Iterator[tuple[Any, ...]] = (
            (f"{next(ids):032x}", recipient, payload, 1.8e9, 1.8e9 + 259_200)
            for recipient, payload in islice(rows, batch)
        )
        connection.executemany(_BARE_INSERT, values)
        connection.execute("COMMIT")
        return (perf_counter() - start) * 1e6

    with ExitStack() as stack:
        path = open_temporary_directory(stack) / "bare.sqlite3"
        connection = stack.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
        connection.executescript(_BARE_SCHEMA)

        def run() -> Figures:
            start, start_cpu, latencies_us = perf_counter(), process_time(), list[float]()
            while perf_counter() - start < seconds:
                latencies_us.append(insert_batch(connection))
            done = batch * len(latencies_us)
            rates = {
                PER_SECOND: done / (perf_counter() - start),
                PER_CPU_SECOND: done / (process_time() - start_cpu),
            }
            return rates | latency_figures(latencies_us)

        yield run


_FORWARD_OF_G_GOAL = 0.22
_OF_SITE_PER_CPU, _OF_SITE = "x stock Site per CPU-s", "x stock Site"
_DURABLE_ROW, _SITE_ROW, _BARE_SQLITE_ROW = "mediatord, durable", "stock Site, empty 202", "SQLite alone, grouped"
# With few clients, few messages share a commit.
_FEW_CONNECTIONS = 32
_FORWARD_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _OF_G, _OF_SITE_PER_CPU)


def measure_forwards(plan: BenchmarkPlan) -> ResultTable:
    """Durable forwards to offline recipients beside three baselines: g, an empty Twisted site, and SQLite alone."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    lengths: list[str] = []
    cores, agreement = assign_cores(), KeyAgreementBaseline()

    def pinned(contender: Contender) -> Contender:
        def run() -> Figures:
            with pin_to_cores(cores.server):
                return contender()

        return run

    with ExitStack() as stack:
        place = open_temporary_directory(stack)
        with pin_to_cores(cores.server):
            daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
            site = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "empty"))
        stack.enter_context(pin_to_cores(cores.clients))
        # Most wallets have long DIDs, which name their mediator; one row shows what they cost.
        short, long = (ForwardLoad(daemon, place / "bodies", short=short) for short in (True, False))
        long.stored_check = short.stored_check
        stock = TargetServer(site.pid, int(read_line(site)), short.server.path)
        kinds = [(format_size(size), size, short) for size in plan.sizes]
        kinds.insert(1, (f"{kinds[0][0]}, long DIDs", plan.sizes[0], long))
        for name, size, load in kinds:
            load.prepare(size)
            payloads = [(wallet.did, build_inner_envelope(wallet, size)) for wallet in load.group.wallets]
            lengths.append(f"{name} {max(map(len, read_bodies(load.bodies)))}")
            with _open_bare_sqlite(payloads, plan.clients, plan.seconds / 2) as bare:
                load.post(plan.clients, plan.seconds * WARM_UP_SHARE)
                contenders: dict[str, Contender] = {
                    _DURABLE_ROW: partial(load.post, plan.clients, plan.seconds),
                    f"mediatord, {_FEW_CONNECTIONS} connections": partial(load.post, _FEW_CONNECTIONS, plan.seconds),
                    agreement.name: pinned(agreement.run),
                    _SITE_ROW: lambda: post_for_seconds(stock, short.bodies, plan.clients, plan.seconds).figures(),
                    _BARE_SQLITE_ROW: pinned(bare),
                }
                rounds = run_interleaved(contenders, plan.rounds)
            for contender in rounds.found:
                rows[f"{name}  {contender}"] = rounds.medians(contender) | {
                    _OF_G: rounds.ratio(contender, agreement.name, PER_CPU_SECOND),
                    _OF_SITE_PER_CPU: rounds.ratio(contender, _SITE_ROW, PER_CPU_SECOND),
                }
            if not targets:
                measured = rows[f"{name}  {_DURABLE_ROW}"][_OF_G]
                targets.append(PerformanceTarget(f"durable forwards {name}, of g", _FORWARD_OF_G_GOAL, measured))
    notes = (
        f"{plan.clients} connections, one daemon process; SQLite alone commits {plan.clients} rows at a time, "
        "and its latencies are those of a commit.",
        f"g is {agreement.name} in the same round, by CPU time like the daemon's. {cores.note}",
        f"Bytes posted: {', '.join(lengths)}.",
        short.stored_check.note,
    )
    failures = tuple(short.stored_check.failures)
    return ResultTable("Forwards, durable before the answer", _FORWARD_COLUMNS, rows, tuple(targets), notes, failures)


_TARGET_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", CLIENT_US, _OF_G, _OF_SITE)


def measure_target_forwards(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to the plan's target, to wallets with short DIDs, beside g and an empty Twisted site."""
    rows: dict[str, Figures] = {}
    notes: list[str] = []
    failures: list[str] = []
    agreement = KeyAgreementBaseline()
    with prepare_mediator(plan) as mediator:
        for size in plan.sizes:
            with ExitStack() as stack:
                wallets = stack.enter_context(mediator.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES))
                site = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "empty"))
                stock = TargetServer(site.pid, int(read_line(site)), "/didcomm")
                check = mediator.make_stored_check(wallets)
                check.check(mediator.post(wallets.bodies, plan.clients, plan.seconds * WARM_UP_SHARE))
                bodies = wallets.bodies

                def post_to_target(check: StoredMessageCheck = check, bodies: Path = bodies) -> Figures:
                    return check.check(mediator.post(bodies, plan.clients, plan.seconds))

                def post_to_site(stock: TargetServer = stock, bodies: Path = bodies) -> Figures:
                    return post_for_seconds(stock, bodies, plan.clients, plan.seconds).figures()

                contenders = {"target": post_to_target, agreement.name: agreement.run, _SITE_ROW: post_to_site}
                rounds = run_interleaved(contenders, plan.rounds)
            for name in rounds.found:
                figures = rounds.medians(name)
                if name != agreement.name:
                    figures[_OF_SITE] = rounds.ratio(name, _SITE_ROW, PER_SECOND)
                if name != "target" or mediator.pid:
                    figures[_OF_G] = rounds.ratio(name, agreement.name, PER_CPU_SECOND)
                rows[f"{format_size(size)}  {name}"] = figures
            notes.append(check.note)
            failures += check.failures
    unknown = "" if mediator.pid else " The target's CPU time is unknown; use --target-pid."
    notes.append(f"{plan.clients} connections; g is {agreement.name} in the same round.{unknown}")
    return ResultTable(f"Forwards to {plan.target}", _TARGET_COLUMNS, rows, (), tuple(notes), tuple(failures))


_P99_GOAL_MS = 50.0
_LOAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_GOAL_SHARE = 0.7
_OFFERED = "offered/s"
_LATENCY_COLUMNS = (_OFFERED, PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", CLIENT_US)
# Connections of the open loop for each one of the closed loop.
_SPARE_CONNECTIONS = 4


def measure_latency(plan: BenchmarkPlan) -> ResultTable:
    """Latency of forwards in a closed loop, then in an open loop at shares of that rate."""
    size, name = plan.sizes[0], format_size(plan.sizes[0])
    with prepare_mediator(plan) as mediator, mediator.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as wallets:
        check = mediator.make_stored_check(wallets)
        seconds, connections = plan.seconds * plan.rounds / 2, plan.clients * _SPARE_CONNECTIONS
        check.check(mediator.post(wallets.bodies, plan.clients, plan.seconds * WARM_UP_SHARE))
        full = check.check(mediator.post(wallets.bodies, plan.clients, seconds))
        rows: dict[str, Figures] = {f"{name}  closed loop": full}
        for share in _LOAD_SHARES:
            rate = share * full[PER_SECOND]
            load = post_at_rate(mediator.server, wallets.bodies, connections, seconds, rate, even=plan.even)
            figures = check.check(load) | {_OFFERED: rate, "late %": load.late_percent}
            rows[f"{name}  at {share:.0%}"] = figures
    p99 = rows[f"{name}  at {_GOAL_SHARE:.0%}"]["p99 ms"]
    notes = (
        f"Closed loop: {plan.clients} connections. Open loop: "
        f"{'fixed intervals' if plan.even else 'a Poisson process'} on up to {connections} connections.",
        f"Milliseconds since a forward was due; late ones are included. {mediator.note}",
        check.note,
    )
    targets = (PerformanceTarget(f"forward p99 {name} at {_GOAL_SHARE:.0%}, ms", _P99_GOAL_MS, p99, most=True),)
    failures = tuple(check.failures)
    return ResultTable("Latency of a forward by load", _LATENCY_COLUMNS, rows, targets, notes, failures)
