"""`mediatord queue`: list, show and purge queues while the daemon runs."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from mediatord.cli import store_access
from mediatord.cli.keys import read_identity
from mediatord.cli.store_access import StoreAccess
from mediatord.config.file import load_config
from mediatord.config.settings import Config
from mediatord.control.queue_and_account_operations import ControlError, ControlOperations
from mediatord.errors import StartupError
from mediatord.observability.event_log import BufferedLineFile, EventLogWriter, LogOrigin
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, read_pseudonym_keys
from mediatord.probe.identities_and_recognition import ProbeIdentities
from mediatord.store.interfaces import messages as interface
from mediatord.store.interfaces.administration import MAX_PURGE_BATCH
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, PendingEvent
from mediatord.store.interfaces.messages import MessageLedger, QueueTotals
from mediatord.store.sqlite.database_file import DatabaseFileLock
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.cli.test_commands import Capture, call, one_line
from tests.observability.counter_oracle import read_lines, wrong_counter_lines
from tests.store.builders import ImmediateClock, make_payload, make_sqlite_store, result_of

ALICE, BOB, INBOX = "did:example:alice", "did:example:bob", "did:key:z6MkInbox"
CAROL, DAVE = "did:decentrl:carol", "did:decentrl:dave"
# A key of DIDComm v1, in both spellings.
V1_KEY = "did:key:z6Mko9hTggMwjSTEaJaPUfE6tqcy2xvU6BnNq3e3o8qVBiyH"
V1_BASE58 = "9hSR6S7WPtxmTojgo6GG3k4yDPecgJY292j7xrsUGWBu"
HOUR = 3600.0
NODE = "m1"


class InProcessDaemon:
    """Runs the operations of the control socket on an open store, as a daemon would, and logs removals."""

    def __init__(self, config: Config, clock: Clock, store: SQLiteStore) -> None:
        self.pseudonymizer = Pseudonymizer(config.log.dids, read_pseudonym_keys(config.log_key_path)[-1])
        origin = LogOrigin(NODE, "1", self.pseudonymizer.epoch)
        log_clock = Clock()
        log_clock.advance(clock.seconds())
        self.events = EventLogWriter(config.log.directory, log_clock, origin)
        metrics = self.events.metrics = Metrics(CollectorRegistry(), version="1")
        recorder = EventRecorder(clock, self.events, metrics, self.pseudonymizer)
        self.operations = ControlOperations(store, lambda: None if self.events.pending else recorder)

    def call(self, operation: str, **arguments: Any) -> Any:
        """Like :meth:`ControlClient.call`, with the JSON conversion of both directions."""
        sent = json.loads(json.dumps(arguments))
        results: list[Any] = []
        running = Deferred.fromCoroutine(self.operations.run(operation, sent))
        running.addBoth(results.append)
        if isinstance(results[0], Failure):
            results[0].trap(ControlError)
            raise StartupError(str(results[0].value))
        return json.loads(json.dumps(results[0]))

    def close(self) -> None:
        """No-op."""


@dataclass
class ConfiguredStore:
    """
    A configuration with its store, opened by a daemon in this process.

    :ivar began: the store's initial time in seconds.
    """

    path: Path
    config: Config
    clock: Clock
    store: SQLiteStore
    start_time: float
    daemon: InProcessDaemon

    def put(self, *ids: str, to: str = INBOX, size: int = 10, due_in: float | None = None) -> None:
        """Enqueue messages at the time of the store's clock."""
        now = self.clock.seconds()
        payloads = [make_payload(id, id.encode().ljust(size)) for id in ids]
        due_at = None if due_in is None else now + due_in
        result_of(self.store.enqueue(to, payloads, expires_at=now + 72 * HOUR, due_at=due_at))

    def send(self, *ids: str) -> None:
        """Deliver events from DAVE to CAROL."""
        for id in ids:
            event = PendingEvent(id, CAROL, DAVE, "secret", self.clock.seconds())
            assert result_of(self.store.decentrl.enqueue_event(CommandGuard(id.encode(), 9e9), event)) is None

    def get_totals(self) -> QueueTotals:
        """The store's totals of queued messages."""
        found: QueueTotals = result_of(self.store.get_queue_totals())
        return found

    def ids(self, did: str = INBOX) -> list[str]:
        """Ids of queued messages, as the command lists them."""
        return [entry.id for entry in StoreAccess(self.daemon.call, self.config).list_entries(did)]

    @property
    def pseudonymizer(self) -> Pseudonymizer:
        """The pseudonymizer of the daemon's log."""
        return self.daemon.pseudonymizer

    def lines(self) -> list[dict[str, Any]]:
        """Removals in the event log."""
        return [line for line in read_lines(self.config.log.directory) if line["event"] == "msg.remove"]


