"""
The floor of cryptography, `g`: X25519 key agreements per second of one core, by OpenSSL's own benchmark.

Opening an envelope takes one of them, and no implementation in any language can leave it out; so figures in units of
g can be compared between machines.

Opening and sealing envelopes, in this process: ours, jwcrypto on the same bytes, and the bare cryptography.

jwcrypto has no ECDH-1PU, so that our authcrypts stand beside its anoncrypts, which take one key agreement less.

Forwards to recipients that are offline: decrypted, routed, durable in SQLite, and only then answered.

Forwards to a mediator of any make, beside the floors that need nothing of it.

How long a forward takes at a given load, whatever the mediator does meanwhile.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from jwcrypto.jwe import JWE
from jwcrypto.jwk import JWK
from nacl import bindings

from mediatord.bench.didcomm_wallets import (
    WalletGroup,
    build_forwards,
    build_inner_envelope,
    enrol_group,
    fetch_mediator,
)
from mediatord.bench.load_generator import (
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    LoadResult,
    TargetServer,
    post_at_rate,
    post_for_seconds,
    read_bodies,
    write_bodies,
)
from mediatord.bench.mediator_under_test import (
    DATABASE_FILE,
    BareSQLiteBaseline,
    MediatorUnderTest,
    RetentionCheck,
    StoredMessageCheck,
    count_stored_rows,
    create_bare_database,
    prepare_mediator,
)
from mediatord.bench.processes import CoreAssignment, assign_cores, pin_to_cores, read_line, spawn_module
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    RECIPIENTS,
    BenchmarkPlan,
    Contender,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    format_size,
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

AGREEMENT_RATE = "msg/CPU-s"
OPENSSL = "openssl speed ecdhx25519"
CRYPTOGRAPHY = "X25519 through cryptography"

_OPENSSL_ALGORITHM = "ecdhx25519"
# A line of `openssl speed -mr`: the mark, numbers of the algorithm, operations per second of user time, its inverse.
_OPENSSL_RESULT_PREFIX, _OPENSSL_RATE_FIELD = "+F5:", 3
_OPENSSL_TIMEOUT_SECONDS = 20.0
_EXCHANGES_PER_CHECK = 200


class KeyAgreementBaseline:
    """
    Measures g.

    :ivar name: by what: :data:`OPENSSL`, or :data:`CRYPTOGRAPHY` where the program is not there.
    """

    def __init__(self) -> None:
        self._program = shutil.which("openssl")
        self.name = OPENSSL if self._program else CRYPTOGRAPHY

    def run(self) -> Figures:
        """
        For one second.

        :raise RuntimeError: openssl is there and does not do it.
        """
        return {
            AGREEMENT_RATE: _measure_openssl_rate(self._program) if self._program else _measure_cryptography_rate()
        }


def parse_openssl_rate(output: str) -> float:
    """
    What `openssl speed -mr` says.

    :raise RuntimeError: it says something else.
    """
    line = next((line for line in output.splitlines() if line.startswith(_OPENSSL_RESULT_PREFIX)), "")
    try:
        return float(line.split(":")[_OPENSSL_RATE_FIELD])
    except (IndexError, ValueError):
        raise RuntimeError(f"openssl speed {_OPENSSL_ALGORITHM} gave no rate") from None


def _measure_openssl_rate(program: str) -> float:
    command = [program, "speed", "-mr", "-seconds", "1", _OPENSSL_ALGORITHM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_OPENSSL_TIMEOUT_SECONDS, check=False)
    return parse_openssl_rate(done.stdout)


def _measure_cryptography_rate() -> float:
    key, peer = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
    start, done = process_time(), 0
    while (spent := process_time() - start) < 1.0:
        for _ in range(_EXCHANGES_PER_CHECK):
            key.exchange(X25519PublicKey.from_public_bytes(peer))
        done += _EXCHANGES_PER_CHECK
    return done / spent


# By the size of the message in bytes: the longer it is, the more of the time is spent in the same ciphers.
OPENING_GOALS_BY_SIZE = {1024: 3.3}
OPENING_GOAL = 3.0
OPENING_AGREEMENT_GOAL = 0.40

_OF_JWCRYPTO, _OPENING_OF_AGREEMENT = "x jwcrypto", "of g"
_OPENED_ROW, _JWCRYPTO_ROW = "mediatord", "jwcrypto"
_FAST_FORWARD_ROW, _JWCRYPTO_FORWARD_ROW = "mediatord, usual forward", "jwcrypto and json, forward read"
_SEALED_ROW, _JWCRYPTO_SEALED_ROW = "mediatord, authcrypt sealed", "jwcrypto, anoncrypt sealed"
# What each is compared with: the same work, as far as jwcrypto does it.
_COMPARED_WITH = {
    _FAST_FORWARD_ROW: _JWCRYPTO_FORWARD_ROW,
    "mediatord, forward read": _JWCRYPTO_FORWARD_ROW,
    _JWCRYPTO_FORWARD_ROW: _JWCRYPTO_FORWARD_ROW,
    _SEALED_ROW: _JWCRYPTO_SEALED_ROW,
    _JWCRYPTO_SEALED_ROW: _JWCRYPTO_SEALED_ROW,
}
# Turns are short here and many, because nothing has to warm up: a neighbour then disturbs all contenders alike.
_MESSAGES_PER_TURN = 60
_TURNS_PER_SECOND = 5
_SMALL_MESSAGE_BYTES = 1024
# Concat KDF (reference 1.4): the counter, the algorithm and an empty apu, the length of the apv that follows, and
# after that the length of the key.
_CONCAT_KDF_COUNTER = b"\0\0\0\1"
_CONCAT_KDF_ALG_AND_APU = b"\0\0\0\x0eECDH-ES+A256KW" + b"\0\0\0\0" + b"\0\0\0\x20"
_CONCAT_KDF_KEY_BITS = b"\0\0\1\0"

Item = TypeVar("Item")


def measure_envelopes(plan: BenchmarkPlan) -> ResultTable:
    """One table for all sizes; every figure is messages per second of CPU time of one core."""
    key = WalletIdentity.fresh(endpoint="http://127.0.0.1/didcomm")
    mediator = DIDCommMediator.of(key.document)
    group = WalletGroup(
        mediator, tuple(WalletIdentity.fresh(endpoint=mediator.did) for _ in range(_MESSAGES_PER_TURN))
    )
    rows: dict[str, Figures] = {}
    targets = []
    agreement = KeyAgreementBaseline()
    for size in plan.sizes:
        floor = agreement.run()[AGREEMENT_RATE]
        rounds = _compare_openers(key.agreement, group, size, plan)
        name = format_size(size)
        for contender in rounds.found:
            found = rounds.medians(contender)
            found[_OF_JWCRYPTO] = rounds.ratio(
                contender, _COMPARED_WITH.get(contender, _JWCRYPTO_ROW), AGREEMENT_RATE
            )
            found[_OPENING_OF_AGREEMENT] = safe_ratio(found[AGREEMENT_RATE], floor)
            rows[f"{name}  {contender}"] = found
        usual = rows[f"{name}  {_FAST_FORWARD_ROW}"]
        goal = OPENING_GOALS_BY_SIZE.get(size, OPENING_GOAL)
        targets.append(PerformanceTarget(f"usual forward {name}, x jwcrypto", goal, usual[_OF_JWCRYPTO]))
        if size <= _SMALL_MESSAGE_BYTES:
            targets.append(
                PerformanceTarget(f"usual forward {name}, of g", OPENING_AGREEMENT_GOAL, usual[_OPENING_OF_AGREEMENT])
            )
    columns, notes = (
        (AGREEMENT_RATE, _OF_JWCRYPTO, _OPENING_OF_AGREEMENT),
        (f"g: {agreement.name}, a second of it for each size.",),
    )
    return ResultTable("Opening an envelope", columns, rows, tuple(targets), notes)


def _compare_openers(key: WalletKey, group: WalletGroup, size: int, plan: BenchmarkPlan) -> InterleavedResults:
    envelopes = build_forwards(group, size, _MESSAGES_PER_TURN)
    own = JWK(**key.private.jwk())
    parts = [_EnvelopeParts.of(raw) for raw in envelopes]
    keys = (key.private,)
    usual = FastForwardParser(lambda kid: keys if kid == key.kid else ())
    plain = [_open_envelope(raw, key) for raw in envelopes]
    senders = [wallet.agreement for wallet in group.wallets]
    authcrypts = [
        (jwe.encrypt_authcrypt(text, (sender.kid, sender.private), [(key.kid, key.private.public)]), sender)
        for text, sender in zip(plain, senders, strict=True)
    ]
    to_wallets = list(zip(plain, senders, strict=True))
    return run_interleaved(
        {
            _OPENED_ROW: _cpu_time_contender(lambda raw: _open_envelope(raw, key), envelopes),
            _JWCRYPTO_ROW: _cpu_time_contender(lambda raw: _open_by_jwcrypto(raw, own), envelopes),
            "bare cryptography": _cpu_time_contender(lambda one: one.opened(key.private.secret), parts),
            _FAST_FORWARD_ROW: _cpu_time_contender(usual.read, envelopes),
            "mediatord, forward read": _cpu_time_contender(lambda raw: _read_forward(raw, key), envelopes),
            _JWCRYPTO_FORWARD_ROW: _cpu_time_contender(lambda raw: _read_forward_by_jwcrypto(raw, own), envelopes),
            "mediatord, authcrypt opened": _cpu_time_contender(
                lambda one: _open_envelope(one[0], key, one[1]), authcrypts
            ),
            _SEALED_ROW: _cpu_time_contender(lambda one: _seal_envelope(one[0], key, one[1]), to_wallets),
            _JWCRYPTO_SEALED_ROW: _cpu_time_contender(lambda one: _seal_by_jwcrypto(one[0], one[1]), to_wallets),
        },
        max(1, round(plan.rounds * plan.seconds * _TURNS_PER_SECOND)),
    )


def _cpu_time_contender(work: Callable[[Item], object], items: Sequence[Item]) -> Contender:
    return lambda: {AGREEMENT_RATE: _items_per_cpu_second(work, items)}


def _items_per_cpu_second(work: Callable[[Item], object], items: Sequence[Item]) -> float:
    """Items per second of CPU time."""
    start = process_time()
    for item in items:
        work(item)
    return len(items) / (process_time() - start)


def _open_envelope(raw: bytes, key: WalletKey, sender: WalletKey | None = None) -> bytes:
    return jwe.decrypt_envelope(
        jwe.parse_envelope(raw), key.kid, key.private, sender.private.public if sender else None
    )


def _seal_envelope(plaintext: bytes, sender: WalletKey, recipient: WalletKey) -> bytes:
    return jwe.encrypt_authcrypt(plaintext, (sender.kid, sender.private), [(recipient.kid, recipient.private.public)])


def _seal_by_jwcrypto(plaintext: bytes, recipient: WalletKey) -> str:
    token = JWE(plaintext, json.dumps({"alg": "ECDH-ES+A256KW", "enc": "A256CBC-HS512"}))
    token.add_recipient(JWK(**recipient.private.public.jwk()), json.dumps({"kid": recipient.kid}))
    sealed: str = token.serialize()
    return sealed


def _read_forward(raw: bytes, key: WalletKey) -> tuple[str, bytes]:
    """As far as the daemon reads a forward: where to, and the payload as it is stored."""
    message = parse_message(_open_envelope(raw, key))
    return read_next(message), read_payloads(message)[0][0]


def _open_by_jwcrypto(raw: bytes, key: JWK) -> bytes:
    token = JWE()
    token.deserialize(raw.decode("ascii"), key)
    payload: bytes = token.payload
    return payload


def _read_forward_by_jwcrypto(raw: bytes, key: JWK) -> tuple[str, bytes]:
    message = json.loads(_open_by_jwcrypto(raw, key))
    payload = json.dumps(message["attachments"][0]["data"]["json"], separators=(",", ":"))
    return message["body"]["next"], payload.encode()


@dataclass(frozen=True, slots=True)
class _EnvelopeParts:
    """An envelope taken apart and decoded beforehand, so that nothing but cryptography is left to do."""

    ephemeral: bytes
    apv: bytes
    wrapped: bytes = field(repr=False)
    iv: bytes
    data: bytes = field(repr=False)
    mac_input: bytes = field(repr=False)
    tag: bytes

    @classmethod
    def of(cls, raw: bytes) -> _EnvelopeParts:
        value = json.loads(raw)
        header = json.loads(decode_base64url(value["protected"]))
        aad = value["protected"].encode()
        iv, data, tag = (decode_base64url(value[name]) for name in ("iv", "ciphertext", "tag"))
        return cls(
            ephemeral=PublicKey.from_jwk(header["epk"]).raw,
            apv=decode_base64url(header["apv"]),
            wrapped=decode_base64url(value["recipients"][0]["encrypted_key"]),
            iv=iv,
            data=data,
            mac_input=aad + iv + data + (8 * len(aad)).to_bytes(8, "big"),
            tag=tag,
        )

    def opened(self, secret: bytes) -> bytes:
        """ECDH-ES on X25519, AES key wrap, A256CBC-HS512."""
        shared = bindings.crypto_scalarmult(secret, self.ephemeral)
        kek = hashlib.sha256(
            _CONCAT_KDF_COUNTER + shared + _CONCAT_KDF_ALG_AND_APU + self.apv + _CONCAT_KDF_KEY_BITS
        ).digest()
        cek = aes_key_unwrap(kek, self.wrapped)
        if not hmac.compare_digest(hmac.digest(cek[:32], self.mac_input, "sha512")[:32], self.tag):
            raise ValueError("not authentic")
        cipher = Cipher(AES(cek[32:]), CBC(self.iv)).decryptor()
        padded = cipher.update(self.data) + cipher.finalize()
        return padded[: -padded[-1]]


FORWARD_AGREEMENT_GOAL = 0.22

_FORWARD_OF_AGREEMENT, _FORWARD_OF_SITE = "of g", "x stock Site per CPU-s"
_DURABLE_ROW, _STOCK_SITE_ROW, _BARE_SQLITE_ROW = (
    "mediatord, durable",
    "stock Site, empty 202",
    "SQLite alone, grouped",
)
_FORWARD_COLUMNS = (
    PER_SECOND,
    PER_CPU_SECOND,
    "p50 ms",
    "p99 ms",
    CLIENT_US,
    _FORWARD_OF_AGREEMENT,
    _FORWARD_OF_SITE,
)
_FORWARD_WARM_UP_SHARE = 0.25
# Of a quiet mediator: few messages share what is done once for all that come together.
_FEW_CONNECTIONS = 32
_FEW_CONNECTIONS_ROW = f"mediatord, {_FEW_CONNECTIONS} connections"
# Nobody's DID need be longer than its keys, and most wallets' is: it names their mediator.
LONG_DIDS_SUFFIX = ", long DIDs"


@dataclass(frozen=True, slots=True)
class ForwardKind:
    """Messages of one kind: of a size, to wallets of one sort."""

    name: str
    size: int
    group: WalletGroup


def list_forward_kinds(plan: BenchmarkPlan, url: str) -> Iterator[ForwardKind]:
    """
    All sizes to wallets with short DIDs, and the first one to wallets with long ones as well.

    :raise RuntimeError: the daemon did not do as asked.
    """
    group = enrol_group(url, RECIPIENTS, short=True)
    for number, size in enumerate(plan.sizes):
        yield ForwardKind(format_size(size), size, group)
        if number == 0:
            yield ForwardKind(format_size(size) + LONG_DIDS_SUFFIX, size, enrol_group(url, RECIPIENTS))


@dataclass(slots=True)
class _ForwardComparison:
    """
    Those who are compared.

    :ivar accounting: of our daemon, over all kinds.
    :ivar stock: the floor of HTTP.
    """

    plan: BenchmarkPlan
    cores: CoreAssignment
    stored_check: StoredMessageCheck
    stock: TargetServer
    agreement: KeyAgreementBaseline
    bodies: Path

    def run(self, kind: ForwardKind) -> InterleavedResults:
        """All rounds of one kind of message."""
        write_bodies(self.bodies, build_forwards(kind.group, kind.size, DISTINCT_MESSAGES))
        payloads = [(wallet.did, build_inner_envelope(wallet, kind.size)) for wallet in kind.group.wallets]
        with create_bare_database() as connection:
            bare = BareSQLiteBaseline(connection, payloads, self.plan.clients)
            contenders: dict[str, Contender] = {
                _DURABLE_ROW: lambda: self._post(self.plan.seconds, self.plan.clients),
                _FEW_CONNECTIONS_ROW: lambda: self._post(self.plan.seconds, _FEW_CONNECTIONS),
                self.agreement.name: self._beside(self.agreement.run),
                _STOCK_SITE_ROW: lambda: post_for_seconds(
                    self.stock, self.bodies, self.plan.clients, self.plan.seconds
                ).figures(),
                _BARE_SQLITE_ROW: self._beside(lambda: bare.run(self.plan.seconds / 2)),
            }
            self._post(self.plan.seconds * _FORWARD_WARM_UP_SHARE, self.plan.clients)
            return run_interleaved(contenders, self.plan.rounds)

    def _post(self, seconds: float, connections: int) -> Figures:
        return self.stored_check.check(post_for_seconds(self.stored_check.server, self.bodies, connections, seconds))

    def _beside(self, contender: Contender) -> Contender:
        """Where the servers run."""

        def run() -> Figures:
            with pin_to_cores(self.cores.server):
                return contender()

        return run

    def compared(self, rounds: InterleavedResults, name: str) -> Figures:
        """What floors are for."""
        return {
            _FORWARD_OF_AGREEMENT: rounds.ratio(name, self.agreement.name, PER_CPU_SECOND),
            _FORWARD_OF_SITE: rounds.ratio(name, _STOCK_SITE_ROW, PER_CPU_SECOND),
        }


def measure_forwards(plan: BenchmarkPlan) -> ResultTable:
    """One table for all kinds."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    lengths: list[str] = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        cores = assign_cores()
        with pin_to_cores(cores.server):
            daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
            site = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "empty"))
        stack.enter_context(pin_to_cores(cores.clients))
        server = TargetServer.at(fetch_mediator(daemon.url).http_uri, daemon.pid)
        stored_check = StoredMessageCheck(server, lambda: count_stored_rows(daemon.directory / DATABASE_FILE))
        stock = TargetServer(site.pid, int(read_line(site)), server.path)
        comparison = _ForwardComparison(plan, cores, stored_check, stock, KeyAgreementBaseline(), place / "bodies")
        for kind in list_forward_kinds(plan, daemon.url):
            rounds = comparison.run(kind)
            rows |= {
                f"{kind.name}  {one}": rounds.medians(one) | comparison.compared(rounds, one) for one in rounds.found
            }
            lengths.append(f"{kind.name} {max(map(len, read_bodies(comparison.bodies)))}")
            if not targets:
                measured = rows[f"{kind.name}  {_DURABLE_ROW}"][_FORWARD_OF_AGREEMENT]
                targets.append(
                    PerformanceTarget(f"durable forwards {kind.name}, of g", FORWARD_AGREEMENT_GOAL, measured)
                )
    notes = (
        f"{plan.clients} connections, one daemon process; SQLite alone commits {plan.clients} rows at a time, "
        "and its latencies are those of a commit.",
        f"g is {comparison.agreement.name} in the same round, by CPU time like the daemon's. {cores.note}",
        f"Bytes posted: {', '.join(lengths)}.",
        f"{stored_check.accepted} forwards were answered 202 and {stored_check.stored} rows were stored.",
    )
    return ResultTable(
        "Forwards, durable before the answer",
        _FORWARD_COLUMNS,
        rows,
        tuple(targets),
        notes,
        tuple(stored_check.failures),
    )


