"""The benchmark: small runs complete and count correctly. The measured values are not tested."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import click
import pytest

from mediatord.bench import v1_scenario
from mediatord.bench.cli import bench
from mediatord.bench.credo_mediator import explain_absence
from mediatord.bench.decentrl_scenarios import BlockingDecentrlWallet, sign_private_commands
from mediatord.bench.load_generator import TargetServer, post
from mediatord.bench.measured_mediator import DATABASE_FILE, StoredMessageCheck, count_stored_rows
from mediatord.bench.memory_scenarios import growth_per_message
from mediatord.bench.plan import (
    DAEMON_SETTINGS,
    DEFAULT_SCENARIOS,
    MONGODB_SCENARIOS,
    OPTIONAL_SCENARIOS,
    SCENARIOS,
    TARGET_SCENARIOS,
)
from mediatord.bench.processes import read_line, spawn_module
from mediatord.bench.raw_clients import TEXT_OPCODE, KeepAliveClient, encode_frame, is_complete_response, parse_frame
from mediatord.bench.results import LoadResult, run_interleaved
from mediatord.wallet.decentrl_client import DecentrlMediator
from mediatord.wallet.temporary_daemon import run_temporary_daemon

TINY = ["--seconds", "0.2", "--rounds", "1", "--clients", "3", "--sockets", "5", "--messages", "500", "--sizes", "1k"]


@pytest.mark.exhaustive
def test_small_run_measures_every_scenario(tmp_path: Path) -> None:
    """Every scenario runs against its own daemon; all accepted messages are stored, and the JSON says so."""
    results = tmp_path / "results.json"
    # So few messages do not tell growth from warm-up.
    scenarios = [word for name in DEFAULT_SCENARIOS if name != "memory" for word in ("--scenario", name)]
    svg = tmp_path / "results.svg"
    status = bench.main([*TINY, *scenarios, "--json", str(results), "--svg", str(svg)], standalone_mode=False)
    found = json.loads(results.read_text())
    assert status == 0
    assert found["plan"]["clients"] == 3
    by_name = dict(zip((name for name in DEFAULT_SCENARIOS if name != "memory"), found["scenarios"], strict=True))
    assert {name: one["failures"] for name, one in by_name.items()} == {name: [] for name in by_name}
    forwarding, commands = by_name["forward"], by_name["command"]
    assert [name for name in forwarding["rows"] if name.endswith("mediatord, durable")] == [
        "1k  mediatord, durable",
        "1k, long DIDs  mediatord, durable",
    ]
    assert all(row["msg/s"] > 0 for name, row in forwarding["rows"].items() if "mediatord" in name)
    assert forwarding["targets"][0]["goal"] == 0.22
    assert by_name["latency"]["targets"][0]["most"]
    assert by_name["cycle"]["rows"]["1k  cycle"]["msg/s"] > 0
    assert "<polyline" in svg.read_text("utf-8")
    assert [name for name in commands["rows"] if "mediatord" in name] == [
        "300b  mediatord, durable",
        "1k  mediatord, durable",
    ]
    assert all(row["msg/s"] > 0 for row in commands["rows"].values())
    assert [target["goal"] for target in commands["targets"]] == [0.45, 0.45]
    log = by_name["log"]
    # One line for the request and one for the message; none without the log, except a gauge of that minute.
    assert round(log["rows"]["1k  event log on"]["lines"]) == 2
    assert round(log["rows"]["1k  event log off"]["lines"]) == 0


@pytest.mark.exhaustive
def test_event_pages_are_read_from_long_and_short_history(tmp_path: Path) -> None:
    """A long and a short history are filled, and the pages have as many events as expected."""
    results = tmp_path / "results.json"
    options = [*TINY, "--scenario", "pages", "--events", "2999", "--json", str(results)]
    assert bench.main(options, standalone_mode=False) == 0
    (pages,) = json.loads(results.read_text())["scenarios"]
    assert [note.partition(",")[0] for note in pages["notes"]] == ["small: 1", "large: 2"]
    assert [target["goal"] for target in pages["targets"]] == [0.5] * len(pages["rows"])
    assert {"last page", "last page, after a change", "public, one tag"} <= set(pages["rows"])
    assert all(row["small pages/s"] > 0 and row["large pages/s"] > 0 for row in pages["rows"].values())


def test_event_pages_scenario_is_not_run_by_default() -> None:
    """Filling a large store takes minutes, and MongoDB may be missing."""
    assert set(SCENARIOS) - set(DEFAULT_SCENARIOS) == {*OPTIONAL_SCENARIOS, *MONGODB_SCENARIOS}
    assert {"cost", "pages", "accounts"} <= set(OPTIONAL_SCENARIOS)


@pytest.mark.exhaustive
def test_measures_mediator_by_url_and_cleans_up(tmp_path: Path) -> None:
    """Forwarded messages are fetched and compared; no message and no account is left."""
    results = tmp_path / "results.json"
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        options = [*TINY, "--target", daemon.url, "--target-pid", str(daemon.pid), "--json", str(results)]
        assert bench.main(options, standalone_mode=False) == 0
        assert count_stored_rows(daemon.directory / DATABASE_FILE) == 0
        assert count_stored_rows(daemon.directory / DATABASE_FILE, "recipient") == 0
        assert count_stored_rows(daemon.directory / DATABASE_FILE, "account") > 0
    found = json.loads(results.read_text())["scenarios"]
    assert len(found) == len(TARGET_SCENARIOS)
    assert [scenario["failures"] for scenario in found] == [[]] * len(TARGET_SCENARIOS)
    assert found[0]["rows"]["1k  target"]["of g"] > 0


def test_refuses_scenarios_that_need_a_local_daemon() -> None:
    """A scenario that an external mediator cannot run is refused, not skipped."""
    with pytest.raises(click.UsageError, match="memory: not available with --target"):
        bench.main(["--target", "http://127.0.0.1:1", "--scenario", "memory"], standalone_mode=False)
    with pytest.raises(click.UsageError, match="require --target"):
        bench.main(["--target-pid", "1", "--scenario", "forward"], standalone_mode=False)


@pytest.mark.exhaustive
def test_large_database_scenario_loses_no_message(tmp_path: Path) -> None:
    """Daemons start with filled databases and accept forwards."""
    results = tmp_path / "results.json"
    scale = ["--scenario", "accounts", "--accounts", "150,300", "--queued", "200"]
    assert bench.main([*TINY, *scale, "--json", str(results)], standalone_mode=False) == 0
    (found,) = json.loads(results.read_text())["scenarios"]
    assert list(found["rows"])[:3] == ["150 accounts", "300 accounts", "150 accounts, 200 messages"]
    assert all(row["msg/s"] > 0 for row in found["rows"].values())


def test_every_scenario_has_a_measurement() -> None:
    """Every scenario that the command accepts is implemented."""
    for where in SCENARIOS.values():
        module, _, function = where.partition(":")
        assert callable(getattr(import_module(f"mediatord.bench.{module}"), function))


def test_message_cost_covers_its_whole_life(tmp_path: Path) -> None:
    """
    A message takes more space than its payload, acceptance and removal are logged, and all messages are fetched.
    """
    results = tmp_path / "results.json"
    assert bench.main([*TINY, "--scenario", "cost", "--json", str(results)], standalone_mode=False) == 0
    (cost,) = json.loads(results.read_text())["scenarios"]
    assert cost["failures"] == []
    accepted, fetched = cost["rows"]["1k  accepted"], cost["rows"]["1k  fetched"]
    assert accepted["database B"] > accepted["payload B"] > 1024
    assert accepted["log B"] > accepted["gzipped log B"] > 0
    assert fetched["log B"] > 0


@pytest.mark.parametrize(
    "has_credo", [pytest.param(False, id="alone"), pytest.param(True, id="credo", marks=pytest.mark.exhaustive)]
)
def test_v1_is_measured_beside_v2(has_credo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of both versions are stored or delivered, each once; Credo's mediator takes part if installed."""
    if not has_credo:
        monkeypatch.setattr(v1_scenario, "explain_absence", lambda: "is not here")
    elif reason := explain_absence():
        pytest.skip(reason)
    results = tmp_path / "results.json"
    assert bench.main([*TINY, "--scenario", "v1", "--json", str(results)], standalone_mode=False) == 0
    (found,) = json.loads(results.read_text())["scenarios"]
    names = ["mediatord, v2", "mediatord, v1"] + ["Credo, v1"] * has_credo
    assert list(found["rows"]) == [f"1k {kind}  {name}" for kind in ("cycle", "forward") for name in names]
    assert all(row["msg/s"] > 0 for row in found["rows"].values())
    assert ("Credo's mediator is not measured: it is not here." in found["notes"]) is not has_credo


