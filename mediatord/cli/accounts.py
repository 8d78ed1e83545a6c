"""`mediatord accounts`: list, show and remove accounts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from mediatord.cli.console import (
    PROBE_MARKER,
    config_option,
    escape_control_characters,
    format_bytes,
    format_plural,
    format_time,
    group_config_option,
    json_option,
    open_store,
    print_json,
    print_table,
    shorten_did,
    top_option,
)
from mediatord.runtime.progress_bar import progress_bar


@click.group()
@group_config_option
def accounts() -> None:
    """
    List, show and remove accounts of DIDComm wallets.

    Uses the control socket if a daemon is running, otherwise opens the store. DID can be a full DID, a key of
    DIDComm v1 in base58, or a shortened DID or pseudonym from the event log.
    """


@accounts.command("list")
@config_option
@top_option(100_000, 20)
@json_option
def list_accounts(path: Path, top: int, as_json: bool) -> None:
    """List accounts, newest first."""
    with open_store(path) as store, progress_bar("reading"):
        found, total = store.list_accounts(top)
    if as_json:
        shown = [{**asdict(one), "self_test": store.may_be_probe(one.did)} for one in found]
        print_json({"accounts": shown, "total": total})
        return
    rows = [
        (
            shorten_did(one.did) + (f" {PROBE_MARKER}" if store.may_be_probe(one.did) else ""),
            format_time(one.created_at),
            format_time(one.seen_at),
            "yes" if one.used else "no",
            one.protocol,
            f"{one.recipients}",
            f"{one.messages}",
            format_bytes(one.bytes),
        )
        for one in found
    ]
    print_table(
        ("account", "enrolled", "last contact", "used", "protocol", "recipients #", "messages #", "size #"), rows
    )
    more = f"; showing the newest {len(found)}" if len(found) < total else ""
    click.echo(f"{format_plural(total, 'account')}{more}")


@accounts.command()
@click.argument("did")
@config_option
@json_option
def show(did: str, path: Path, as_json: bool) -> None:
    """Show an account, its protocol, the number of its push devices, and its registered recipient DIDs."""
    with open_store(path) as store, progress_bar("reading"):
        record = store.find_account(did)
        names = store.list_recipients(record.did)
        devices = store.count_devices(record.did)
    if as_json:
        print_json({**asdict(record), "registered": names, "devices": devices})
        return
    click.echo(f"account       {escape_control_characters(record.did)}")
    click.echo(f"enrolled      {format_time(record.created_at)}")
    click.echo(f"last contact  {format_time(record.seen_at)}")
    click.echo(f"used          {'yes' if record.used else 'no'}")
    connected = "" if record.connected_at is None else f", connected {format_time(record.connected_at)}"
    click.echo(f"protocol      {record.protocol}{connected}")
    click.echo(f"waiting       {format_plural(record.messages, 'message')}, {format_bytes(record.bytes)}")
    numbers = ", ".join(f"{number} {service}" for service, number in sorted(devices.items()))
    click.echo(f"push devices  {numbers or 'none'}")
    for name in names:
        click.echo(f"recipient     {escape_control_characters(name)}")


@accounts.command()
@click.argument("did")
@config_option
@click.option("--yes", is_flag=True, help="Remove; default: only show what would be removed.")
@json_option
def remove(did: str, path: Path, yes: bool, as_json: bool) -> None:
    """
    Remove an account with its registrations, push devices and queued messages.

    Logs each removed message as msg.remove. The wallet can enrol again unless didcomm.deny lists it; its open
    WebSockets stay open. A wallet that speaks DIDComm v1 must connect again before.
    """
    with open_store(path) as store, progress_bar("removing" if yes else "reading"):
        record = store.find_account(did)
        name = shorten_did(record.did)
        if store.is_probe(record.did):
            raise click.ClickException(f"{name} belongs to the daemon's self-test (GET /ready) and is not removed")
        removed = store.remove_account(record.did) if yes else []
    size = sum(one.size for one in removed)
    if yes and as_json:
        print_json({"dry_run": False, "did": record.did, "messages": len(removed), "bytes": size})
    elif yes:
        click.echo(f"{name} removed, with {format_plural(len(removed), 'message')}, {format_bytes(size)}")
    elif as_json:
        print_json({"dry_run": True, **asdict(record)})
    else:
        waiting = f"{format_plural(record.messages, 'message')}, {format_bytes(record.bytes)}"
        click.echo(f"{name} would be removed, with {format_plural(record.recipients, 'registration')} and {waiting}")
        click.echo("nothing was removed; add --yes to remove it")
