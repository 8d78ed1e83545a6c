"""`mediatord queue`: looking into queues and taking messages out, beside a store that is in use."""

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
        """As :meth:`ControlClient.call`, and what is sent is JSON both ways."""
        sent = json.loads(json.dumps(arguments))
        results: list[Any] = []
        running = Deferred.fromCoroutine(self.operations.run(operation, sent))
        running.addBoth(results.append)
        if isinstance(results[0], Failure):
            results[0].trap(ControlError)
            raise StartupError(str(results[0].value))
        return json.loads(json.dumps(results[0]))

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class ConfiguredStore:
    """
    A configuration with its store, which a daemon in this process has open.

    :ivar began: the store's time at first, seconds.
    """

    path: Path
    config: Config
    clock: Clock
    store: SQLiteStore
    began: float
    daemon: InProcessDaemon

    def put(self, *ids: str, to: str = INBOX, size: int = 10, due_in: float | None = None) -> None:
        """Deposit messages, now by the store's clock."""
        now = self.clock.seconds()
        payloads = [make_payload(id, id.encode().ljust(size)) for id in ids]
        due_at = None if due_in is None else now + due_in
        result_of(self.store.enqueue(to, payloads, expires_at=now + 72 * HOUR, due_at=due_at))

    def send(self, *ids: str) -> None:
        """Deliver events from DAVE to CAROL."""
        for id in ids:
            event = PendingEvent(id, CAROL, DAVE, "secret", self.clock.seconds())
            assert result_of(self.store.decentrl.enqueue_event(CommandGuard(id.encode(), 9e9), event)) is None

    def waiting(self) -> QueueTotals:
        """As the store says it."""
        found: QueueTotals = result_of(self.store.get_queue_totals())
        return found

    def ids(self, did: str = INBOX) -> list[str]:
        """What waits, as found by the command."""
        return [one.id for one in StoreAccess(self.daemon.call, self.config).list_entries(did)]

    @property
    def pseudonymizer(self) -> Pseudonymizer:
        """As the daemon's log uses it."""
        return self.daemon.pseudonymizer

    def lines(self) -> list[dict[str, Any]]:
        """What the event log says was removed."""
        return [line for line in read_lines(self.config.log.directory) if line["event"] == "msg.remove"]


@pytest.fixture
def office(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ConfiguredStore]:
    """With pseudonyms in the log unless the parameter is another value of `log.dids`."""
    did_mode = getattr(request, "param", "keyed")
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    path = tmp_path / "m" / "mediator.yaml"
    text = path.read_text("utf-8")
    path.write_text(text.replace("node: null", f"node: {NODE}").replace("dids: plain", f"dids: {did_mode}"), "utf-8")
    config = load_config(path)
    config.log.directory.mkdir()
    clock = ImmediateClock()
    began = datetime.now(UTC).timestamp() - 10 * HOUR
    clock.rightNow = began
    store = make_sqlite_store(clock, config.storage.sqlite.path)
    result_of(store.open())
    result_of(store.grant(ALICE))
    result_of(store.update_recipients(ALICE, [(INBOX, "add"), (ALICE, "add")], max_recipients=9))
    contract = Contract("c", CAROL, DAVE, 9e9, b"digest", b"{}")
    result_of(store.decentrl.save_contract(CommandGuard(b"contract", 9e9), contract))
    daemon = InProcessDaemon(config, clock, store)
    daemon.events.startService()
    monkeypatch.setattr(store_access, "connect_daemon", lambda config: daemon)
    yield ConfiguredStore(path, config, clock, store, began, daemon)
    if daemon.events.running:
        daemon.events.stopService()
    result_of(store.close())


def asked(office: ConfiguredStore, *arguments: str) -> Sequence[str]:
    """The arguments for `mediatord queue`, with the configuration."""
    return ("queue", *arguments, "--config", str(office.path))


