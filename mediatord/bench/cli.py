"""The subcommand `mediatord bench`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from mediatord.bench.affinidi_mediator import AffinidiMediator
from mediatord.bench.measured_mediator import find_target
from mediatord.bench.plan import (
    AFFINIDI_SCENARIOS,
    DEFAULT_SCENARIOS,
    MONGODB_SCENARIOS,
    OPTIONAL_SCENARIOS,
    SCENARIOS,
    TARGET_SCENARIOS,
    BenchmarkPlan,
)
from mediatord.bench.results import build_json_report, describe_environment, format_heading, render_svg, select_charts
from mediatord.config.value_syntax import parse_size
from mediatord.config.value_types import split_url
from mediatord.protocol import encoding
from mediatord.runtime.option_types import IntegerRange, NumberRange
from mediatord.wallet.temporary_daemon import DaemonStartError

_DEFAULTS = BenchmarkPlan()
_MIN_SIZE, _MAX_SIZE = 256, 512 * 1024  # base64 twice makes 1 MiB of 512 KiB, the daemon's limit


def _make_list_parser(parse: Callable[[str], int], least: int, most: float, expected: str, bounds: str) -> Any:
    def parse_list(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(map(parse, text.split(",")))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list: expected {expected}") from None
        if not all(least <= number <= most for number in numbers):
            raise click.BadParameter(bounds)
        return numbers

    return parse_list


_parse_sizes = _make_list_parser(
    parse_size, _MIN_SIZE, _MAX_SIZE, "sizes such as 1k,16k", "expected sizes from 256 bytes to 512k"
)
_parse_numbers = _make_list_parser(int, 1, float("inf"), "numbers such as 1000,100000", "expected positive numbers")


def _option(name: str, kind: Any, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option of the plan's default."""
    return click.option(f"--{name}", type=kind, default=getattr(_DEFAULTS, name), help=text)


def _check_target(context: click.Context, parameter: click.Parameter, url: str) -> str:
    if url and split_url(url) is None:
        raise click.BadParameter("expected an http:// or https:// URL")
    return url