_TARGET_ROW, _SITE = "target", "stock Site, empty 202"
_TARGET_OF_AGREEMENT, _TARGET_OF_SITE = "of g", "x stock Site"
_TARGET_WARM_UP_SHARE = 0.25
_TARGET_COLUMNS = (
    PER_SECOND,
    PER_CPU_SECOND,
    "p50 ms",
    "p99 ms",
    "p99.9 ms",
    CLIENT_US,
    _TARGET_OF_AGREEMENT,
    _TARGET_OF_SITE,
)


def measure_target_forwards(plan: BenchmarkPlan) -> ResultTable:
    """All sizes, to wallets with short DIDs."""
    rows: dict[str, Figures] = {}
    notes: list[str] = []
    failures: list[str] = []
    with prepare_mediator(plan) as one:
        for size in plan.sizes:
            name = format_size(size)
            with one.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as wallet_process:
                retention = RetentionCheck(one, wallet_process)
                comparison = _TargetComparison(plan, one, retention)
                rounds = comparison.run(wallet_process.bodies)
            rows |= {
                f"{name}  {each}": rounds.medians(each) | comparison.compared(rounds, each) for each in rounds.found
            }
            notes.append(retention.note)
            failures += retention.failures
    known = "" if one.pid else " The target's CPU time is not known: give its process by --target-pid."
    notes.append(f"{plan.clients} connections; g is {comparison.agreement.name} in the same round.{known}")
    return ResultTable(f"Forwards to {one.url}", _TARGET_COLUMNS, rows, (), tuple(notes), tuple(failures))