def printed(capture: Capture) -> Any:
    """The one JSON document."""
    captured = capture.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_list(office: ConfiguredStore, capsys: Capture) -> None:
    """The longest queues come first, those of both protocols, and the sum is of all."""
    office.put("a", "b", "c", size=1000)
    office.put("d", to=ALICE)
    office.clock.advance(HOUR)
    office.send("e", "f")

    assert call(*asked(office, "list", "--json")) == 0
    shown = printed(capsys)
    assert [
        (one["protocol"], one["did"], one["account"], one["messages"], one["bytes"]) for one in shown["queues"]
    ] == [
        ("didcomm", INBOX, ALICE, 3, 3000),
        ("decentrl", CAROL, CAROL, 2, 12),
        ("didcomm", ALICE, ALICE, 1, 10),
    ]
    assert [one["oldest_at"] for one in shown["queues"]] == [office.began, office.began + HOUR, office.began]
    assert shown["totals"] == {"queues": 3, "messages": 6, "bytes": 3022}

    assert call(*asked(office, "list", "--top", "1")) == 0
    head, row, end = capsys.readouterr().out.splitlines()
    assert head.split() == ["protocol", "recipient", "account", "messages", "size", "oldest"]
    assert row.split()[:8] == ["didcomm", INBOX, ALICE, "3", "2.9", "KiB", "10", "h"]
    assert end == "3 queues with 6 messages, 3.0 KiB; showing the longest 1"

    assert call(*asked(office, "list", "--protocol", "decentrl", "--json")) == 0
    assert [one["did"] for one in printed(capsys)["queues"]] == [CAROL]
    assert call(*asked(office, "list", "--protocol", "decentrl")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 queue with 2 messages, 12 B"


def test_list_of_nothing(office: ConfiguredStore, capsys: Capture) -> None:
    """Empty queues are none."""
    assert call(*asked(office, "list")) == 0
    assert capsys.readouterr().out == "0 queues with 0 messages, 0 B\n"


def test_show(office: ConfiguredStore, capsys: Capture) -> None:
    """Messages of a recipient are shown with all that is known of them but their payloads."""
    office.put("pushed", "waiting")
    result_of(office.store.mark_delivered(["pushed"]))
    office.put("later", due_in=20 * HOUR)
    office.send("event")

    assert call(*asked(office, "show", INBOX, "--json")) == 0
    shown = printed(capsys)
    assert shown["messages"] == 3
    fields = ("id", "status", "pushes", "due_at")
    assert [tuple(one[name] for name in fields) for one in shown["shown"]] == [
        ("pushed", "delivered", 1, None),
        ("waiting", "pending", 0, None),
        ("later", "pending", 0, office.began + 20 * HOUR),
    ]
    assert {one["expires_at"] for one in shown["shown"]} == {office.began + 72 * HOUR}

    assert call(*asked(office, "show", CAROL)) == 0
    text = capsys.readouterr().out
    assert "event" in text and "never" in text
    assert "secret" not in text
    assert text.endswith(f"1 message, 6 B, for {CAROL}\n")


def test_nothing_is_done_to_the_terminal(office: ConfiguredStore, capsys: Capture) -> None:
    """DIDs and ids that an import has brought are shown, and their times, whatever they are."""
    did = "did:example:\x1b[2Jtitle\x07"
    result_of(office.store.update_recipients(ALICE, [(did, "add")], max_recipients=9))
    office.clock.rightNow = 1e15  # of a year that no calendar has
    office.put("\x9bid", to=did)
    for arguments in (("list",), ("show", did), ("purge", did), ("purge", did, "--yes")):
        assert call(*asked(office, *arguments)) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and "\x9b" not in shown
        assert "removed" in shown or "\\x1b[2Jtitle\\x07" in shown
        assert arguments[0] != "show" or "\\x9bid" in shown


@pytest.mark.system
def test_dids_on_a_terminal(office: ConfiguredStore) -> None:
    """Are those that wait: `:key:` is no picture of one."""
    office.put("a")
    command = [sys.executable, "-m", "mediatord", *asked(office, "list")]
    near, far = pty.openpty()
    with os.fdopen(near, "rb", buffering=0) as terminal:
        with subprocess.Popen(command, stdout=far, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"}):
            os.close(far)
        shown = b""
        # What was written last may come in pieces; a terminal that nobody has any more is an error.
        with suppress(OSError):
            while piece := terminal.read(65_536):
                shown += piece
        assert INBOX.encode() in shown


def test_tags_stand_for_dids(office: ConfiguredStore, capsys: Capture) -> None:
    """A long DID is shown short, and is found by that as well as by its pseudonym in the log."""
    long = "did:peer:2." + "Ez6LS" * 40
    result_of(office.store.update_recipients(ALICE, [(long, "add")], max_recipients=9))
    office.put("a", to=long)
    office.send("e")
    assert call(*asked(office, "list")) == 0
    shown = next(word for word in capsys.readouterr().out.split() if word.startswith("did:peer:2."))
    assert shown == Pseudonymizer("plain", office.pseudonymizer.key).did(long)
    assert len(shown) < 50
    for name in (shown, office.pseudonymizer.did(long)):
        assert call(*asked(office, "show", name, "--json")) == 0
        assert [one["id"] for one in printed(capsys)["shown"]] == ["a"]
    assert call(*asked(office, "purge", office.pseudonymizer.did(CAROL), "--yes", "--json")) == 0
    assert printed(capsys)["protocols"] == {"decentrl": 1}


def test_any_form_of_a_did(office: ConfiguredStore, capsys: Capture) -> None:
    """Recipients, accounts and identities are found by all forms of their DIDs, also of one that is left over."""
    bob = "did:web:bob.example"
    result_of(office.store.grant(bob))
    for given in (f"{bob}#k1", "did:web:Bob.example%3A443"):
        assert call(*asked(office, "show", given, "--json")) == 0
        assert printed(capsys)["did"] == bob
    result_of(office.store.update_recipients(ALICE, [(f"{bob}#k1", "add")], max_recipients=9))
    office.put("a", to=bob)
    result_of(office.store.update_recipients(ALICE, [(f"{bob}#k1", "remove")], max_recipients=9))
    office.send("e")
    for given, kept, protocols in ((f"{bob}#k1", bob, {"didcomm": 1}), (f"{CAROL}#k1", CAROL, {"decentrl": 1})):
        assert call(*asked(office, "show", given, "--json")) == 0
        assert printed(capsys)["did"] == kept
        assert call(*asked(office, "purge", given, "--yes", "--json")) == 0
        assert printed(capsys)["protocols"] == protocols


@pytest.mark.parametrize("json_too", [(), ("--json",)])
@pytest.mark.parametrize(
    "did", ["did:example:nobody", "did:peer:2.Ez~1a2b", "~1a2b3c", "", "\udcff", f"{INBOX}x", "*", "did:example:%"]
)
def test_dids_that_nobody_has(did: str, json_too: tuple[str, ...], office: ConfiguredStore, capsys: Capture) -> None:
    """Each costs a line and status 1, and nothing goes, wherever the mistake is."""
    office.put("a")
    office.send("b")
    for arguments in (
        ("show", did),
        ("purge", did),
        ("purge", did, "--yes"),
        ("show", did, "--protocol", "decentrl"),
    ):
        assert call(*asked(office, *arguments, *json_too)) == 1
        assert one_line(capsys).endswith("is not a registered DID")
    assert (office.ids(), office.ids(CAROL)) == (["a"], ["b"])


def test_dids_that_nothing_waits_for(office: ConfiguredStore, capsys: Capture) -> None:
    """Whoever is registered has a queue, though it is empty; one that was given up has one while something waits."""
    tag = office.pseudonymizer.did(ALICE)
    for did in (ALICE, INBOX, DAVE, tag):
        for command in ("show", "purge"):
            assert call(*asked(office, command, did)) == 0
            assert capsys.readouterr().out.startswith("0 messages, 0 B, for ")
    office.put("a")
    result_of(office.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))
    for command in ("show", "purge"):
        assert call(*asked(office, command, INBOX, "--json")) == 0
        assert printed(capsys)["messages"] == 1


def self_test(office: ConfiguredStore, *ids: str) -> str:
    """The DID of the daemon's self-test, with an account for which something waits."""
    did = ProbeIdentities(read_identity(office.config).root_secret).identity(NODE).did
    result_of(office.store.grant(did))
    result_of(office.store.update_recipients(did, [(did, "add")], max_recipients=9))
    office.put(*ids, to=did)
    return did


def test_the_self_test_is_marked(office: ConfiguredStore, capsys: Capture) -> None:
    """What the daemon sends to itself is not taken for a wallet's, in tables and by programs."""
    did = self_test(office, "a", "b")
    office.put("c")
    assert call(*asked(office, "list", "--json")) == 0
    shown = printed(capsys)["queues"]
    assert [(one["did"], one["self_test"]) for one in shown] == [(did, True), (INBOX, False)]
    assert call(*asked(office, "list")) == 0
    _, own, other, end = capsys.readouterr().out.splitlines()
    assert ("(self-test)" in own, "(self-test)" in other) == (True, False)
    assert end.startswith("2 queues with 3 messages")
    for asked_for, marked in ((did, True), (INBOX, False)):
        assert call(*asked(office, "show", asked_for, "--json")) == 0
        assert printed(capsys)["self_test"] is marked
        assert call(*asked(office, "show", asked_for)) == 0
        assert capsys.readouterr().out.rstrip("\n").endswith("(self-test)") is marked


def test_the_self_test_is_not_purged(office: ConfiguredStore, capsys: Capture) -> None:
    """By whatever name it is called, and however little is asked for."""
    did = self_test(office, "a")
    tags = office.pseudonymizer
    for name in (did, f"{did}#k1", tags.did(did), Pseudonymizer("plain", tags.key).did(did)):
        for more in ((), ("--yes",), ("--yes", "--json"), ("--yes", "--id", "a"), ("--protocol", "decentrl")):
            assert call(*asked(office, "purge", name, *more)) == 1
            assert one_line(capsys).endswith("belongs to the daemon's self-test (GET /ready), which purges it itself")
    assert office.ids(did) == ["a"]


def test_who_only_looks_like_the_self_test(office: ConfiguredStore, capsys: Capture) -> None:
    """Anybody can make such a DID, and fill its queue; without the mediator's keys it is one like any other."""
    did = ProbeIdentities(b"of another").identity(NODE).did
    result_of(office.store.update_recipients(ALICE, [(did, "add")], max_recipients=9))
    office.put("a", to=did)
    assert call(*asked(office, "list", "--json")) == 0
    assert [one["self_test"] for one in printed(capsys)["queues"]] == [False]
    assert call(*asked(office, "purge", did, "--yes")) == 0
    assert office.ids(did) == []


def test_the_self_test_without_keys(office: ConfiguredStore, capsys: Capture) -> None:
    """Whoever may not read them sees the form of it, and removes nothing that may be it; other queues need none."""
    did = self_test(office, "a")
    office.put("b")
    office.config.identity.keys.unlink()
    assert call(*asked(office, "list", "--json")) == 0
    assert {one["did"]: one["self_test"] for one in printed(capsys)["queues"]} == {did: True, INBOX: False}
    assert call(*asked(office, "purge", did, "--yes")) == 1
    assert one_line(capsys) == f"cannot read {office.config.identity.keys}: No such file or directory"
    assert call(*asked(office, "purge", INBOX, "--yes")) == 0
    assert (office.ids(did), office.ids()) == (["a"], [])


def test_looking_changes_nothing(office: ConfiguredStore) -> None:
    """What a daemon has pushed stays pushed: the store is not opened as a daemon opens it."""
    office.put("pushed")
    result_of(office.store.mark_delivered(["pushed"]))
    assert call(*asked(office, "list")) == call(*asked(office, "show", INBOX)) == 0
    assert call(*asked(office, "purge", INBOX, "--id", "another", "--yes")) == 0
    (found,) = result_of(office.store.find_messages(["pushed"]))
    assert found.status == "delivered"


def test_purge_shows_first(office: ConfiguredStore, capsys: Capture) -> None:
    """Without --yes nothing is removed and nothing is logged; it is shown what would be."""
    office.put(*(f"m{number}" for number in range(12)))
    before = sorted(office.config.log.directory.iterdir())
    assert call(*asked(office, "purge", INBOX)) == 0
    shown = capsys.readouterr().out
    assert "m0" in shown and "m9 " in shown and "m10" not in shown
    assert shown.splitlines()[-2:] == [
        f"12 messages, 120 B, for {INBOX} would be removed; showing the first 10",
        "nothing was removed; add --yes to remove them",
    ]
    assert len(office.ids()) == 12
    assert sorted(office.config.log.directory.iterdir()) == before


def test_purge(office: ConfiguredStore, capsys: Capture) -> None:
    """What is meant is removed from the store that the daemon has open, counted off, and told."""
    office.put("old", "older", size=100)
    office.send("event")
    office.clock.advance(9 * HOUR)
    office.put("new")
    chosen = ("purge", INBOX, "--older-than", "2h", "--yes")
    assert call(*asked(office, *chosen)) == 0
    assert capsys.readouterr().out == "2 messages, 200 B, removed\n"
    assert office.ids() == ["new"]
    assert office.waiting().messages == 2
    assert (office.waiting().bytes, office.waiting().recipients) == (16, 2)
    messages = MessageLedger(accepted=3, removed=2, waiting=1)
    assert result_of(office.store.read_ledger()) == interface.StoreLedger(
        messages, MessageLedger(accepted=1, waiting=1)
    )
    assert call(*asked(office, "purge", CAROL, "--protocol", "decentrl", "--yes", "--json")) == 0
    assert printed(capsys) == {
        "dry_run": False,
        "messages": 1,
        "bytes": 6,
        "protocols": {"decentrl": 1},
        "gone_before": 0,
    }
    assert office.waiting().messages == 1
    assert result_of(office.store.read_ledger()) == interface.StoreLedger(
        messages, MessageLedger(accepted=1, removed=1)
    )


def test_purge_by_id(office: ConfiguredStore) -> None:
    """Only those named go, and only if they are for this recipient."""
    office.put("a", "b", "c")
    office.put("d", to=ALICE)
    assert call(*asked(office, "purge", INBOX, "--id", "a", "--id", "c", "--id", "d", "--yes")) == 0
    assert office.ids() == ["b"]
    assert office.ids(ALICE) == ["d"]


@pytest.mark.parametrize("office", ["plain", "keyed"], indirect=True)
def test_purged_messages_are_logged(office: ConfiguredStore) -> None:
    """Each removal has its line in the daemon's own log, whose counters agree with it."""
    office.put("a", "b")
    result_of(office.store.mark_delivered(["a"]))
    office.send("e")
    for did in (INBOX, CAROL):
        assert call(*asked(office, "purge", did, "--yes")) == 0
    office.daemon.events.rotate()
    check_purge_lines(office)
    assert {line["node"] for line in office.lines()} == {NODE}


def check_purge_lines(office: ConfiguredStore) -> None:
    """Three removals have been logged."""
    tags = office.pseudonymizer
    named = {(line["msg"], line["rcpt"]) for line in office.lines()}
    if office.config.log.dids == "plain":
        assert named == {("a", INBOX), ("b", INBOX), ("e", CAROL)}
    else:
        assert not {text for pair in named for text in pair} & {"a", "b", "e", INBOX, CAROL}
    told = [(line["msg"], line["rcpt"], line["proto"], line["reason"]) for line in office.lines()]
    assert sorted(told) == sorted(
        [
            (tags.message("a"), tags.did(INBOX), "didcomm", "purged"),
            (tags.message("b"), tags.did(INBOX), "didcomm", "purged"),
            (tags.message("e"), tags.did(CAROL), "decentrl", "purged"),
        ]
    )
    assert wrong_counter_lines(read_lines(office.config.log.directory)) == []


def test_nothing_is_removed_that_the_daemon_cannot_log(
    office: ConfiguredStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the daemon's log takes no lines, messages stay."""
    office.put("a")
    monkeypatch.setattr(BufferedLineFile, "flush", lambda self: False)
    office.daemon.events.emit("proc.start", version="1", reason="test")
    assert call(*asked(office, "purge", INBOX, "--yes")) == 1
    assert one_line(capsys) == "nothing was removed: the event log cannot be written"
    assert office.ids() == ["a"]


def test_many_entries(office: ConfiguredStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries than a page or a transaction has are all listed and removed, but not one that goes meanwhile."""
    ids = [f"m{number:03}" for number in range(250)]
    office.put(*ids)
    monkeypatch.setattr(store_access, "MAX_ROWS", 100)
    assert call(*asked(office, "show", INBOX, "--top", "1000", "--json")) == 0
    assert [one["id"] for one in printed(capsys)["shown"]] == ids
    access = StoreAccess(office.daemon.call, office.config)
    entries = access.list_entries(INBOX)
    result_of(office.store.acknowledge(ALICE, ids[:1]))
    assert access.purge(entries) == entries[1:]
    assert office.ids() == []
    assert len(office.lines()) == 249


@pytest.fixture
def stopped(office: ConfiguredStore, monkeypatch: pytest.MonkeyPatch) -> ConfiguredStore:
    """The office without its daemon; the store is open in it until :func:`close` is called."""
    monkeypatch.undo()
    return office


def close(office: ConfiguredStore) -> None:
    """End the daemon and its store."""
    office.daemon.events.stopService()
    for path in office.config.log.directory.glob("events-*"):
        path.unlink()
    result_of(office.store.close())


def reopen(office: ConfiguredStore) -> None:
    """Open the store again."""
    result_of(office.store.open())
    office.daemon.events.startService()


@pytest.mark.parametrize("office", ["plain", "keyed"], indirect=True)
def test_without_a_daemon(stopped: ConfiguredStore, capsys: Capture) -> None:
    """A store that no daemon uses is read and changed directly, and counted off as by a daemon."""
    stopped.put("a", "b")
    stopped.send("e")
    close(stopped)
    assert call(*asked(stopped, "list", "--json")) == 0
    assert printed(capsys)["totals"] == {"queues": 2, "messages": 3, "bytes": 26}
    assert call(*asked(stopped, "show", stopped.pseudonymizer.did(INBOX), "--json")) == 0
    assert [one["id"] for one in printed(capsys)["shown"]] == ["a", "b"]
    for did in (INBOX, CAROL):
        assert call(*asked(stopped, "purge", did, "--yes")) == 0
    check_purge_lines(stopped)
    lines = read_lines(stopped.config.log.directory)
    assert {line["node"] for line in lines} == {f"{NODE}-operator"}
    for boot in {line["boot"] for line in lines}:
        own = [line for line in lines if line["boot"] == boot]
        events = [line["event"] for line in own]
        assert events[:2] == ["log.open", "proc.start"]
        assert events[-3:] == ["proc.stop", "counters", "log.close"]
    reopen(stopped)
    ledgers = MessageLedger(accepted=2, removed=2), MessageLedger(accepted=1, removed=1)
    assert result_of(stopped.store.read_ledger()) == interface.StoreLedger(*ledgers)


def test_a_daemon_that_does_not_listen(stopped: ConfiguredStore, capsys: Capture) -> None:
    """While a daemon has the store, nobody else opens it."""
    stopped.put("a")
    lock = DatabaseFileLock(stopped.config.storage.sqlite.path)
    lock.take()
    for command in (("list",), ("purge", INBOX, "--yes")):
        assert call(*asked(stopped, *command)) == 1
        assert one_line(capsys) == (
            f"a daemon uses {stopped.config.storage.sqlite.path}; no daemon listens on "
            f"{stopped.config.control_socket}: if one runs with this configuration, see its log, set "
            "control_socket to a path that it can write, and restart it"
        )
    text = stopped.path.read_text("utf-8")
    stopped.path.write_text(text.replace("control_socket: control.sock", "control_socket: null"), "utf-8")
    assert call(*asked(stopped, "list")) == 1
    assert one_line(capsys).endswith(
        "; control_socket is null: set it to a path that the daemon can write, and restart the daemon"
    )
    lock.release()
    assert stopped.ids() == ["a"]


def test_nothing_is_removed_without_a_log(stopped: ConfiguredStore, capsys: Capture) -> None:
    """Where no daemon writes a log, its lines would be lost."""
    stopped.put("a")
    log = stopped.config.log.directory
    close(stopped)
    shutil.rmtree(log)
    assert call(*asked(stopped, "purge", INBOX, "--yes")) == 1
    assert one_line(capsys) == f"nothing was removed: the log directory {log} does not exist"
    reopen(stopped)
    assert stopped.ids() == ["a"]


@pytest.mark.system
@pytest.mark.parametrize("room", [0, 100])
def test_nothing_is_removed_that_cannot_be_logged(room: int, stopped: ConfiguredStore) -> None:
    """Without room for lines a message stays."""
    stopped.put("a", "b")
    close(stopped)
    script = (
        "import resource, sys; from mediatord.cli.store_access import PurgeEventLog; opened = PurgeEventLog._open; "
        f"limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); "
        "PurgeEventLog._open = lambda self: (limit(), opened(self))[1]; "
        "from mediatord.cli import main; main(sys.argv[1:])"
    )
    # -B: nor for compiled modules, which others would find torn.
    command = [sys.executable, "-B", "-c", script, *asked(stopped, "purge", INBOX, "--yes")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mediatord: nothing was removed: the event log cannot be written\n"
    reopen(stopped)
    assert stopped.ids() == ["a", "b"]


@pytest.mark.system
def test_killed_for_real(stopped: ConfiguredStore) -> None:
    """Wherever a removal is killed, another one removes the rest, and no message has two lines."""
    ids = [f"m{number:03}" for number in range(999)]
    stopped.put(*ids)
    close(stopped)
    log = stopped.config.log.directory
    command = [sys.executable, "-m", "mediatord", *asked(stopped, "purge", INBOX, "--yes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None and not list(log.glob("events.jsonl")):
            pass
        process.kill()
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    told = [line["msg"] for line in stopped.lines()]
    assert len(set(told)) == len(told) >= 999 - MAX_PURGE_BATCH
    reopen(stopped)
    assert stopped.ids() == []
    assert result_of(stopped.store.read_ledger()).didcomm == MessageLedger(accepted=999, removed=999)


def test_the_log_belongs_to_the_daemon(stopped: ConfiguredStore) -> None:
    """A segment that root writes is given to the owner of the directory."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    stopped.put("a")
    close(stopped)
    log = stopped.config.log.directory
    os.chown(log, 12345, 12345)
    assert call(*asked(stopped, "purge", INBOX, "--yes")) == 0
    (segment,) = log.glob("events-*")
    assert (segment.stat().st_uid, segment.stat().st_gid) == (12345, 12345)


@pytest.mark.parametrize("command", ["list", "show", "purge"])
def test_memory(command: str, stopped: ConfiguredStore, capsys: Capture) -> None:
    """Nobody can look into the memory of a daemon that does not run."""
    stopped.path.write_text(stopped.path.read_text().replace("backend: sqlite", "backend: memory"))
    arguments = [command] if command == "list" else [command, INBOX]
    assert call(*asked(stopped, *arguments)) == 1
    line = one_line(capsys)
    assert line.startswith("storage.backend memory: only a running daemon can read this store; ")
    assert f"no daemon listens on {stopped.config.control_socket}: " in line


def test_no_database(stopped: ConfiguredStore, capsys: Capture) -> None:
    """Where no daemon has run there is nothing to look into, and none is made."""
    path = stopped.config.storage.sqlite.path
    text = stopped.path.read_text()
    stopped.path.write_text(text.replace(f"path: {path.name}", "path: other.sqlite3"))
    assert call(*asked(stopped, "list")) == 1
    assert one_line(capsys).endswith("other.sqlite3 does not exist; a daemon creates it at its first start")
    assert not path.with_name("other.sqlite3").exists()
    path.with_name("other.sqlite3").write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    assert call(*asked(stopped, "list")) == 1
    assert "other.sqlite3: file is not a database" in one_line(capsys)


def test_wrong_usage(office: ConfiguredStore, capsys: Capture) -> None:
    """A time that is none costs a line."""
    assert call(*asked(office, "purge", INBOX, "--older-than", "soon")) == 2
    assert "'--older-than': expected a duration such as 72h" in one_line(capsys)