@pytest.fixture
def configured_store(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ConfiguredStore]:
    """Logs keyed pseudonyms unless the parameter is another value of `log.dids`."""
    did_mode = getattr(request, "param", "keyed")
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    path = tmp_path / "m" / "mediator.yaml"
    text = path.read_text("utf-8")
    path.write_text(text.replace("node: null", f"node: {NODE}").replace("dids: plain", f"dids: {did_mode}"), "utf-8")
    config = load_config(path)
    config.log.directory.mkdir()
    clock = ImmediateClock()
    start_time = datetime.now(UTC).timestamp() - 10 * HOUR
    clock.rightNow = start_time
    store = make_sqlite_store(clock, config.storage.sqlite.path)
    result_of(store.open())
    result_of(store.grant(ALICE))
    result_of(store.update_recipients(ALICE, [(INBOX, "add"), (ALICE, "add")], max_recipients=9))
    contract = Contract("c", CAROL, DAVE, 9e9, b"digest", b"{}")
    result_of(store.decentrl.save_contract(CommandGuard(b"contract", 9e9), contract))
    daemon = InProcessDaemon(config, clock, store)
    daemon.events.startService()
    monkeypatch.setattr(store_access, "connect_daemon", lambda config: daemon)
    yield ConfiguredStore(path, config, clock, store, start_time, daemon)
    if daemon.events.running:
        daemon.events.stopService()
    result_of(store.close())


def make_arguments(configured_store: ConfiguredStore, *arguments: str) -> Sequence[str]:
    """Arguments of `mediatord queue`, with the configuration."""
    return ("queue", *arguments, "--config", str(configured_store.path))


