"""`mediatord accounts`: listing, showing and removing accounts, beside a store that is in use."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from mediatord.observability.pseudonyms import Pseudonymizer, read_pseudonym_keys
from tests.cli.test_commands import Capture, call, one_line
from tests.cli.test_queue import ALICE, BOB, HOUR, INBOX, ConfiguredStore, office, printed
from tests.store.builders import result_of

__all__ = ["office"]


def asked(office: ConfiguredStore, *arguments: str) -> tuple[str, ...]:
    """The arguments for `mediatord accounts`, with the configuration."""
    return ("accounts", *arguments, "--config", str(office.path))


def shown(office: ConfiguredStore, capture: Capture, *arguments: str) -> Any:
    """What is said in JSON."""
    assert call(*asked(office, *arguments, "--json")) == 0
    return printed(capture)


def test_list(office: ConfiguredStore, capsys: Capture) -> None:
    """The newest first, with what waits for each, and how many there are."""
    office.put("a", "b")
    office.clock.advance(HOUR)
    result_of(office.store.grant(BOB))
    found = shown(office, capsys, "list")
    assert found["total"] == 2
    assert [one["did"] for one in found["accounts"]] == [BOB, ALICE]
    assert [(one["recipients"], one["messages"], one["bytes"], one["used"]) for one in found["accounts"]] == [
        (0, 0, 0, False),
        (2, 2, 20, True),
    ]
    assert [one["did"] for one in shown(office, capsys, "list", "--top", "1")["accounts"]] == [BOB]
    assert call(*asked(office, "list", "--top", "1")) == 0
    text = capsys.readouterr().out
    assert datetime.fromtimestamp(office.began + HOUR, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") in text
    assert text.endswith("2 accounts; showing the newest 1\n")


def test_show(office: ConfiguredStore, capsys: Capture) -> None:
    """One by any form of its DID, or by its pseudonym, with all names that it has registered."""
    key = f"{INBOX}#key-1"
    result_of(office.store.update_recipients(ALICE, [(key, "add")], max_recipients=9))
    pseudonym = Pseudonymizer("keyed", read_pseudonym_keys(office.config.log_key_path)[-1]).did(ALICE)
    for given in (ALICE, f"{ALICE}#key-1", pseudonym):
        record = shown(office, capsys, "show", given)
        assert (record["did"], record["registered"], record["recipients"]) == (ALICE, [INBOX, ALICE, key], 3)
        assert record["created_at"] == record["seen_at"] == office.began
    assert call(*asked(office, "show", ALICE)) == 0
    assert key in capsys.readouterr().out


def test_unknown(office: ConfiguredStore, capsys: Capture) -> None:
    """A DID without an account gives a line and exit status 1, whatever was asked."""
    for arguments in (("show", BOB), ("remove", BOB), ("remove", BOB, "--yes"), ("show", "nonsense\x1b")):
        assert call(*asked(office, *arguments)) == 1
        assert one_line(capsys).endswith(" has no account")


def test_remove(office: ConfiguredStore, capsys: Capture) -> None:
    """It goes with its registrations and its mail, once that is confirmed; the mail is counted as removed."""
    office.put("a", "b")
    result_of(office.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))
    result_of(office.store.grant(BOB))
    result_of(office.store.update_recipients(BOB, [(INBOX, "add")], max_recipients=9))
    office.put("c")
    office.put("d", to=ALICE)
    assert shown(office, capsys, "remove", ALICE)["messages"] == 3
    assert call(*asked(office, "remove", ALICE)) == 0
    assert "nothing was removed" in capsys.readouterr().out
    assert office.waiting().messages == 4
    assert shown(office, capsys, "remove", ALICE, "--yes") == {
        "dry_run": False,
        "did": ALICE,
        "messages": 3,
        "bytes": 30,
    }
    assert (office.waiting().messages, office.ids()) == (1, ["c"])
    assert sorted(line["reason"] for line in office.lines()) == ["purged"] * 3
    books = result_of(office.store.read_ledger()).didcomm
    assert (books.accepted, books.removed, books.waiting, books.difference) == (4, 3, 1, 0)
    assert result_of(office.store.find_owner(ALICE)) is None
    assert shown(office, capsys, "list")["total"] == 1
    office.clock.advance(61)  # for so long the daemon may remember an account
    assert result_of(office.store.get_account(ALICE)) is None
    assert result_of(office.store.get_account_usage()).accounts == 1
    assert result_of(office.store.grant(ALICE)).did == ALICE


def test_without_mail(office: ConfiguredStore, capsys: Capture) -> None:
    """One without mail needs no line in the event log."""
    assert call(*asked(office, "remove", ALICE, "--yes")) == 0
    assert "removed, with 0 messages" in capsys.readouterr().out
    assert office.lines() == []