class _TargetComparison:
    """The target and its floors, in turns."""

    def __init__(self, plan: BenchmarkPlan, one: MediatorUnderTest, retention: RetentionCheck) -> None:
        self._plan = plan
        self._subject = one
        self._retention = retention
        self.agreement = KeyAgreementBaseline()

    def run(self, bodies: Path) -> InterleavedResults:
        """All rounds of one size."""
        clients, seconds = self._plan.clients, self._plan.seconds
        with spawn_module("mediatord.bench.baseline_servers", "empty") as site:
            stock = TargetServer(site.pid, int(read_line(site)), "/didcomm")

            def post(server: TargetServer, share: float = 1.0) -> LoadResult:
                return post_for_seconds(server, bodies, clients, seconds * share)

            self._retention.check(post(self._subject.server, _TARGET_WARM_UP_SHARE))
            return run_interleaved(
                {
                    _TARGET_ROW: lambda: self._retention.check(post(self._subject.server)),
                    self.agreement.name: self.agreement.run,
                    _SITE: lambda: post(stock).figures(),
                },
                self._plan.rounds,
            )

    def compared(self, rounds: InterleavedResults, name: str) -> Figures:
        """With the floors."""
        of_site = {_TARGET_OF_SITE: rounds.ratio(name, _SITE, PER_SECOND)} if name != self.agreement.name else {}
        if name == _TARGET_ROW and not self._subject.pid:
            return of_site
        return {_TARGET_OF_AGREEMENT: rounds.ratio(name, self.agreement.name, PER_CPU_SECOND), **of_site}