def test_mongodb_scenarios_require_a_uri() -> None:
    """They are refused before anything is measured."""
    with pytest.raises(click.UsageError, match="nodes: expected --mongodb"):
        bench.main(["--scenario", "opening", "--scenario", "nodes"], standalone_mode=False)


def test_memory_scenario_accounts_for_every_message(tmp_path: Path) -> None:
    """Warm-up messages are included."""
    results = tmp_path / "results.json"
    bench.main([*TINY, "--scenario", "memory", "--json", str(results)], standalone_mode=False)
    (memory,) = json.loads(results.read_text())["scenarios"]
    assert list(memory["rows"])[-2:] == ["after 500 more", "growth"]
    # So few messages do not tell growth from warm-up.
    assert [failure for failure in memory["failures"] if not failure.startswith("memory grew by")] == []


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_parses_websocket_frames_of_any_length(size: int) -> None:
    """A frame at the start of a buffer is returned only when complete (RFC 6455 5.2)."""
    masked = encode_frame(bytes(size), TEXT_OPCODE)
    start = len(masked) - size
    payload = b"x" * size
    unmasked = bytes([masked[0], masked[1] & 0x7F]) + masked[2 : start - 4] + payload
    assert parse_frame(unmasked + b"rest") == (TEXT_OPCODE, payload, len(unmasked))
    assert parse_frame(unmasked[:-1]) is None


