"""The benchmark drives Affinidi's mediator: here a server of its requests, in `make bench-peers` itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import click
import pytest

from mediatord.bench.affinidi_mediator import AffinidiMediator, enrol_affinidi_group, find_affinidi_mediator
from mediatord.bench.cli import bench
from mediatord.bench.measured_mediator import ForwardLoad, MeasuredMediator
from mediatord.bench.plan import AFFINIDI_SCENARIOS, RECIPIENTS, BenchmarkPlan
from mediatord.bench.processes import read_line, spawn_module
from mediatord.bench.wallet_group import find_mediator
from tests.integration.affinidi_protocol_server import API

TINY = ["--seconds", "0.2", "--rounds", "1", "--clients", "3", "--sizes", "1k"]

StartServer = Callable[..., str]


@pytest.fixture(name="start_server")
def server_processes() -> Iterator[StartServer]:
    """Starts servers; the URL of each one's API."""
    with ExitStack() as stack:

        def start(*arguments: str) -> str:
            process = stack.enter_context(spawn_module("tests.integration.affinidi_protocol_server", *arguments))
            return f"http://127.0.0.1:{read_line(process)}{API}"

        yield start


def read_counts(url: str) -> dict[str, int]:
    """What the server has seen."""
    with urllib.request.urlopen(f"{url.removesuffix(API)}/counts", timeout=30) as response:
        counts: dict[str, int] = json.loads(response.read())["data"]
        return counts


def require_mediator(url: str) -> AffinidiMediator:
    """The mediator at a URL."""
    mediator = find_affinidi_mediator(url)
    assert mediator is not None
    return mediator


def test_measures_forwards_and_live_deliveries(tmp_path: Path, start_server: StartServer) -> None:
    """Each wallet authenticates once; every forward is stored, and each that was pushed is deleted."""
    url, results = start_server(), tmp_path / "results.json"
    assert bench.main([*TINY, "--target", url, "--json", str(results)], standalone_mode=False) == 0
    found = json.loads(results.read_text())["scenarios"]
    assert [scenario["failures"] for scenario in found] == [[]] * len(AFFINIDI_SCENARIOS)
    # A tenth of a second of an open loop may have no arrival, at the rate of a busy machine.
    closed_loops = [row for name, row in found[2]["rows"].items() if "  at " not in name]
    assert len(closed_loops) == 2 and all(row["msg/s"] > 0 for row in closed_loops)
    pushed = int(found[2]["notes"][2].split()[0])
    counts = read_counts(url)
    # The cycle has 64 wallets that are live, and others that are not.
    assert counts["authenticated"] == 3 * RECIPIENTS + 64
    assert counts["forwards"] > counts["deleted"] == pushed > 0


def test_lost_message_is_a_failure(start_server: StartServer) -> None:
    """What is answered and not stored is counted, as of any mediator."""
    failures = list[str]()
    with closing(MeasuredMediator(BenchmarkPlan(target=start_server("forget")), None)) as mediator:
        load = ForwardLoad(mediator, failures, 1024, wallets=3)
        load.stored_check.check(load.start(1, requests=20).result())
    assert failures == ["20 messages were accepted, 18 are stored"]


def test_refused_authentication_is_told(start_server: StartServer) -> None:
    """In a sentence, with the mediator's reason."""
    ours, other = map(require_mediator, (start_server(), start_server()))
    confused = AffinidiMediator(ours.did, ours.document, other.http_uri, other.ws_uri, other.url)
    with pytest.raises(RuntimeError, match="the mediator refused a request: 403 NA not encrypted for us"):
        enrol_affinidi_group(confused, 1)


def test_other_scenarios_are_refused(start_server: StartServer) -> None:
    """What it cannot do is refused before anything is measured."""
    url = start_server()
    with pytest.raises(click.UsageError, match="drain, storm: not available with Affinidi's mediator"):
        bench.main([*TINY, "--target", url, "--scenario", "storm", "--scenario", "drain"], standalone_mode=False)
    assert read_counts(url) == {}


def test_only_its_own_publication_is_recognised(start_server: StartServer) -> None:
    """Another mediator is none of Affinidi's, whether or not a server is there."""
    assert find_affinidi_mediator("http://127.0.0.1:1") is None
    url = start_server()
    assert find_affinidi_mediator(url.removesuffix(API)) is None
    assert isinstance(find_affinidi_mediator(f"{url}/"), AffinidiMediator)
    with pytest.raises(RuntimeError, match="no DIDComm mediator found"):
        find_mediator(url)