FORWARD_P99_MS = 50.0
LATENCY_LOAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The load at which latencies are promised.
LATENCY_PROMISED_SHARE = 0.7

_OFFERED = "offered/s"
_LATENCY_COLUMNS = (_OFFERED, PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", CLIENT_US)
# Requests that may be on their way at the same time, for each client of the closed loop.
_SPARE_CONNECTIONS = 4


def measure_latency(plan: BenchmarkPlan) -> ResultTable:
    """The most that comes through first, then shares of it at times fixed beforehand."""
    size = plan.sizes[0]
    name = format_size(size)
    with prepare_mediator(plan) as one, one.wallet_process(RECIPIENTS, size, DISTINCT_MESSAGES) as wallet_process:
        retention = RetentionCheck(one, wallet_process)
        seconds = plan.seconds * plan.rounds / 2
        retention.check(post_for_seconds(one.server, wallet_process.bodies, plan.clients, plan.seconds / 4))
        full = retention.check(post_for_seconds(one.server, wallet_process.bodies, plan.clients, seconds))
        rows: dict[str, Figures] = {f"{name}  as many as come through": full}
        for share in LATENCY_LOAD_SHARES:
            rate = share * full[PER_SECOND]
            load = post_at_rate(
                one.server, wallet_process.bodies, plan.clients * _SPARE_CONNECTIONS, seconds, rate, even=plan.even
            )
            rows[f"{name}  at {share:.0%}"] = retention.check(load) | _rate_figures(load, rate)
    promised = rows[f"{name}  at {LATENCY_PROMISED_SHARE:.0%}"]["p99 ms"]
    notes = (
        f"First row: {plan.clients} connections, each waiting for its answers. Others: "
        f"{'a beat' if plan.even else 'a Poisson process'} on up to {plan.clients * _SPARE_CONNECTIONS}.",
        f"Milliseconds since a forward was to be sent; late ones are counted like all others. {one.note}",
        retention.note,
    )
    return ResultTable(
        "Latency of a forward by load",
        _LATENCY_COLUMNS,
        rows,
        (
            PerformanceTarget(
                f"forward p99 {name} at {LATENCY_PROMISED_SHARE:.0%}, ms", FORWARD_P99_MS, promised, most=True
            ),
        ),
        notes,
        tuple(retention.failures),
    )


def _rate_figures(load: LoadResult, rate: float) -> Figures:
    return {_OFFERED: rate, "late %": 100 * safe_ratio(load.late, len(load.latencies_us))}
