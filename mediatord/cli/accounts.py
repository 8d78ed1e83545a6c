"""`mediatord accounts`: list, show and remove accounts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mediatord.cli.console import (
    PROBE_MARKER,
    config_option,
    escape_control_characters,
    format_bytes,
    format_time,
    group_config_option,
    json_option,
    print_result,
    print_table,
    shorten_did,
)

if TYPE_CHECKING:
    from mediatord.cli.store_access import StoreAccess
    from mediatord.config.settings import Config
    from mediatord.store.interfaces.administration import AccountSummary, QueuedMessage

_DEFAULT_TOP = 20


@click.group()
@group_config_option
def accounts() -> None:
    """
    List, show and remove accounts of DIDComm wallets.

    A running daemon is asked over its control socket; otherwise the store is opened directly. A DID can be given in
    any form, and as in the event log: shortened, or as its pseudonym.
    """


@accounts.command("list")
@config_option
@click.option(
    "--top", type=click.IntRange(1, 100_000), default=_DEFAULT_TOP, show_default=True, help="Maximum number of rows."
)
@json_option
def list_accounts(path: Path, top: int, as_json: bool) -> None:
    """List accounts, newest first."""
    from mediatord.cli.store_access import ProbeAccounts, open_store_access
    from mediatord.config.file import load_config

    config = load_config(path)
    with open_store_access(config) as store:
        found, total = store.list_accounts(top)
    self_test = ProbeAccounts(config)
    if as_json:
        shown = [{**asdict(one), "self_test": self_test.may_include(one.did)} for one in found]
        print_result(True, {"accounts": shown, "total": total}, "")
        return
    rows = [
        (
            shorten_did(one.did) + (f" {PROBE_MARKER}" if self_test.may_include(one.did) else ""),
            format_time(one.created_at),
            format_time(one.seen_at),
            "yes" if one.used else "no",
            f"{one.recipients}",
            f"{one.messages}",
            format_bytes(one.bytes),
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
    """Show an account and its registered recipient DIDs."""
    from mediatord.cli.store_access import open_store_access
    from mediatord.config.file import load_config

    config = load_config(path)
    with open_store_access(config) as store:
        record = _find_account(did, store, config)
        names = store.list_recipients(record.did)
    if as_json:
        print_result(True, {**asdict(record), "registered": names}, "")
        return
    click.echo(f"account       {escape_control_characters(record.did)}")
    click.echo(f"enrolled      {format_time(record.created_at)}")
    click.echo(f"last contact  {format_time(record.seen_at)}")
    click.echo(f"used          {'yes' if record.used else 'no'}")
    click.echo(f"waiting       {record.messages} messages, {format_bytes(record.bytes)}")
    for name in names:
        click.echo(f"recipient     {escape_control_characters(name)}")


@accounts.command()
@click.argument("did")
@config_option
@click.option("--yes", is_flag=True, help="Remove; without it, only show what would be removed.")
@json_option
def remove(did: str, path: Path, yes: bool, as_json: bool) -> None:
    """
    Remove an account with its registrations and queued messages. Without --yes, only show what would be removed.

    Each removed message is logged as by `queue purge`. The wallet may enrol again unless `didcomm.deny` lists it.
    Sockets that the wallet has open stay open.
    """
    from mediatord.cli.store_access import ProbeAccounts, open_store_access
    from mediatord.config.file import load_config

    config = load_config(path)
    with open_store_access(config) as store:
        record = _find_account(did, store, config)
        if ProbeAccounts(config).has(record.did):
            raise click.ClickException(
                f"{shorten_did(record.did)} belongs to the daemon's own self-test (GET /ready): not removed"
            )
        removed = _remove_account(record.did, store) if yes else []
    if not yes:
        _print_removal_plan(record, as_json)
        return
    if as_json:
        print_result(True, {"dry_run": False, "did": record.did, **_summarize_json(removed)}, "")
        return
    sums = _summarize_json(removed)
    click.echo(f"{shorten_did(record.did)} removed, with {sums['messages']} messages, {format_bytes(sums['bytes'])}")


def _print_removal_plan(record: AccountSummary, as_json: bool) -> None:
    if as_json:
        print_result(True, {"dry_run": True, **asdict(record)}, "")
        return
    waiting = f"{record.messages} messages, {format_bytes(record.bytes)}"
    click.echo(f"{shorten_did(record.did)} would be removed, with {record.recipients} registrations and {waiting}")
    click.echo("nothing was removed; the same with --yes removes it")


def _remove_account(did: str, store: StoreAccess) -> list[QueuedMessage]:
    """
    First what is registered, so that nothing more comes; then what is queued; then the account.

    :raise ClickException: something is queued all the same.
    """
    from mediatord.cli.store_access import MessageFilter

    if store.list_queued_dids(did):
        store.check_log()
    store.unregister_recipients(did)
    queues = [MessageFilter(one, "didcomm") for one in store.list_queued_dids(did)]
    entries = [entry for queue in queues for entry in store.list_entries(queue) if entry.account == did]
    removed = store.purge(entries)
    if not store.remove_account(did):
        raise click.ClickException("the account has changed meanwhile: run it again")
    return removed


def _find_account(given: str, store: StoreAccess, config: Config) -> AccountSummary:
    """:raise ClickException: there is no such account."""
    from mediatord.cli.store_access import find_by_pseudonym
    from mediatord.protocol.canonical_did import canonicalize_did

    record = store.find_account(canonicalize_did(given))
    if record is None and (not given.startswith("did:") or "~" in given):
        did = find_by_pseudonym(given, store.list_dids(), config)
        record = None if did is None else store.find_account(did)
    if record is None:
        raise click.ClickException(f"no account has the DID {given}")
    return record


def _summarize_json(entries: list[QueuedMessage]) -> dict[str, Any]:
    return {"messages": len(entries), "bytes": sum(one.size for one in entries)}