def read_json(capture: Capture) -> Any:
    """The printed JSON document."""
    captured = capture.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_lists_queues_of_both_protocols(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """Longest first, with totals."""
    configured_store.put("a", "b", "c", size=1000)
    configured_store.put("d", to=ALICE)
    configured_store.clock.advance(HOUR)
    configured_store.send("e", "f")

    assert call(*make_arguments(configured_store, "list", "--json")) == 0
    output = read_json(capsys)
    assert [
        (entry["protocol"], entry["did"], entry["account"], entry["messages"], entry["bytes"])
        for entry in output["queues"]
    ] == [
        ("didcomm", INBOX, ALICE, 3, 3000),
        ("decentrl", CAROL, CAROL, 2, 12),
        ("didcomm", ALICE, ALICE, 1, 10),
    ]
    assert [entry["oldest_at"] for entry in output["queues"]] == [
        configured_store.start_time,
        configured_store.start_time + HOUR,
        configured_store.start_time,
    ]
    assert output["totals"] == {"queues": 3, "messages": 6, "bytes": 3022}

    assert call(*make_arguments(configured_store, "list", "--top", "1")) == 0
    head, row, end = capsys.readouterr().out.splitlines()
    assert head.split() == ["protocol", "recipient", "account", "messages", "size", "oldest"]
    assert row.split()[:8] == ["didcomm", INBOX, ALICE, "3", "2.9", "KiB", "10", "h"]
    assert end == "3 queues with 6 messages, 3.0 KiB; showing the longest 1"

    assert call(*make_arguments(configured_store, "list", "--protocol", "decentrl", "--json")) == 0
    assert [entry["did"] for entry in read_json(capsys)["queues"]] == [CAROL]
    assert call(*make_arguments(configured_store, "list", "--protocol", "decentrl")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 queue with 2 messages, 12 B"


def test_empty_queues_are_not_listed(configured_store: ConfiguredStore, capsys: Capture) -> None:
    assert call(*make_arguments(configured_store, "list")) == 0
    assert capsys.readouterr().out == "0 queues with 0 messages, 0 B\n"


def test_shows_messages_without_payloads(configured_store: ConfiguredStore, capsys: Capture) -> None:
    configured_store.put("pushed", "waiting")
    result_of(configured_store.store.mark_delivered(["pushed"]))
    configured_store.put("later", due_in=20 * HOUR)
    configured_store.send("event")

    assert call(*make_arguments(configured_store, "show", INBOX, "--json")) == 0
    output = read_json(capsys)
    assert output["messages"] == 3
    fields = ("id", "status", "pushes", "due_at")
    assert [tuple(entry[name] for name in fields) for entry in output["shown"]] == [
        ("pushed", "delivered", 1, None),
        ("waiting", "pending", 0, None),
        ("later", "pending", 0, configured_store.start_time + 20 * HOUR),
    ]
    assert {entry["expires_at"] for entry in output["shown"]} == {configured_store.start_time + 72 * HOUR}

    assert call(*make_arguments(configured_store, "show", CAROL)) == 0
    text = capsys.readouterr().out
    assert "event" in text and "never" in text
    assert "secret" not in text
    assert text.endswith(f"1 message, 6 B, for {CAROL}\nno WebSocket with live delivery is open\n")


def test_escapes_control_characters(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """In DIDs, ids and times that an import can have brought."""
    did = "did:example:\x1b[2Jtitle\x07"
    result_of(configured_store.store.update_recipients(ALICE, [(did, "add")], max_recipients=9))
    configured_store.clock.rightNow = 1e15  # beyond the last year of datetime
    configured_store.put("\x9bid", to=did)
    for arguments in (("list",), ("show", did), ("purge", did), ("purge", did, "--yes")):
        assert call(*make_arguments(configured_store, *arguments)) == 0
        output = capsys.readouterr().out
        assert "\x1b" not in output and "\x9b" not in output
        assert "removed" in output or "\\x1b[2Jtitle\\x07" in output
        assert arguments[0] != "show" or "\\x9bid" in output


@pytest.mark.system
def test_prints_dids_without_emoji_markup(configured_store: ConfiguredStore) -> None:
    """`:key:` is not replaced by an emoji."""
    configured_store.put("a")
    command = [sys.executable, "-m", "mediatord", *make_arguments(configured_store, "list")]
    near, far = pty.openpty()
    with os.fdopen(near, "rb", buffering=0) as terminal:
        with subprocess.Popen(command, stdout=far, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"}):
            os.close(far)
        output = b""
        # The last output can arrive in pieces; reading a closed terminal is an error.
        with suppress(OSError):
            while piece := terminal.read(65_536):
                output += piece
        assert INBOX.encode() in output


def test_finds_queue_by_shortened_did_or_pseudonym(configured_store: ConfiguredStore, capsys: Capture) -> None:
    long = "did:peer:2." + "Ez6LS" * 40
    result_of(configured_store.store.update_recipients(ALICE, [(long, "add")], max_recipients=9))
    configured_store.put("a", to=long)
    configured_store.send("e")
    assert call(*make_arguments(configured_store, "list")) == 0
    output = next(word for word in capsys.readouterr().out.split() if word.startswith("did:peer:2."))
    assert output == Pseudonymizer("plain", configured_store.pseudonymizer.key).did(long)
    assert len(output) < 50
    for name in (output, configured_store.pseudonymizer.did(long)):
        assert call(*make_arguments(configured_store, "show", name, "--json")) == 0
        assert [entry["id"] for entry in read_json(capsys)["shown"]] == ["a"]
    assert (
        call(*make_arguments(configured_store, "purge", configured_store.pseudonymizer.did(CAROL), "--yes", "--json"))
        == 0
    )
    assert read_json(capsys)["protocols"] == {"decentrl": 1}


def test_finds_queue_by_any_form_of_did(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """Recipients, accounts and identities, also unregistered ones with messages."""
    bob = "did:web:bob.example"
    result_of(configured_store.store.grant(bob))
    for name in (f"{bob}#k1", "did:web:Bob.example%3A443"):
        assert call(*make_arguments(configured_store, "show", name, "--json")) == 0
        assert read_json(capsys)["did"] == bob
    result_of(configured_store.store.update_recipients(ALICE, [(f"{bob}#k1", "add")], max_recipients=9))
    configured_store.put("a", to=bob)
    result_of(configured_store.store.update_recipients(ALICE, [(f"{bob}#k1", "remove")], max_recipients=9))
    configured_store.send("e")
    for name, kept, protocols in ((f"{bob}#k1", bob, {"didcomm": 1}), (f"{CAROL}#k1", CAROL, {"decentrl": 1})):
        assert call(*make_arguments(configured_store, "show", name, "--json")) == 0
        assert read_json(capsys)["did"] == kept
        assert call(*make_arguments(configured_store, "purge", name, "--yes", "--json")) == 0
        assert read_json(capsys)["protocols"] == protocols


def test_finds_queue_by_key_of_v1(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """A recipient that is a key of DIDComm v1 is found in any spelling of it."""
    result_of(configured_store.store.update_recipients(ALICE, [(V1_KEY, "add")], max_recipients=9))
    configured_store.put("a", "b", to=V1_KEY)
    for name in (V1_KEY, V1_BASE58, f"{V1_KEY}#{V1_KEY.removeprefix('did:key:')}"):
        assert call(*make_arguments(configured_store, "show", name, "--json")) == 0
        shown = read_json(capsys)
        assert (shown["did"], shown["messages"]) == (V1_KEY, 2)
    assert call(*make_arguments(configured_store, "purge", V1_BASE58, "--yes", "--json")) == 0
    assert read_json(capsys)["protocols"] == {"didcomm": 2}


@pytest.mark.parametrize("json_too", [(), ("--json",)])
@pytest.mark.parametrize(
    "did",
    [
        V1_BASE58,
        f"{V1_BASE58}1",
        V1_BASE58[1:],
        "did:example:nobody",
        "did:peer:2.Ez~1a2b",
        "~1a2b3c",
        "",
        "\udcff",
        f"{INBOX}x",
        "*",
        "did:example:%",
    ],
)
def test_unknown_did_is_an_error(
    did: str, json_too: tuple[str, ...], configured_store: ConfiguredStore, capsys: Capture
) -> None:
    """One line and exit status 1; nothing is removed."""
    configured_store.put("a")
    configured_store.send("b")
    for arguments in (
        ("show", did),
        ("purge", did),
        ("purge", did, "--yes"),
        ("show", did, "--protocol", "decentrl"),
    ):
        assert call(*make_arguments(configured_store, *arguments, *json_too)) == 1
        assert one_line(capsys).endswith("is not a registered DID")
    assert (configured_store.ids(), configured_store.ids(CAROL)) == (["a"], ["b"])


def test_registered_did_has_an_empty_queue(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """An unregistered DID has a queue while messages remain."""
    tag = configured_store.pseudonymizer.did(ALICE)
    for did in (ALICE, INBOX, DAVE, tag):
        for command in ("show", "purge"):
            assert call(*make_arguments(configured_store, command, did)) == 0
            assert capsys.readouterr().out.startswith("0 messages, 0 B, for ")
    configured_store.put("a")
    result_of(configured_store.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))
    for command in ("show", "purge"):
        assert call(*make_arguments(configured_store, command, INBOX, "--json")) == 0
        assert read_json(capsys)["messages"] == 1


def probe_did(configured_store: ConfiguredStore, *ids: str) -> str:
    """The DID of the daemon's probe, with an account and queued messages."""
    did = ProbeIdentities(read_identity(configured_store.config).root_secret).identity(NODE).did
    result_of(configured_store.store.grant(did))
    result_of(configured_store.store.update_recipients(did, [(did, "add")], max_recipients=9))
    configured_store.put(*ids, to=did)
    return did


def test_marks_probe_queue(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """In tables and in JSON."""
    did = probe_did(configured_store, "a", "b")
    configured_store.put("c")
    assert call(*make_arguments(configured_store, "list", "--json")) == 0
    output = read_json(capsys)["queues"]
    assert [(entry["did"], entry["self_test"]) for entry in output] == [(did, True), (INBOX, False)]
    assert call(*make_arguments(configured_store, "list")) == 0
    _, own, other, end = capsys.readouterr().out.splitlines()
    assert ("(self-test)" in own, "(self-test)" in other) == (True, False)
    assert end.startswith("2 queues with 3 messages")
    for name, marked in ((did, True), (INBOX, False)):
        assert call(*make_arguments(configured_store, "show", name, "--json")) == 0
        assert read_json(capsys)["self_test"] is marked
        assert call(*make_arguments(configured_store, "show", name)) == 0
        assert capsys.readouterr().out.splitlines()[-2].endswith("(self-test)") is marked


def test_refuses_to_purge_probe_queue(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """By any of its names."""
    did = probe_did(configured_store, "a")
    tags = configured_store.pseudonymizer
    for name in (did, f"{did}#k1", tags.did(did), Pseudonymizer("plain", tags.key).did(did)):
        for more in ((), ("--yes",), ("--yes", "--json"), ("--yes", "--id", "a"), ("--protocol", "decentrl")):
            assert call(*make_arguments(configured_store, "purge", name, *more)) == 1
            assert one_line(capsys).endswith("belongs to the daemon's self-test (GET /ready), which purges it itself")
    assert configured_store.ids(did) == ["a"]


def test_imitated_probe_did_is_a_normal_queue(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """Without the mediator's keys nobody can make a probe DID."""
    did = ProbeIdentities(b"of another").identity(NODE).did
    result_of(configured_store.store.update_recipients(ALICE, [(did, "add")], max_recipients=9))
    configured_store.put("a", to=did)
    assert call(*make_arguments(configured_store, "list", "--json")) == 0
    assert [entry["self_test"] for entry in read_json(capsys)["queues"]] == [False]
    assert call(*make_arguments(configured_store, "purge", did, "--yes")) == 0
    assert configured_store.ids(did) == []


def test_probe_queue_without_readable_keys(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """It is recognised by its form, and not purged; other queues need no keys."""
    did = probe_did(configured_store, "a")
    configured_store.put("b")
    configured_store.config.identity.keys.unlink()
    assert call(*make_arguments(configured_store, "list", "--json")) == 0
    assert {entry["did"]: entry["self_test"] for entry in read_json(capsys)["queues"]} == {did: True, INBOX: False}
    assert call(*make_arguments(configured_store, "purge", did, "--yes")) == 1
    path = configured_store.config.identity.keys
    assert one_line(capsys).startswith(f"cannot read {path}: No such file or directory; restore it from a backup, ")
    assert call(*make_arguments(configured_store, "purge", INBOX, "--yes")) == 0
    assert (configured_store.ids(did), configured_store.ids()) == (["a"], [])


def test_reading_keeps_delivery_marks(configured_store: ConfiguredStore) -> None:
    """The store is not opened as by a daemon."""
    configured_store.put("pushed")
    result_of(configured_store.store.mark_delivered(["pushed"]))
    assert (
        call(*make_arguments(configured_store, "list")) == call(*make_arguments(configured_store, "show", INBOX)) == 0
    )
    assert call(*make_arguments(configured_store, "purge", INBOX, "--id", "another", "--yes")) == 0
    (found,) = result_of(configured_store.store.find_messages(["pushed"]))
    assert found.status == "delivered"


def test_purge_without_confirmation_removes_nothing(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """It lists what would be removed, and logs nothing."""
    configured_store.put(*(f"m{number}" for number in range(12)))
    before = sorted(configured_store.config.log.directory.iterdir())
    assert call(*make_arguments(configured_store, "purge", INBOX)) == 0
    output = capsys.readouterr().out
    assert "m0" in output and "m9 " in output and "m10" not in output
    assert output.splitlines()[-2:] == [
        f"12 messages, 120 B, for {INBOX} would be removed; showing the first 10",
        "nothing was removed; add --yes to remove them",
    ]
    assert len(configured_store.ids()) == 12
    assert sorted(configured_store.config.log.directory.iterdir()) == before


def test_purges_messages_of_running_daemon(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """The ledger counts them, and the log has their lines."""
    configured_store.put("old", "older", size=100)
    configured_store.send("event")
    configured_store.clock.advance(9 * HOUR)
    configured_store.put("new")
    chosen = ("purge", INBOX, "--older-than", "2h", "--yes")
    assert call(*make_arguments(configured_store, *chosen)) == 0
    assert capsys.readouterr().out == "2 messages, 200 B, removed\n"
    assert configured_store.ids() == ["new"]
    assert configured_store.get_totals().messages == 2
    assert (configured_store.get_totals().bytes, configured_store.get_totals().recipients) == (16, 2)
    messages = MessageLedger(accepted=3, removed=2, waiting=1)
    assert result_of(configured_store.store.read_ledger()) == interface.StoreLedger(
        messages, MessageLedger(accepted=1, waiting=1)
    )
    assert call(*make_arguments(configured_store, "purge", CAROL, "--protocol", "decentrl", "--yes", "--json")) == 0
    assert read_json(capsys) == {
        "dry_run": False,
        "messages": 1,
        "bytes": 6,
        "protocols": {"decentrl": 1},
        "gone_before": 0,
    }
    assert configured_store.get_totals().messages == 1
    assert result_of(configured_store.store.read_ledger()) == interface.StoreLedger(
        messages, MessageLedger(accepted=1, removed=1)
    )


def test_purges_only_given_ids_of_recipient(configured_store: ConfiguredStore) -> None:
    configured_store.put("a", "b", "c")
    configured_store.put("d", to=ALICE)
    assert (
        call(*make_arguments(configured_store, "purge", INBOX, "--id", "a", "--id", "c", "--id", "d", "--yes")) == 0
    )
    assert configured_store.ids() == ["b"]
    assert configured_store.ids(ALICE) == ["d"]


@pytest.mark.parametrize("configured_store", ["plain", "keyed"], indirect=True)
def test_logs_each_purged_message(configured_store: ConfiguredStore) -> None:
    """In the daemon's log, whose counters agree."""
    configured_store.put("a", "b")
    result_of(configured_store.store.mark_delivered(["a"]))
    configured_store.send("e")
    for did in (INBOX, CAROL):
        assert call(*make_arguments(configured_store, "purge", did, "--yes")) == 0
    configured_store.daemon.events.rotate()
    check_purge_lines(configured_store)
    assert {line["node"] for line in configured_store.lines()} == {NODE}


def check_purge_lines(configured_store: ConfiguredStore) -> None:
    """Assert that three removals have been logged."""
    tags = configured_store.pseudonymizer
    named = {(line["msg"], line["rcpt"]) for line in configured_store.lines()}
    if configured_store.config.log.dids == "plain":
        assert named == {("a", INBOX), ("b", INBOX), ("e", CAROL)}
    else:
        assert not {text for pair in named for text in pair} & {"a", "b", "e", INBOX, CAROL}
    logged = [(line["msg"], line["rcpt"], line["proto"], line["reason"]) for line in configured_store.lines()]
    assert sorted(logged) == sorted(
        [
            (tags.message("a"), tags.did(INBOX), "didcomm", "purged"),
            (tags.message("b"), tags.did(INBOX), "didcomm", "purged"),
            (tags.message("e"), tags.did(CAROL), "decentrl", "purged"),
        ]
    )
    assert wrong_counter_lines(read_lines(configured_store.config.log.directory)) == []


def test_removes_nothing_while_log_is_blocked(
    configured_store: ConfiguredStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured_store.put("a")
    monkeypatch.setattr(BufferedLineFile, "flush", lambda self: False)
    configured_store.daemon.events.emit("proc.start", version="1", reason="test")
    assert call(*make_arguments(configured_store, "purge", INBOX, "--yes")) == 1
    assert one_line(capsys) == "nothing was removed: the event log cannot be written"
    assert configured_store.ids() == ["a"]


def test_lists_and_purges_many_messages(
    configured_store: ConfiguredStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a page or a transaction; messages that disappear meanwhile are skipped."""
    ids = [f"m{number:03}" for number in range(250)]
    configured_store.put(*ids)
    monkeypatch.setattr(store_access, "MAX_ROWS", 100)
    assert call(*make_arguments(configured_store, "show", INBOX, "--top", "1000", "--json")) == 0
    assert [entry["id"] for entry in read_json(capsys)["shown"]] == ids
    access = StoreAccess(configured_store.daemon.call, configured_store.config)
    entries = access.list_entries(INBOX)
    result_of(configured_store.store.acknowledge(ALICE, ids[:1]))
    assert access.purge(entries) == entries[1:]
    assert configured_store.ids() == []
    assert len(configured_store.lines()) == 249


@pytest.fixture
def offline_store(configured_store: ConfiguredStore, monkeypatch: pytest.MonkeyPatch) -> ConfiguredStore:
    """The store without its daemon; :func:`close` must be called before a command."""
    monkeypatch.undo()
    return configured_store


def close(configured_store: ConfiguredStore) -> None:
    """End the daemon and its store."""
    configured_store.daemon.events.stopService()
    for path in configured_store.config.log.directory.glob("events-*"):
        path.unlink()
    result_of(configured_store.store.close())


def reopen(configured_store: ConfiguredStore) -> None:
    """Open the store again."""
    result_of(configured_store.store.open())
    configured_store.daemon.events.startService()


@pytest.mark.parametrize("configured_store", ["plain", "keyed"], indirect=True)
def test_works_without_daemon(offline_store: ConfiguredStore, capsys: Capture) -> None:
    """The store is changed directly; ledger and log agree."""
    offline_store.put("a", "b")
    offline_store.send("e")
    close(offline_store)
    assert call(*make_arguments(offline_store, "list", "--json")) == 0
    assert read_json(capsys)["totals"] == {"queues": 2, "messages": 3, "bytes": 26}
    assert call(*make_arguments(offline_store, "show", offline_store.pseudonymizer.did(INBOX), "--json")) == 0
    assert [entry["id"] for entry in read_json(capsys)["shown"]] == ["a", "b"]
    for did in (INBOX, CAROL):
        assert call(*make_arguments(offline_store, "purge", did, "--yes")) == 0
    check_purge_lines(offline_store)
    lines = read_lines(offline_store.config.log.directory)
    assert {line["node"] for line in lines} == {f"{NODE}-operator"}
    for boot in {line["boot"] for line in lines}:
        own = [line for line in lines if line["boot"] == boot]
        events = [line["event"] for line in own]
        assert events[:2] == ["log.open", "proc.start"]
        assert events[-3:] == ["proc.stop", "counters", "log.close"]
    reopen(offline_store)
    ledgers = MessageLedger(accepted=2, removed=2), MessageLedger(accepted=1, removed=1)
    assert result_of(offline_store.store.read_ledger()) == interface.StoreLedger(*ledgers)


def test_refuses_database_of_unreachable_daemon(offline_store: ConfiguredStore, capsys: Capture) -> None:
    offline_store.put("a")
    lock = DatabaseFileLock(offline_store.config.storage.sqlite.path)
    lock.take()
    for command in (("list",), ("purge", INBOX, "--yes")):
        assert call(*make_arguments(offline_store, *command)) == 1
        assert one_line(capsys) == (
            f"a daemon uses {offline_store.config.storage.sqlite.path}; no daemon listens on "
            f"{offline_store.config.control_socket}: if one runs with this configuration, see its log, set "
            "control_socket to a path that it can write, and restart it"
        )
    text = offline_store.path.read_text("utf-8")
    offline_store.path.write_text(text.replace("control_socket: control.sock", "control_socket: null"), "utf-8")
    assert call(*make_arguments(offline_store, "list")) == 1
    assert one_line(capsys).endswith(
        "; control_socket is null: set it to a path that the daemon can write, and restart the daemon"
    )
    lock.release()
    assert offline_store.ids() == ["a"]


def test_removes_nothing_without_log_directory(offline_store: ConfiguredStore, capsys: Capture) -> None:
    offline_store.put("a")
    log = offline_store.config.log.directory
    close(offline_store)
    shutil.rmtree(log)
    assert call(*make_arguments(offline_store, "purge", INBOX, "--yes")) == 1
    assert one_line(capsys) == f"nothing was removed: the log directory {log} does not exist"
    reopen(offline_store)
    assert offline_store.ids() == ["a"]


@pytest.mark.system
@pytest.mark.parametrize("room", [0, 100])
def test_removes_nothing_if_log_is_full(room: int, offline_store: ConfiguredStore) -> None:
    offline_store.put("a", "b")
    close(offline_store)
    script = (
        "import resource, sys; from mediatord.cli.store_access import PurgeEventLog; opened = PurgeEventLog._open; "
        f"limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); "
        "PurgeEventLog._open = lambda self: (limit(), opened(self))[1]; "
        "from mediatord.cli import main; main(sys.argv[1:])"
    )
    # -B: no compiled modules either; truncated ones would affect other processes.
    command = [sys.executable, "-B", "-c", script, *make_arguments(offline_store, "purge", INBOX, "--yes")]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr == "mediatord: nothing was removed: the event log cannot be written\n"
    reopen(offline_store)
    assert offline_store.ids() == ["a", "b"]


@pytest.mark.system
def test_killed_purge_can_be_repeated(offline_store: ConfiguredStore) -> None:
    """The next one removes the rest, and no message has two lines."""
    ids = [f"m{number:03}" for number in range(999)]
    offline_store.put(*ids)
    close(offline_store)
    log = offline_store.config.log.directory
    command = [sys.executable, "-m", "mediatord", *make_arguments(offline_store, "purge", INBOX, "--yes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None and not list(log.glob("events.jsonl")):
            pass
        process.kill()
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    logged = [line["msg"] for line in offline_store.lines()]
    assert len(set(logged)) == len(logged) >= 999 - MAX_PURGE_BATCH
    reopen(offline_store)
    assert offline_store.ids() == []
    assert result_of(offline_store.store.read_ledger()).didcomm == MessageLedger(accepted=999, removed=999)


def test_segment_gets_owner_of_log_directory(offline_store: ConfiguredStore) -> None:
    """Even if root purges."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    offline_store.put("a")
    close(offline_store)
    log = offline_store.config.log.directory
    os.chown(log, 12345, 12345)
    assert call(*make_arguments(offline_store, "purge", INBOX, "--yes")) == 0
    (segment,) = log.glob("events-*")
    assert (segment.stat().st_uid, segment.stat().st_gid) == (12345, 12345)


@pytest.mark.parametrize("command", ["list", "show", "purge"])
def test_refuses_memory_store(command: str, offline_store: ConfiguredStore, capsys: Capture) -> None:
    offline_store.path.write_text(offline_store.path.read_text().replace("backend: sqlite", "backend: memory"))
    arguments = [command] if command == "list" else [command, INBOX]
    assert call(*make_arguments(offline_store, *arguments)) == 1
    line = one_line(capsys)
    assert line.startswith("storage.backend memory: only a running daemon can read this store; ")
    assert f"no daemon listens on {offline_store.config.control_socket}: " in line


def test_missing_database_is_an_error(offline_store: ConfiguredStore, capsys: Capture) -> None:
    """None is created."""
    path = offline_store.config.storage.sqlite.path
    text = offline_store.path.read_text()
    offline_store.path.write_text(text.replace(f"path: {path.name}", "path: other.sqlite3"))
    assert call(*make_arguments(offline_store, "list")) == 1
    assert one_line(capsys).endswith("other.sqlite3 does not exist; the daemon creates it when it first starts")
    assert not path.with_name("other.sqlite3").exists()
    path.with_name("other.sqlite3").write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    assert call(*make_arguments(offline_store, "list")) == 1
    assert "other.sqlite3: file is not a database" in one_line(capsys)


def test_invalid_duration_is_usage_error(configured_store: ConfiguredStore, capsys: Capture) -> None:
    assert call(*make_arguments(configured_store, "purge", INBOX, "--older-than", "soon")) == 2
    assert "'--older-than': expected a duration such as 72h" in one_line(capsys)
