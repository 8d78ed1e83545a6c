"""The subcommand `mediatord bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from mediatord.bench.commanding import measure_commands
from mediatord.bench.cost import measure_cost
from mediatord.bench.elsewhere import measure_elsewhere
from mediatord.bench.figures import Table
from mediatord.bench.forwarding import measure_forwarding
from mediatord.bench.log import measure_log
from mediatord.bench.memory import measure_memory
from mediatord.bench.nodes import measure_mongodb, measure_nodes
from mediatord.bench.opening import measure_opening
from mediatord.bench.paging import measure_pages
from mediatord.bench.plan import DEFAULT_SCENARIOS, ON_MONGODB, SCENARIOS, Plan
from mediatord.bench.presence import measure_presence
from mediatord.bench.push import measure_push
from mediatord.bench.report import as_json, as_text, heading, surroundings
from mediatord.bench.sockets import measure_sockets
from mediatord.protocol import jsontext
from mediatord.wallet.throwaway import DaemonFailed

_MEASURES: dict[str, Callable[[Plan], Table]] = {
    "opening": measure_opening,
    "forward": measure_forwarding,
    "command": measure_commands,
    "log": measure_log,
    "push": measure_push,
    "sockets": measure_sockets,
    "memory": measure_memory,
    "cost": measure_cost,
    "pages": measure_pages,
    "mongodb": measure_mongodb,
    "nodes": measure_nodes,
    "elsewhere": measure_elsewhere,
    "presence": measure_presence,
}
_DEFAULT = Plan()


def _read_sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """A comma-separated list, `k` for 1024 bytes."""
    try:
        sizes = tuple(
            int(size.removesuffix("k")) * (1024 if size.endswith("k") else 1) for size in text.lower().split(",")
        )
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of sizes like 1k,16k") from None
    # A forward of more is refused by the daemon: base64 twice makes 1 MiB of it.
    if not all(256 <= size <= 512 * 1024 for size in sizes):
        raise click.BadParameter("sizes are between 256 bytes and 512k")
    return sizes


_POSITIVE = click.IntRange(1)


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(0.1), default=_DEFAULT.seconds, help="Per contender and round.")
@click.option("--rounds", type=_POSITIVE, default=_DEFAULT.rounds, help="Contenders take turns; medians of so many.")
@click.option("--clients", type=click.IntRange(1, 1000), default=_DEFAULT.clients, help="Connections that post.")
@click.option("--sockets", type=_POSITIVE, default=_DEFAULT.sockets, help="Idle WebSockets.")
@click.option("--messages", type=click.IntRange(100), default=_DEFAULT.messages, help="Over which memory is watched.")
@click.option("--events", type=click.IntRange(1000), default=_DEFAULT.events, help="In the large store of `pages`.")
@click.option(
    "--sizes", callback=_read_sizes, default="1k,16k", help="Of the innermost plaintext, or of the payload."
)
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice(SCENARIOS),
    multiple=True,
    help="Only this; repeatable. Without it all but `cost`, `pages` (minutes), and those that need --mongodb.",
)
@click.option(
    "--mongodb",
    metavar="URI",
    default="",
    help="A replica set, for the scenarios that need one; databases are made in it and dropped.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there.")
def bench(
    seconds: float,
    rounds: int,
    clients: int,
    sockets: int,
    messages: int,
    events: int,
    sizes: tuple[int, ...],
    scenarios: tuple[str, ...],
    mongodb: str,
    json_file: Path | None,
) -> int:
    """
    Measure this mediator on this machine, each figure beside a floor measured in the same run.

    Starts daemons of its own in temporary directories (TMPDIR chooses the disk) and leaves nothing behind.
    Exit status 1 means that messages were lost or refused, or that memory grew; a missed target is only reported.
    """
    if not mongodb and (needing := sorted(set(scenarios) & set(ON_MONGODB))):
        raise click.UsageError(f"{', '.join(needing)}: expected --mongodb with the URI of a replica set")
    plan = Plan(seconds, rounds, clients, sockets, messages, events, sizes, mongodb)
    around = surroundings()
    click.echo(heading(plan, around))
    tables = []
    try:
        for name in scenarios or DEFAULT_SCENARIOS:
            click.echo(f"measuring: {name}", err=True)
            tables.append(_MEASURES[name](plan))
            click.echo(f"\n{as_text(tables[-1])}")
    except (DaemonFailed, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_bytes(jsontext.dumps(as_json(plan, tables, around)) + b"\n")
    return 1 if any(table.failures for table in tables) else 0
