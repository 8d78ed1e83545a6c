"""Compares mediatord with other software in one run: `make bench-peers`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mediatord.bench.plan import BenchmarkPlan
from mediatord.bench.results import ResultTable, build_json_report, describe_environment, format_heading
from mediatord.protocol import encoding
from mediatord.wallet.temporary_daemon import DaemonStartError
from tests.peers import (
    envelope_benchmark,
    forward_benchmark,
    http_benchmark,
    mediator_benchmark,
    websocket_benchmark,
)
from tests.peers.comparison import ComparisonOptions

SCENARIOS: dict[str, Callable[[ComparisonOptions], ResultTable]] = {
    "opening": envelope_benchmark.measure_envelopes,
    "forward": forward_benchmark.measure_forwards,
    "mediators": mediator_benchmark.measure_mediators,
    "post": http_benchmark.measure_http,
    "sockets": websocket_benchmark.measure_websockets,
}
# Peers of each scenario.
PEERS: dict[str, tuple[str, ...]] = {
    "opening": tuple(envelope_benchmark.GOALS),
    "forward": tuple(forward_benchmark.GOALS),
    "mediators": (mediator_benchmark.AFFINIDI,),
    "post": tuple(http_benchmark.GOALS),
    "sockets": tuple(websocket_benchmark.SERVERS),
}
_DEFAULT = ComparisonOptions()
_POSITIVE = click.IntRange(1)
_EVERYONE = sorted({peer for peers in PEERS.values() for peer in peers})


def scenarios_with(peers: frozenset[str], wanted: tuple[str, ...] = ()) -> list[str]:
    """
    Scenarios with one of these peers, in order; all without a peer.

    :param wanted: limit to these, if any.
    """
    selected = wanted or tuple(SCENARIOS)
    return [name for name in SCENARIOS if name in selected and (not peers or peers & set(PEERS[name]))]


@click.command(context_settings={"show_default": True})
@click.option("--peer", "peers", type=click.Choice(_EVERYONE), multiple=True, help="Only beside this; repeatable.")
@click.option(
    "--scenario", "wanted", type=click.Choice(list(SCENARIOS)), multiple=True, help="Only this; repeatable."
)
@click.option("--rounds", type=_POSITIVE, default=_DEFAULT.rounds, help="Contenders take turns; medians of so many.")
@click.option("--seconds", type=click.FloatRange(0.1), default=_DEFAULT.seconds, help="Per contender and round.")
@click.option("--size", "sizes", type=click.IntRange(256), multiple=True, default=_DEFAULT.sizes, help="Bytes.")
@click.option("--sockets", "held", type=_POSITIVE, multiple=True, default=_DEFAULT.sockets, help="Idle WebSockets.")
@click.option("--clients", type=click.IntRange(1, 1000), default=_DEFAULT.clients, help="Connections that post.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there.")
def main(
    peers: tuple[str, ...],
    wanted: tuple[str, ...],
    rounds: int,
    seconds: float,
    sizes: tuple[int, ...],
    held: tuple[int, ...],
    clients: int,
    json_file: Path | None,
) -> None:
    """
    Measure mediatord beside other software on this machine, in turns.

    A peer that is not installed is skipped and named. Exit status 1 means that a contender read an envelope otherwise
    than mediatord, refused a request or lost a message; a missed target is only reported.
    """
    terms = ComparisonOptions(frozenset(peers), rounds, seconds, tuple(sorted(sizes)), held, clients)
    plan = BenchmarkPlan(seconds=seconds, rounds=rounds, clients=clients, sockets=max(held), sizes=terms.sizes)
    around = describe_environment() | {"command": _command()}
    click.echo(f"{around['command']}\n{format_heading(plan, around)}")
    tables = []
    try:
        for name in scenarios_with(terms.peers, wanted):
            click.echo(f"measuring: {name}", err=True)
            tables.append(SCENARIOS[name](terms))
            click.echo(f"\n{tables[-1]}")
    except (DaemonStartError, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_bytes(_as_json(plan, tables, around))
    sys.exit(1 if any(table.failures for table in tables) else 0)


def _command() -> str:
    options = " ".join(sys.argv[1:])
    return f'make bench-peers ARGS="{options}"' if options else "make bench-peers"


def _as_json(plan: BenchmarkPlan, tables: list[ResultTable], around: dict[str, Any]) -> bytes:
    return encoding.dumps(build_json_report(plan, tables, around)) + b"\n"


if __name__ == "__main__":
    main()
