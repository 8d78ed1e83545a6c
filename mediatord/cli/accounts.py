"""`mediatord accounts`: who is enrolled, and removing accounts."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mediatord.cli.options import answer, config_option, group_config_option, json_option
from mediatord.cli.tables import print_table, size_text
from mediatord.cli.visible import visible

if TYPE_CHECKING:
    from mediatord.cli.account_records import AccountRecord, AccountRecords
    from mediatord.cli.queues import Entry
    from mediatord.config import Config

_SAMPLE = 20
_SELF_TEST = "(self-test)"


@click.group()
@group_config_option
def accounts() -> None:
    """
    List, show and remove accounts of DIDComm wallets.

    The daemon may be running. A DID can be given in any form, and as the event log has it: shortened, or as its
    pseudonym.
    """


@accounts.command("list")
@config_option
@click.option("--top", type=click.IntRange(1, 100_000), default=_SAMPLE, show_default=True, help="So many at most.")
@json_option
def list_accounts(path: Path, top: int, as_json: bool) -> None:
    """List accounts, the newest first."""
    from mediatord.cli.account_records import account_records
    from mediatord.cli.queues.self_test import SelfTestAccounts
    from mediatord.config import load

    config = load(path)
    found, total = account_records(config).accounts(top)
    self_test = SelfTestAccounts(config)
    if as_json:
        shown = [{**asdict(one), "self_test": self_test.may_have(one.did)} for one in found]
        answer(True, {"accounts": shown, "total": total}, "")
        return
    rows = [
        (
            _short(one.did) + (f" {_SELF_TEST}" if self_test.may_have(one.did) else ""),
            _time(one.created_at),
            _time(one.seen_at),
            "yes" if one.used else "no",
            f"{one.recipients}",
            f"{one.messages}",
            size_text(one.bytes),
        )
        for one in found
    ]
    if rows:
        print_table(("account", "enrolled", "last contact", "used", "recipients #", "messages #", "size #"), rows)
    more = f", of which the {len(found)} newest are shown" if len(found) < total else ""
    click.echo(f"{total} {'account' if total == 1 else 'accounts'}{more}")


@accounts.command()
@click.argument("did")
@config_option
@json_option
def show(did: str, path: Path, as_json: bool) -> None:
    """Show an account and the recipient DIDs that it has registered."""
    from mediatord.cli.account_records import account_records
    from mediatord.config import load

    config = load(path)
    records = account_records(config)
    record = _find(did, records, config)
    names = records.names(record.did)
    if as_json:
        answer(True, {**asdict(record), "registered": names}, "")
        return
    click.echo(f"account       {visible(record.did)}")
    click.echo(f"enrolled      {_time(record.created_at)}")
    click.echo(f"last contact  {_time(record.seen_at)}")
    click.echo(f"used          {'yes' if record.used else 'no'}")
    click.echo(f"waiting       {record.messages} messages, {size_text(record.bytes)}")
    for name in names:
        click.echo(f"recipient     {visible(name)}")


@accounts.command()
@click.argument("did")
@config_option
@click.option("--yes", is_flag=True, help="Do it; without this it is only shown.")
@json_option
def remove(did: str, path: Path, yes: bool, as_json: bool) -> None:
    """
    Remove an account with its registrations and its waiting messages. Without --yes it is only shown what would go.

    Each message has its line in the event log, msg.remove with the reason purged, as with `queue purge`. The wallet
    may enrol again; `didcomm.deny` keeps it from that. Sockets that the wallet has open
    stay open: the daemon does not close them because of the removal.
    """
    from mediatord.cli.account_records import account_records
    from mediatord.cli.queues.self_test import SelfTestAccounts
    from mediatord.config import load

    config = load(path)
    records = account_records(config)
    record = _find(did, records, config)
    if SelfTestAccounts(config).has(record.did):
        raise click.ClickException(
            f"{_short(record.did)} belongs to the daemon's own self-test (GET /ready): not removed"
        )
    if not yes:
        _tell_plan(record, as_json)
        return
    removed = _remove(record.did, records, config)
    if as_json:
        answer(True, {"dry_run": False, "did": record.did, **_sums(removed)}, "")
        return
    sums = _sums(removed)
    click.echo(f"{_short(record.did)} removed, with {sums['messages']} messages, {size_text(sums['bytes'])}")


def _tell_plan(record: AccountRecord, as_json: bool) -> None:
    if as_json:
        answer(True, {"dry_run": True, **asdict(record)}, "")
        return
    waiting = f"{record.messages} messages, {size_text(record.bytes)}"
    click.echo(f"{_short(record.did)} would be removed, with {record.recipients} registrations and {waiting}")
    click.echo("nothing was removed; the same with --yes removes it")


def _remove(did: str, records: AccountRecords, config: Config) -> list[Entry]:
    """
    First what is registered, so that nothing more comes; then what waits; then the account.

    :raise ClickException: something waits all the same.
    """
    from mediatord.cli.queues import Scope
    from mediatord.cli.queues.ledger import Books

    books = Books(config) if records.queued_dids(did) else None
    records.unregister(did)
    scopes = [Scope(one, "didcomm") for one in records.queued_dids(did)]
    waiting = [entry for scope in scopes for entry in records.entries(scope) if entry.account == did]
    removed = (books or Books(config)).remove(records, waiting) if waiting else []
    if not records.remove_account(did):
        raise click.ClickException("the account has changed meanwhile: run it again")
    return removed


def _find(given: str, records: AccountRecords, config: Config) -> AccountRecord:
    """:raise ClickException: there is no such account."""
    from mediatord.protocol.canonical_did import canonical_did
    from mediatord.tag_keys import read_tag_keys
    from mediatord.tags import Tags
    from mediatord.wiring.base import log_key

    record = records.account(canonical_did(given))
    if record is None and (not given.startswith("did:") or "~" in given):
        tags = [Tags(mode, key) for key in read_tag_keys(log_key(config)) for mode in ("plain", "keyed")]
        dids = (did for did in records.account_dids() if any(one.did(did) == given for one in tags))
        record = next((found for did in dids if (found := records.account(did)) is not None), None)
    if record is None:
        raise click.ClickException(f"no account has the DID {given}")
    return record


def _sums(entries: list[Entry]) -> dict[str, Any]:
    return {"messages": len(entries), "bytes": sum(one.size for one in entries)}


def _short(did: str) -> str:
    """As the event log has it with log.dids: plain."""
    from mediatord.tags import TagKey, Tags

    return visible(Tags("plain", TagKey(0, b"")).did(did))


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):  # no year has it
        return f"{seconds:g}"
