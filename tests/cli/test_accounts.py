"""`mediatord accounts`: list, show and remove accounts while the daemon runs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from mediatord.observability.pseudonyms import Pseudonymizer, read_pseudonym_keys
from mediatord.store.interfaces.devices import Device
from mediatord.store.interfaces.v1_connections import V1Connection
from tests.cli.test_commands import Capture, call, one_line
from tests.cli.test_queue import (
    ALICE,
    BOB,
    HOUR,
    INBOX,
    V1_BASE58,
    V1_KEY,
    ConfiguredStore,
    configured_store,
    read_json,
)
from tests.store.builders import result_of

__all__ = ["configured_store"]


def make_arguments(configured_store: ConfiguredStore, *arguments: str) -> tuple[str, ...]:
    """Arguments of `mediatord accounts`, with the configuration."""
    return ("accounts", *arguments, "--config", str(configured_store.path))


def run_json(configured_store: ConfiguredStore, capture: Capture, *arguments: str) -> Any:
    """Run a command, and return its JSON document."""
    assert call(*make_arguments(configured_store, *arguments, "--json")) == 0
    return read_json(capture)


def test_lists_accounts(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """Newest first, with queued messages and the total."""
    configured_store.put("a", "b")
    configured_store.clock.advance(HOUR)
    result_of(configured_store.store.grant(BOB))
    found = run_json(configured_store, capsys, "list")
    assert found["total"] == 2
    assert [account["did"] for account in found["accounts"]] == [BOB, ALICE]
    assert [
        (account["recipients"], account["messages"], account["bytes"], account["used"])
        for account in found["accounts"]
    ] == [
        (0, 0, 0, False),
        (2, 2, 20, True),
    ]
    assert [account["did"] for account in run_json(configured_store, capsys, "list", "--top", "1")["accounts"]] == [
        BOB
    ]
    assert call(*make_arguments(configured_store, "list", "--top", "1")) == 0
    text = capsys.readouterr().out
    assert datetime.fromtimestamp(configured_store.start_time + HOUR, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") in text
    assert text.endswith("2 accounts; showing the newest 1\n")


def test_shows_account_by_any_name(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """By any form of its DID or by its pseudonym, with all its registrations."""
    key = f"{INBOX}#key-1"
    result_of(configured_store.store.update_recipients(ALICE, [(key, "add")], max_recipients=9))
    pseudonym = Pseudonymizer("keyed", read_pseudonym_keys(configured_store.config.log_key_path)[-1]).did(ALICE)
    for name in (ALICE, f"{ALICE}#key-1", pseudonym):
        record = run_json(configured_store, capsys, "show", name)
        assert (record["did"], record["registered"], record["recipients"]) == (ALICE, [INBOX, ALICE, key], 3)
        assert record["created_at"] == record["seen_at"] == configured_store.start_time
    assert call(*make_arguments(configured_store, "show", ALICE)) == 0
    assert key in capsys.readouterr().out


def test_shows_number_of_devices(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """Devices are counted by service, and are removed with the account."""
    devices = configured_store.store.devices
    assert call(*make_arguments(configured_store, "show", ALICE)) == 0
    assert "push devices  none\n" in capsys.readouterr().out
    for number, service in enumerate(("fcm", "web_push", "fcm")):
        result_of(devices.set_device(ALICE, Device(b"%d" % number, service, b"sealed"), 10))
    assert run_json(configured_store, capsys, "show", ALICE)["devices"] == {"fcm": 2, "web_push": 1}
    assert call(*make_arguments(configured_store, "show", ALICE)) == 0
    assert "push devices  2 fcm, 1 web_push\n" in capsys.readouterr().out
    assert call(*make_arguments(configured_store, "remove", ALICE, "--yes")) == 0
    assert result_of(devices.count_devices()) == {}


def test_shows_protocol(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """Accounts of wallets that have connected with DIDComm v1 say so, and when; they are found by their key."""
    store, clock = configured_store.store, configured_store.clock
    connection = V1Connection(V1_KEY, "own key", "request")
    result_of(store.v1_connections.put_connection(connection, max_pending=1))
    clock.advance(HOUR)
    result_of(store.grant(V1_KEY))
    found = {one["did"]: one for one in run_json(configured_store, capsys, "list")["accounts"]}
    assert (found[ALICE]["protocol"], found[ALICE]["connected_at"]) == ("didcomm", None)
    assert (found[V1_KEY]["protocol"], found[V1_KEY]["connected_at"]) == ("didcomm_v1", configured_store.start_time)
    for name in (V1_KEY, V1_BASE58, f"{V1_KEY}#{V1_KEY.removeprefix('did:key:')}"):
        assert run_json(configured_store, capsys, "show", name)["did"] == V1_KEY
    assert call(*make_arguments(configured_store, "show", V1_BASE58)) == 0
    connected_at = datetime.fromtimestamp(configured_store.start_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert f"protocol      didcomm_v1, connected {connected_at}\n" in capsys.readouterr().out
    assert call(*make_arguments(configured_store, "show", ALICE)) == 0
    assert "protocol      didcomm\n" in capsys.readouterr().out
    assert call(*make_arguments(configured_store, "list")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines if line.startswith("did:")] == ["didcomm_v1", "didcomm"]


def test_removes_connection_with_account(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """The connection of DIDComm v1 is removed with the account, so that the wallet has to connect again."""
    store = configured_store.store
    connection = V1Connection(V1_KEY, "own key", "request")
    result_of(store.v1_connections.put_connection(connection, max_pending=1))
    result_of(store.grant(V1_KEY))
    assert call(*make_arguments(configured_store, "remove", V1_BASE58)) == 0
    assert result_of(store.v1_connections.count_connections()) == (1, 0)
    assert call(*make_arguments(configured_store, "remove", V1_BASE58, "--yes")) == 0
    assert result_of(store.v1_connections.count_connections()) == (0, 0)
    assert result_of(store.v1_connections.find_connection("own key")) is None


def test_unknown_account_is_an_error(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """One line and exit status 1."""
    for name in (BOB, V1_KEY, V1_BASE58):
        assert call(*make_arguments(configured_store, "show", name)) == 1
        assert one_line(capsys).endswith(f"{name} has no account")
    for arguments in (("remove", BOB), ("remove", BOB, "--yes"), ("show", "nonsense\x1b")):
        assert call(*make_arguments(configured_store, *arguments)) == 1
        assert one_line(capsys).endswith(" has no account")


def test_removes_account_with_its_messages(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """After confirmation, with registrations and messages; the messages count as removed."""
    configured_store.put("a", "b")
    result_of(configured_store.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))
    result_of(configured_store.store.grant(BOB))
    result_of(configured_store.store.update_recipients(BOB, [(INBOX, "add")], max_recipients=9))
    configured_store.put("c")
    configured_store.put("d", to=ALICE)
    assert run_json(configured_store, capsys, "remove", ALICE)["messages"] == 3
    assert call(*make_arguments(configured_store, "remove", ALICE)) == 0
    assert "nothing was removed" in capsys.readouterr().out
    assert configured_store.get_totals().messages == 4
    assert run_json(configured_store, capsys, "remove", ALICE, "--yes") == {
        "dry_run": False,
        "did": ALICE,
        "messages": 3,
        "bytes": 30,
    }
    assert (configured_store.get_totals().messages, configured_store.ids()) == (1, ["c"])
    assert sorted(line["reason"] for line in configured_store.lines()) == ["purged"] * 3
    ledger = result_of(configured_store.store.read_ledger()).didcomm
    assert (ledger.accepted, ledger.removed, ledger.waiting, ledger.difference) == (4, 3, 1, 0)
    assert result_of(configured_store.store.find_owner(ALICE)) is None
    assert run_json(configured_store, capsys, "list")["total"] == 1
    configured_store.clock.advance(61)  # the daemon may cache an account for this time
    assert result_of(configured_store.store.get_account(ALICE)) is None
    assert result_of(configured_store.store.get_account_usage()).accounts == 1
    assert result_of(configured_store.store.grant(ALICE)).did == ALICE


def test_removal_without_messages_logs_nothing(configured_store: ConfiguredStore, capsys: Capture) -> None:
    assert call(*make_arguments(configured_store, "remove", ALICE, "--yes")) == 0
    assert "removed, with 0 messages" in capsys.readouterr().out
    assert configured_store.lines() == []