def test_masks_websocket_payloads() -> None:
    """A client's payload is XORed with the four-byte masking key (RFC 6455 5.3)."""
    masked = encode_frame(b"hello", TEXT_OPCODE)
    mask, payload = masked[2:6], masked[6:]
    assert bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload)) == b"hello"


@pytest.mark.parametrize(
    ("response", "complete"),
    [
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nx", False),
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nxy", True),
        (b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 202 Accepted\r\nContent-Le", False),
    ],
)
def test_detects_complete_responses(response: bytes, complete: bool) -> None:
    """The load generator sends its next request only after the whole response (RFC 9112 6)."""
    assert is_complete_response(response) is complete


@pytest.fixture(name="site")
def baseline_site() -> Iterator[TargetServer]:
    """A site that answers every request with an empty 202."""
    with spawn_module("mediatord.bench.baseline_servers", "empty") as site:
        yield TargetServer(f"http://127.0.0.1:{read_line(site)}/didcomm", site.pid)


def test_posts_each_command_once(site: TargetServer) -> None:
    """Several processes post disjoint parts; repeatable bodies are repeated up to the number."""
    bodies = [b"0", b"1", b"2", b"3", b"4"]
    assert post(site, bodies, 2, once=True).statuses == {"202": 5}
    assert post(site, bodies, 2, requests=17).statuses == {"202": 17}


def test_every_connection_posts_at_least_once(site: TargetServer) -> None:
    """Even in a short run on a busy machine."""
    assert post(site, [b"0"], 3, 0.0).statuses == {"202": 3}


def test_reports_refused_and_lost_messages_as_failures() -> None:
    """Every response must be a success, and every success a row."""
    stored, failures = iter([0, 5, 5]), list[str]()
    accounting = StoredMessageCheck(lambda: next(stored), failures, ("200",))
    accounting.check(LoadResult(Counter({"200": 5}), accepted=5))
    assert failures == []
    accounting.check(LoadResult(Counter({"200": 1, "401": 1}), accepted=1))
    refused, lost = failures
    assert "'401': 1" in refused
    assert lost == "6 messages were accepted, 5 are stored"


def test_command_baseline_verifies_and_stores(tmp_path: Path) -> None:
    """The baseline stores correctly signed commands with 200, and refuses forged ones."""
    mediator = DecentrlMediator("did:web:localhost", "http://localhost/", bytes(32), bytes(32))
    with (
        spawn_module("mediatord.bench.baseline_servers", "commands", str(tmp_path / "floor")) as site,
        closing(KeepAliveClient(f"http://127.0.0.1:{read_line(site)}/")) as line,
    ):
        alice, bob = (BlockingDecentrlWallet(name, mediator, line) for name in ("alice", "bob"))
        (command,) = sign_private_commands([(alice, bob)], 300, 1)
        forged = command.replace(b"TWO_WAY_PRIVATE", b"ONE_WAY_PUBLIC")
        assert json.loads(line.post(command).body) == {"type": "SUCCESS"}
        assert line.post(forged).status == 500
    assert count_stored_rows(tmp_path / "floor", "event") == 1


def test_leak_estimate_ignores_single_jumps() -> None:
    """It shows growth per message, and hardly an allocator's one-time jump."""
    assert growth_per_message([start + 300 * 1000 * leg for leg, start in enumerate([50_000] * 6)], 1000) == 300
    assert growth_per_message([50, 9_000_000, 50, 50, 50, 50], 1000) == 0


def test_interleaved_rounds_compare_medians_of_ratios() -> None:
    """Rounds begin with different contenders; ratios are taken within a round."""
    order: list[str] = []
    figures = iter([1.0, 10.0, 30.0, 2.0, 100.0, 20.0])

    def contender(name: str) -> dict[str, float]:
        order.append(name)
        return {"rate": next(figures)}

    found = run_interleaved({"a": lambda: contender("a"), "b": lambda: contender("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (found.medians("a"), found.medians("b")) == ({"rate": 2.0}, {"rate": 20.0})
    # 1/10, 2/30 and 100/20 within the rounds.
    assert found.ratio("a", "b", "rate") == 0.1
