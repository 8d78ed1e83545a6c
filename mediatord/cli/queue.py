"""`mediatord queue`: what waits for whom, and taking it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mediatord.cli.options import answer, config_option, group_config_option, json_option
from mediatord.cli.tables import print_table, size_text, span_text
from mediatord.cli.visible import visible

if TYPE_CHECKING:
    from mediatord.cli.queues import Entry, Waiting
    from mediatord.config import Config

half_option = click.option("--half", type=click.Choice(["didcomm", "decentrl"]), help="Only of this half.")
_TOP = 20
_SAMPLE = 10
# In the place of an account.
_SELF_TEST = "(self-test)"


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
@click.option("--top", type=click.IntRange(1, 10_000), default=_TOP, show_default=True, help="So many at most.")
@half_option
@json_option
def list_queues(path: Path, top: int, half: Any, as_json: bool) -> None:
    """Show the longest queues: for whom, how many messages, how many bytes, and how old the first is."""
    from mediatord.cli.queues import waiting_in
    from mediatord.cli.queues.self_test import SelfTestAccounts
    from mediatord.cli.queues.values import HALVES
    from mediatord.config import load

    config = load(path)
    queues, totals = waiting_in(config).queues((half,) if half else HALVES, top)
    self_test = SelfTestAccounts(config)
    if as_json:
        shown = [{**asdict(one), "self_test": self_test.may_have(one.account)} for one in queues]
        answer(True, {"queues": shown, "totals": asdict(totals)}, "")
        return
    now = _now()
    rows = [
        (
            one.half,
            _short(one.did),
            _SELF_TEST if self_test.may_have(one.account) else "" if one.account == one.did else _short(one.account),
            f"{one.messages}",
            size_text(one.bytes),
            "" if one.oldest_at is None else span_text(now - one.oldest_at),
        )
        for one in queues
    ]
    if rows:
        print_table(("half", "recipient", "account", "messages #", "size #", "oldest #"), rows)
    more = f", of which the {len(queues)} longest are shown" if len(queues) < totals.queues else ""
    counted = f"{_several(totals.queues, 'queue')} with {_several(totals.messages, 'message')}"
    click.echo(f"{counted}, {size_text(totals.bytes)}{more}")


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
    from mediatord.cli.queues import Scope, waiting_in
    from mediatord.cli.queues.self_test import SelfTestAccounts
    from mediatord.config import load

    config = load(path)
    waiting = waiting_in(config)
    did = _known(did, waiting, config)
    entries = waiting.entries(Scope(did, half))
    own = SelfTestAccounts(config).may_have(did)
    if as_json:
        shown = [asdict(one) for one in entries[:top]]
        answer(True, {"did": did, "self_test": own, "messages": len(entries), "shown": shown}, "")
        return
    if entries:
        _print_entries(entries[:top])
    more = f", of which the first {top} are shown" if len(entries) > top else ""
    click.echo(f"{_summed(entries)} for {_short(did)}{f' {_SELF_TEST}' if own else ''}{more}")


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
    from mediatord.cli.queues import Scope, waiting_in
    from mediatord.cli.queues.ledger import Books
    from mediatord.cli.queues.self_test import SelfTestAccounts
    from mediatord.config import load

    before = None if older_than is None else _now() - _seconds(older_than)
    config = load(path)
    waiting = waiting_in(config)
    did = _known(did, waiting, config)
    if SelfTestAccounts(config).has(did):
        raise click.ClickException(
            f"{_short(did)} belongs to the daemon's own self-test (GET /ready), which clears it: not removed"
        )
    entries = waiting.entries(Scope(did, half, before, ids))
    if yes:
        _tell_purged(Books(config).remove(waiting, entries), len(entries), as_json)
    else:
        _tell_purge(entries, did, as_json)


def _tell_purge(entries: Sequence[Entry], did: str, as_json: bool) -> None:
    """What would be done."""
    if as_json:
        answer(True, {"dry_run": True, **_figures(entries), "ids": [one.id for one in entries]}, "")
        return
    if entries:
        _print_entries(entries[:_SAMPLE])
    more = f", of which the first {_SAMPLE} are shown" if len(entries) > _SAMPLE else ""
    click.echo(f"{_summed(entries)} for {_short(did)} would be removed{more}")
    if entries:
        click.echo("nothing was removed; the same with --yes removes them")


def _tell_purged(removed: Sequence[Entry], planned: int, as_json: bool) -> None:
    """What was done."""
    gone = planned - len(removed)
    if as_json:
        answer(True, {"dry_run": False, **_figures(removed), "gone_before": gone}, "")
        return
    before = f"; {gone} had gone meanwhile" if gone else ""
    click.echo(f"{_summed(removed)} removed{before}")


def _short(did: str) -> str:
    """As the event log has it with log.dids: plain."""
    from mediatord.tags import TagKey, Tags

    return visible(Tags("plain", TagKey(0, b"")).did(did))


def _known(given: str, waiting: Waiting, config: Config) -> str:
    """
    The registered DID that is meant.

    :raise ClickException: there is none.
    """
    found: str | None = None
    if _is_text(given):
        found = waiting.kept(given) or _tagged(given, waiting, config)
    if found is None:
        raise click.ClickException(f"{given}: nobody has registered this DID")
    return found


def _is_text(given: str) -> bool:
    """Whether what was typed is UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tagged(given: str, waiting: Waiting, config: Config) -> str | None:
    """The DID that a short form or a pseudonym stands for."""
    from mediatord.tag_keys import read_tag_keys
    from mediatord.tags import Tags
    from mediatord.wiring.base import log_key

    if given.startswith("did:") and "~" not in given:
        return None
    tags = [Tags(mode, key) for key in read_tag_keys(log_key(config)) for mode in ("plain", "keyed")]
    # Whoever waits for something is asked for most often, and there are fewer of those.
    dids = (did for some in (waiting.recipients, waiting.registered) for did in some())
    return next((did for did in dids if any(one.did(did) == given for one in tags)), None)


def _figures(entries: Sequence[Entry]) -> dict[str, Any]:
    halves = Counter(one.half for one in entries)
    return {"messages": len(entries), "bytes": sum(one.size for one in entries), "halves": dict(halves)}


def _summed(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} messages, {size_text(sum(one.size for one in entries))},"


def _print_entries(entries: Sequence[Entry]) -> None:
    rows = [
        (
            one.half,
            one.id,
            _time(one.received_at),
            "never" if one.expires_at is None else _time(one.expires_at),
            size_text(one.size),
            one.status,
            f"{one.pushes}" if one.half == "didcomm" else "",
            "" if one.due_at is None else _time(one.due_at),
        )
        for one in entries
    ]
    print_table(("half", "id", "received", "expires", "size #", "status", "pushes #", "due"), rows)


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):  # no year has it
        return f"{seconds:g}"


def _now() -> float:
    return datetime.now(UTC).timestamp()


def _seconds(text: str) -> float:
    """:raise BadParameter: it is no duration."""
    from pydantic import TypeAdapter, ValidationError

    from mediatord.config.values import Duration

    try:
        return float(TypeAdapter(Duration).validate_python(text))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise click.BadParameter(reason, param_hint="--older-than") from None


def _several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