def _check_output_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Before minutes of measuring."""
    if path is not None and path != _STDOUT:
        written = path if path.exists() else path.parent
        if not written.exists():
            raise click.BadParameter(f"directory {written} does not exist")
        if not os.access(written, os.W_OK):
            raise click.BadParameter(f"this user cannot write to {written}")
    return path


_POSITIVE = IntegerRange(1)
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)
_NEW_FILE_OR_STDOUT = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
_STDOUT = Path("-")


@click.command(context_settings={"show_default": True}, short_help="Run the benchmark.")
@_option("seconds", NumberRange(0.1), "Measurement time per server and round.")
@_option("rounds", _POSITIVE, "Number of interleaved rounds; medians are reported.")
@_option("clients", IntegerRange(1, 1000), "Number of concurrent connections.")
@_option("sockets", _POSITIVE, "Number of WebSockets, for `sockets`, `storm` and `presence`.")
@_option("messages", IntegerRange(100), "Number of messages, for `memory`.")
@_option("events", IntegerRange(1000), "Number of stored events, for `pages`.")
@click.option(
    "--accounts",
    callback=_parse_numbers,
    default=",".join(map(str, _DEFAULTS.accounts)),
    metavar="LIST",
    help="Comma-separated numbers of registered DIDs, for `accounts`.",
)
@_option("queued", _POSITIVE, "Number of queued messages, for `accounts`.")
@_option("minutes", NumberRange(0.1), "Duration of `soak`.")
@click.option("--even", is_flag=True, help="Send at fixed intervals instead of a Poisson process.")
@click.option(
    "--sizes",
    callback=_parse_sizes,
    default="1k,16k",
    metavar="LIST",
    help="Comma-separated plaintext or payload sizes.",
)
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice(list(SCENARIOS)),
    metavar="NAME",
    multiple=True,
    help=f"Scenario to run; may be repeated. Default: {', '.join(DEFAULT_SCENARIOS)}. On request: "
    f"{', '.join(OPTIONAL_SCENARIOS)}. With --mongodb: {', '.join(MONGODB_SCENARIOS)}.",
)
@click.option(
    "--target",
    metavar="URL",
    callback=_check_target,
    default="",
    show_default=False,
    help="Measure the DIDComm v2 mediator at this URL or invitation instead of starting one.",
)
@click.option("--target-did", metavar="DID", help="DID of the target, if it serves neither `/did` nor `/invitation`.")
@click.option(
    "--target-pid",
    type=_POSITIVE,
    help="Process ID of the target's main process on this machine, to measure its CPU time.",
)
@click.option(
    "--mongodb",
    metavar="URI",
    default="",
    show_default=False,
    help="URI of a MongoDB replica set; the benchmark creates databases in it and drops them.",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=_NEW_FILE_OR_STDOUT,
    callback=_check_output_file,
    help="Write the results to FILE as JSON; `-` is standard output, and tables then go to standard error.",
)
@click.option(
    "--svg",
    "svg_file",
    metavar="FILE",
    type=_NEW_FILE,
    callback=_check_output_file,
    help="Write charts of latency and throughput to FILE.",
)
def bench(
    sizes: tuple[int, ...],
    scenarios: tuple[str, ...],
    target_pid: int | None,
    json_file: Path | None,
    svg_file: Path | None,
    **numbers: Any,
) -> int:
    """
    Measure the mediator on this machine, alongside baselines measured in the same run.

    Starts temporary daemons (TMPDIR selects the disk). Exits with 1 if messages were lost or rejected, or memory
    grew; a missed target is only reported.
    """
    plan = BenchmarkPlan(sizes=sizes, target_pid=target_pid or 0, **numbers)
    wanted: Sequence[str] = scenarios or (() if plan.target else tuple(DEFAULT_SCENARIOS))
    _validate_plan(plan, wanted)
    around, is_json_printed = describe_environment(), json_file == _STDOUT
    click.echo(format_heading(plan, around), err=is_json_printed)
    tables = []
    try:
        for name in _select_target_scenarios(plan, wanted) if plan.target else wanted:
            click.echo(f"measuring: {name}", err=True)
            module, _, function = SCENARIOS[name].partition(":")
            tables.append(getattr(import_module(f"mediatord.bench.{module}"), function)(plan))
            click.echo(f"\n{tables[-1]}", err=is_json_printed)
    except (DaemonStartError, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    report = encoding.dumps(build_json_report(plan, tables, around)) + b"\n"
    if is_json_printed:
        click.echo(report, nl=False)
    elif json_file is not None:
        json_file.write_bytes(report)
    if svg_file is not None:
        svg_file.write_text(render_svg(select_charts(tables)), "utf-8")
    return 1 if any(table.failures for table in tables) else 0


def _select_target_scenarios(plan: BenchmarkPlan, wanted: Sequence[str]) -> Sequence[str]:
    """The wanted ones, or all that the target can run."""
    if not isinstance(find_target(plan), AffinidiMediator):
        return wanted or TARGET_SCENARIOS
    if unable := sorted(set(wanted) - set(AFFINIDI_SCENARIOS)):
        raise click.UsageError(f"{', '.join(unable)}: not available with Affinidi's mediator")
    return wanted or AFFINIDI_SCENARIOS


def _validate_plan(plan: BenchmarkPlan, wanted: Sequence[str]) -> None:
    if not plan.mongodb and (needing := sorted(set(wanted) & set(MONGODB_SCENARIOS))):
        raise click.UsageError(f"{', '.join(needing)}: expected --mongodb with the URI of a replica set")
    if plan.target and (local := sorted(set(wanted) - set(TARGET_SCENARIOS))):
        raise click.UsageError(f"{', '.join(local)}: not available with --target")
    if not plan.target and (plan.target_did or plan.target_pid):
        raise click.UsageError("--target-did and --target-pid require --target")
