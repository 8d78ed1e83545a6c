"""The subcommand `mediatord bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from mediatord.bench.figures import Table
from mediatord.bench.pictures import pictures_of
from mediatord.bench.plan import ANYWHERE, DEFAULT_SCENARIOS, ON_MONGODB, SCENARIOS, Plan
from mediatord.bench.plot import svg
from mediatord.bench.report import as_json, as_text, heading, surroundings
from mediatord.protocol import jsontext
from mediatord.sizes import parse_size
from mediatord.wallet.throwaway import DaemonFailed

# Looked up when it is its turn: a scenario's modules are not there for the others to wait for.
MEASURES = {
    "opening": "opening:measure_opening",
    "forward": "forwarding:measure_forwarding",
    "latency": "latency:measure_latency",
    "cycle": "cycle:measure_cycle",
    "drain": "drain:measure_drain",
    "storm": "storm:measure_storm",
    "mixed": "mixed:measure_mixed",
    "command": "commanding:measure_commands",
    "log": "log:measure_log",
    "push": "push:measure_push",
    "sockets": "sockets:measure_sockets",
    "memory": "memory:measure_memory",
    "workers": "workers:measure_workers",
    "accounts": "scale:measure_scale",
    "disk": "disk:measure_disk",
    "soak": "soak:measure_soak",
    "cost": "cost:measure_cost",
    "pages": "paging:measure_pages",
    "abuse": "abuse:measure_abuse",
    "mongodb": "nodes:measure_mongodb",
    "nodes": "nodes:measure_nodes",
    "elsewhere": "elsewhere:measure_elsewhere",
    "presence": "presence:measure_presence",
}
# What is measured of a mediator that is not ours in another way than of a daemon of our own.
_MEASURES_ANYWHERE = {"forward": "anywhere:measure_anywhere"}
_DEFAULT = Plan()


def _read_sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """A comma-separated list."""
    try:
        sizes = tuple(parse_size(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of sizes like 1k,16k") from None
    # A forward of more is refused by the daemon: base64 twice makes 1 MiB of it.
    if not all(256 <= size <= 512 * 1024 for size in sizes):
        raise click.BadParameter("sizes are between 256 bytes and 512k")
    return sizes


def _read_numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers."""
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers like 1000,100000") from None
    if min(numbers) < 1:
        raise click.BadParameter("numbers are positive")
    return numbers


_POSITIVE = click.IntRange(1)
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(0.1), default=_DEFAULT.seconds, help="Per contender and round.")
@click.option("--rounds", type=_POSITIVE, default=_DEFAULT.rounds, help="Contenders take turns; medians of so many.")
@click.option("--clients", type=click.IntRange(1, 1000), default=_DEFAULT.clients, help="Connections that post.")
@click.option("--sockets", type=_POSITIVE, default=_DEFAULT.sockets, help="Idle WebSockets, or those of the storm.")
@click.option("--messages", type=click.IntRange(100), default=_DEFAULT.messages, help="Over which memory is watched.")
@click.option("--events", type=click.IntRange(1000), default=_DEFAULT.events, help="In the large store of `pages`.")
@click.option(
    "--accounts",
    callback=_read_numbers,
    default=",".join(map(str, _DEFAULT.accounts)),
    help="Registered DIDs of `accounts`, in turn.",
)
@click.option("--queued", type=_POSITIVE, default=_DEFAULT.queued, help="Messages that wait, of `accounts`.")
@click.option("--minutes", type=click.FloatRange(0.1), default=_DEFAULT.minutes, help="Of `soak`.")
@click.option("--even", is_flag=True, help="Open-loop requests come in a beat, not at random (Poisson).")
@click.option(
    "--sizes", callback=_read_sizes, default="1k,16k", help="Of the innermost plaintext, or of the payload."
)
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice(SCENARIOS),
    metavar="NAME",
    multiple=True,
    help=f"Only this; repeatable: {', '.join(SCENARIOS)}. Without it all that take seconds and need nothing.",
)
@click.option(
    "--target",
    metavar="URL",
    default="",
    help="Measure the DIDComm v2 mediator that runs there, of any make: at its URL, or at an invitation of it.",
)
@click.option("--target-did", metavar="DID", help="Of the target, if it does not say so at `/did` or `/invitation`.")
@click.option(
    "--target-pid", type=_POSITIVE, help="Of the target's first process, if it runs here: its CPU time counts then."
)
@click.option(
    "--mongodb",
    metavar="URI",
    default="",
    help="A replica set, for the scenarios that need one; databases are made in it and dropped.",
)
@click.option("--json", "json_file", type=_NEW_FILE, help="Write all figures there.")
@click.option("--svg", "svg_file", type=_NEW_FILE, help="Draw latencies by load, and throughput by floors, there.")
def bench(
    sizes: tuple[int, ...],
    scenarios: tuple[str, ...],
    target_pid: int | None,
    json_file: Path | None,
    svg_file: Path | None,
    **numbers: Any,
) -> int:
    """
    Measure this mediator on this machine, each figure beside a floor measured in the same run.

    Starts daemons of its own in temporary directories (TMPDIR chooses the disk) and leaves nothing behind.
    Exit status 1 means that messages were lost or refused, or that memory grew; a missed target is only reported.
    """
    plan = Plan(sizes=sizes, target_pid=target_pid or 0, **numbers)
    wanted = scenarios or (ANYWHERE if plan.target else DEFAULT_SCENARIOS)
    _check(plan, wanted)
    around = surroundings()
    click.echo(heading(plan, around))
    tables = []
    try:
        for name in wanted:
            click.echo(f"measuring: {name}", err=True)
            tables.append(_measure(name, plan)(plan))
            click.echo(f"\n{as_text(tables[-1])}")
    except (DaemonFailed, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_bytes(jsontext.dumps(as_json(plan, tables, around)) + b"\n")
    if svg_file is not None:
        svg_file.write_text(svg(list(pictures_of(tables))), "utf-8")
    return 1 if any(table.failures for table in tables) else 0


def _check(plan: Plan, wanted: Sequence[str]) -> None:
    if not plan.mongodb and (needing := sorted(set(wanted) & set(ON_MONGODB))):
        raise click.UsageError(f"{', '.join(needing)}: expected --mongodb with the URI of a replica set")
    if plan.target and (ours := sorted(set(wanted) - set(ANYWHERE))):
        raise click.UsageError(f"{', '.join(ours)}: only a daemon of our own can show that, not a --target")
    if not plan.target and (plan.target_did or plan.target_pid):
        raise click.UsageError("--target-did and --target-pid belong to a --target")


def _measure(name: str, plan: Plan) -> Callable[[Plan], Table]:
    where = _MEASURES_ANYWHERE.get(name, MEASURES[name]) if plan.target else MEASURES[name]
    module, _, function = where.partition(":")
    found: Callable[[Plan], Table] = getattr(import_module(f"mediatord.bench.{module}"), function)
    return found
