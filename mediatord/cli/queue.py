"""`mediatord queue`: list queues, show their messages and remove messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mediatord.cli.console import (
    PROBE_MARKER,
    config_option,
    format_bytes,
    format_plural,
    format_time,
    format_time_span,
    group_config_option,
    json_option,
    open_store,
    print_json,
    print_table,
    shorten_did,
    top_option,
)
from mediatord.config.value_syntax import parse_duration
from mediatord.runtime.progress_bar import progress_bar

if TYPE_CHECKING:
    from mediatord.store.interfaces.administration import QueuedMessage

protocol_option = click.option("--protocol", type=click.Choice(["didcomm", "decentrl"]), help="Only this protocol.")
_SAMPLE_SIZE = 10


@click.group()
@group_config_option
def queue() -> None:
    """
    List message queues and remove messages from them.

    Uses the control socket if a daemon is running, otherwise opens the store. DID can be a full DID, a key of
    DIDComm v1 in base58, or a shortened DID or pseudonym from the event log. Queues of the self-test (GET /ready)
    are marked.
    """


@queue.command("list")
@config_option
@top_option(10_000, 20)
@protocol_option
@json_option
def list_queues(path: Path, top: int, protocol: Any, as_json: bool) -> None:
    """
    List the longest queues.

    Shows the recipient, its account, messages, size and the age of the oldest message.
    """
    with open_store(path) as store, progress_bar("reading"):
        queues, totals = store.list_queues(protocol, top)
    own = [store.may_be_probe(one.account) for one in queues]
    if as_json:
        shown = [{**asdict(one), "self_test": is_own} for one, is_own in zip(queues, own, strict=True)]
        print_json({"queues": shown, "totals": asdict(totals)})
        return
    now = _read_time()
    rows = [
        (
            one.protocol,
            shorten_did(one.did),
            PROBE_MARKER if is_own else "" if one.account == one.did else shorten_did(one.account),
            f"{one.messages}",
            format_bytes(one.bytes),
            "" if one.oldest_at is None else format_time_span(now - one.oldest_at),
        )
        for one, is_own in zip(queues, own, strict=True)
    ]
    print_table(("protocol", "recipient", "account", "messages #", "size #", "oldest #"), rows)
    more = f"; showing the longest {len(queues)}" if len(queues) < totals.queues else ""
    counted = f"{format_plural(totals.queues, 'queue')} with {format_plural(totals.messages, 'message')}"
    click.echo(f"{counted}, {format_bytes(totals.bytes)}{more}")


@queue.command()
@click.argument("did")
@config_option
@top_option(1_000_000, 100)
@protocol_option
@json_option
def show(did: str, path: Path, top: int, protocol: Any, as_json: bool) -> None:
    """
    Show the queued messages of a recipient DID.

    Lists them oldest first, without payloads, and says whether a WebSocket with live delivery is open for the DID.
    Pushes are counted for DIDComm only. Exits with 1 if the DID is not registered.
    """
    with open_store(path) as store, progress_bar("reading"):
        did = store.find_did(did)
        entries = store.list_entries(did, protocol)
        is_live = store.has_live_session(did)
    own = store.may_be_probe(did)
    if as_json:
        shown = [asdict(one) for one in entries[:top]]
        print_json({"did": did, "self_test": own, "live": is_live, "messages": len(entries), "shown": shown})
        return
    _print_entries(entries[:top])
    more = f"; showing the first {top}" if len(entries) > top else ""
    click.echo(f"{_summarize_text(entries)} for {shorten_did(did)}{f' {PROBE_MARKER}' if own else ''}{more}")
    click.echo("a WebSocket with live delivery is open" if is_live else "no WebSocket with live delivery is open")


@queue.command()
@click.argument("did")
@config_option
@click.option("--older-than", metavar="DURATION", help="Only messages older than DURATION, such as 48h, 30m or 7d.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Only the message with this id; may be repeated.")
@protocol_option
@click.option("--yes", is_flag=True, help="Remove; default: only show what would be removed.")
@json_option
def purge(
    did: str, path: Path, older_than: str | None, ids: tuple[str, ...], protocol: Any, yes: bool, as_json: bool
) -> None:
    """
    Remove queued messages of a recipient DID.

    Includes messages that were pushed but not acknowledged, excludes those of the self-test (GET /ready). Logs each
    as msg.remove with the reason purged; removes nothing while the event log cannot be written. Exits with 1 if the
    DID is not registered.
    """
    before = None if older_than is None else _read_time() - _parse_duration(older_than)
    with open_store(path) as store:
        with progress_bar("reading"):
            did = store.find_did(did)
            is_probe = store.is_probe(did)
            found = [] if is_probe else store.list_entries(did, protocol)
        if is_probe:
            raise click.ClickException(
                f"{shorten_did(did)} belongs to the daemon's self-test (GET /ready), which purges it itself"
            )
        entries = [
            one for one in found if (before is None or one.received_at < before) and (not ids or one.id in ids)
        ]
        removed: list[QueuedMessage] = []
        if yes:
            with progress_bar("removing", len(entries)) as progress:
                removed = store.purge(entries, progress)
    gone = len(entries) - len(removed)
    if yes and as_json:
        print_json({"dry_run": False, **_summarize_json(removed), "gone_before": gone})
    elif yes:
        click.echo(f"{_summarize_text(removed)} removed{f'; {gone} had already been removed' if gone else ''}")
    elif as_json:
        print_json({"dry_run": True, **_summarize_json(entries), "ids": [one.id for one in entries]})
    else:
        _print_entries(entries[:_SAMPLE_SIZE])
        more = f"; showing the first {_SAMPLE_SIZE}" if len(entries) > _SAMPLE_SIZE else ""
        click.echo(f"{_summarize_text(entries)} for {shorten_did(did)} would be removed{more}")
        if entries:
            click.echo("nothing was removed; add --yes to remove them")


def _summarize_json(entries: Sequence[QueuedMessage]) -> dict[str, Any]:
    protocols = Counter(one.protocol for one in entries)
    return {"messages": len(entries), "bytes": sum(one.size for one in entries), "protocols": dict(protocols)}


def _summarize_text(entries: Sequence[QueuedMessage]) -> str:
    return f"{format_plural(len(entries), 'message')}, {format_bytes(sum(one.size for one in entries))},"


def _print_entries(entries: Sequence[QueuedMessage]) -> None:
    rows = [
        (
            one.protocol,
            one.id,
            format_time(one.received_at),
            "never" if one.expires_at is None else format_time(one.expires_at),
            format_bytes(one.size),
            one.status,
            f"{one.pushes}" if one.protocol == "didcomm" else "",
            "" if one.due_at is None else format_time(one.due_at),
        )
        for one in entries
    ]
    print_table(("protocol", "id", "received", "expires", "size #", "status", "pushes #", "due"), rows)


def _read_time() -> float:
    return datetime.now(UTC).timestamp()


def _parse_duration(text: str) -> float:
    """:raise BadParameter: it is no duration."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--older-than'") from None
