"""`mediatord queue`: what waits for whom, and taking it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mediatord.cli.console import (
    config_option,
    escape_control_characters,
    format_bytes,
    format_time_span,
    group_config_option,
    json_option,
    print_result,
    print_table,
)

if TYPE_CHECKING:
    from mediatord.cli.store_access import StoreAccess
    from mediatord.config.settings import Config
    from mediatord.store.interfaces.administration import QueuedMessage

half_option = click.option("--half", type=click.Choice(["didcomm", "decentrl"]), help="Only of this half.")
_DEFAULT_TOP = 20
_SAMPLE_SIZE = 10
# In the place of an account.
_PROBE_MARKER = "(self-test)"


@click.group()
@group_config_option
def queue() -> None:
    """
    Look into the queues of waiting messages, and take messages out.

    Long DIDs are shown short, as in the event log. A DID can be given like that, and as its pseudonym there. Queues
    that the daemon has for its self-test (GET /ready) are marked as such.
    """


@queue.command("list")
@config_option
@click.option(
    "--top", type=click.IntRange(1, 10_000), default=_DEFAULT_TOP, show_default=True, help="So many at most."
)
@half_option
@json_option
def list_queues(path: Path, top: int, half: Any, as_json: bool) -> None:
    """Show the longest queues: for whom, how many messages, how many bytes, and how old the first is."""
    from mediatord.cli.store_access import ProbeAccounts, open_store_access
    from mediatord.config.file import load_config

    config = load_config(path)
    with open_store_access(config) as store:
        queues, totals = store.list_queues(half, top)
    self_test = ProbeAccounts(config)
    if as_json:
        shown = [{**asdict(one), "self_test": self_test.may_include(one.account)} for one in queues]
        print_result(True, {"queues": shown, "totals": asdict(totals)}, "")
        return
    now = _read_time()
    rows = [
        (
            one.half,
            _shorten_did(one.did),
            _PROBE_MARKER
            if self_test.may_include(one.account)
            else ""
            if one.account == one.did
            else _shorten_did(one.account),
            f"{one.messages}",
            format_bytes(one.bytes),
            "" if one.oldest_at is None else format_time_span(now - one.oldest_at),
        )
        for one in queues
    ]
    if rows:
        print_table(("half", "recipient", "account", "messages #", "size #", "oldest #"), rows)
    more = f", of which the {len(queues)} longest are shown" if len(queues) < totals.queues else ""
    counted = f"{_format_plural(totals.queues, 'queue')} with {_format_plural(totals.messages, 'message')}"
    click.echo(f"{counted}, {format_bytes(totals.bytes)}{more}")


@queue.command()
@click.argument("did")
@config_option
@click.option("--top", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="So many at most.")
@half_option
@json_option
def show(did: str, path: Path, top: int, half: Any, as_json: bool) -> None:
    """
    Show what waits for a recipient DID, the oldest first, without what is in it.

    Pushes are counted of DIDComm messages only. Exits with 1 if nobody has registered the DID.
    """
    from mediatord.cli.store_access import MessageFilter, ProbeAccounts, open_store_access
    from mediatord.config.file import load_config

    config = load_config(path)
    with open_store_access(config) as store:
        did = _find_registered_did(did, store, config)
        entries = store.list_entries(MessageFilter(did, half))
    own = ProbeAccounts(config).may_include(did)
    if as_json:
        shown = [asdict(one) for one in entries[:top]]
        print_result(True, {"did": did, "self_test": own, "messages": len(entries), "shown": shown}, "")
        return
    if entries:
        _print_entries(entries[:top])
    more = f", of which the first {top} are shown" if len(entries) > top else ""
    click.echo(f"{_summarize_text(entries)} for {_shorten_did(did)}{f' {_PROBE_MARKER}' if own else ''}{more}")


@queue.command()
@click.argument("did")
@config_option
@click.option("--older-than", metavar="DURATION", help="Only what arrived before that: 48h, 30m, 7d.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Only this message; repeatable.")
@half_option
@click.option("--yes", is_flag=True, help="Do it; without this it is only shown.")
@json_option
def purge(
    did: str, path: Path, older_than: str | None, ids: tuple[str, ...], half: Any, yes: bool, as_json: bool
) -> None:
    """
    Remove what waits for a recipient DID. Without --yes it is shown what would be removed, and nothing is.

    The daemon may be running. Each removal has its line in the event log, msg.remove with the reason purged, and is
    not done if that cannot be written. What a wallet was sent and has not acknowledged yet goes as well. What the
    daemon sends to itself for GET /ready is not removed: the next test does that. Exits with 1 if nobody has
    registered the DID.
    """
    from mediatord.cli.store_access import MessageFilter, ProbeAccounts, open_store_access
    from mediatord.config.file import load_config

    before = None if older_than is None else _read_time() - _parse_duration(older_than)
    config = load_config(path)
    with open_store_access(config) as store:
        did = _find_registered_did(did, store, config)
        if ProbeAccounts(config).has(did):
            raise click.ClickException(
                f"{_shorten_did(did)} belongs to the daemon's own self-test (GET /ready), which clears it: not removed"
            )
        entries = store.list_entries(MessageFilter(did, half, before, ids))
        removed = store.purge(entries) if yes else []
    if yes:
        _print_purge_result(removed, len(entries), as_json)
    else:
        _print_purge_plan(entries, did, as_json)


def _print_purge_plan(entries: Sequence[QueuedMessage], did: str, as_json: bool) -> None:
    """What would be done."""
    if as_json:
        print_result(True, {"dry_run": True, **_summarize_json(entries), "ids": [one.id for one in entries]}, "")
        return
    if entries:
        _print_entries(entries[:_SAMPLE_SIZE])
    more = f", of which the first {_SAMPLE_SIZE} are shown" if len(entries) > _SAMPLE_SIZE else ""
    click.echo(f"{_summarize_text(entries)} for {_shorten_did(did)} would be removed{more}")
    if entries:
        click.echo("nothing was removed; the same with --yes removes them")


def _print_purge_result(removed: Sequence[QueuedMessage], planned: int, as_json: bool) -> None:
    """What was done."""
    gone = planned - len(removed)
    if as_json:
        print_result(True, {"dry_run": False, **_summarize_json(removed), "gone_before": gone}, "")
        return
    before = f"; {gone} had gone meanwhile" if gone else ""
    click.echo(f"{_summarize_text(removed)} removed{before}")


def _shorten_did(did: str) -> str:
    """As the event log has it with log.dids: plain."""
    from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey

    return escape_control_characters(Pseudonymizer("plain", PseudonymKey(0, b"")).did(did))


def _find_registered_did(given: str, store: StoreAccess, config: Config) -> str:
    """
    The registered DID that is meant.

    :raise ClickException: there is none.
    """
    from mediatord.cli.store_access import find_by_pseudonym

    found: str | None = None
    if _is_valid_utf8(given):
        found = store.find_did(given)
        if found is None and (not given.startswith("did:") or "~" in given):
            found = find_by_pseudonym(given, store.list_dids(), config)
    if found is None:
        raise click.ClickException(f"{given}: nobody has registered this DID")
    return found


def _is_valid_utf8(given: str) -> bool:
    """Whether what was typed is UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def _summarize_json(entries: Sequence[QueuedMessage]) -> dict[str, Any]:
    halves = Counter(one.half for one in entries)
    return {"messages": len(entries), "bytes": sum(one.size for one in entries), "halves": dict(halves)}


def _summarize_text(entries: Sequence[QueuedMessage]) -> str:
    return f"{len(entries)} messages, {format_bytes(sum(one.size for one in entries))},"


def _print_entries(entries: Sequence[QueuedMessage]) -> None:
    rows = [
        (
            one.half,
            one.id,
            _format_time(one.received_at),
            "never" if one.expires_at is None else _format_time(one.expires_at),
            format_bytes(one.size),
            one.status,
            f"{one.pushes}" if one.half == "didcomm" else "",
            "" if one.due_at is None else _format_time(one.due_at),
        )
        for one in entries
    ]
    print_table(("half", "id", "received", "expires", "size #", "status", "pushes #", "due"), rows)


def _format_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):  # no year has it
        return f"{seconds:g}"


def _read_time() -> float:
    return datetime.now(UTC).timestamp()


def _parse_duration(text: str) -> float:
    """:raise BadParameter: it is no duration."""
    from pydantic import TypeAdapter, ValidationError

    from mediatord.config.settings import Duration

    try:
        return float(TypeAdapter(Duration).validate_python(text))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise click.BadParameter(reason, param_hint="--older-than") from None


def _format_plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
