"""The benchmark: that a run, however small, ends well and counts right. What it measures is not tested here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import click
import pytest

from mediatord.bench.cli import bench
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
def test_tiny_run_measures_everything(tmp_path: Path) -> None:
    """Every scenario runs against a daemon of its own; all that was accepted is stored, and the JSON says so."""
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
    # A line of the request and one of the message; none without the log, a gauge of that minute aside.
    assert round(log["rows"]["1k  event log on"]["lines"]) == 2
    assert round(log["rows"]["1k  event log off"]["lines"]) == 0


@pytest.mark.exhaustive
def test_pages_are_read_from_both_histories(tmp_path: Path) -> None:
    """A long and a short history are filled, and what is read of them is as many events as there have to be."""
    results = tmp_path / "results.json"
    options = [*TINY, "--scenario", "pages", "--events", "2999", "--json", str(results)]
    assert bench.main(options, standalone_mode=False) == 0
    (pages,) = json.loads(results.read_text())["scenarios"]
    assert [note.partition(",")[0] for note in pages["notes"]] == ["small: 1", "large: 2"]
    assert [target["goal"] for target in pages["targets"]] == [0.5] * len(pages["rows"])
    assert {"last page", "last page, after a change", "public, one tag"} <= set(pages["rows"])
    assert all(row["small pages/s"] > 0 and row["large pages/s"] > 0 for row in pages["rows"].values())


def test_pages_are_read_only_when_asked_for() -> None:
    """Filling a large store takes minutes, and not everybody has a MongoDB, so that no run does either unasked."""
    assert set(SCENARIOS) - set(DEFAULT_SCENARIOS) == {*OPTIONAL_SCENARIOS, *MONGODB_SCENARIOS}
    assert {"cost", "pages", "accounts"} <= set(OPTIONAL_SCENARIOS)


@pytest.mark.exhaustive
def test_any_mediator_can_be_measured_and_is_left_as_it_was(tmp_path: Path) -> None:
    """By its URL alone: what was forwarded is fetched and compared; nothing waits then, nobody is registered."""
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


def test_target_is_asked_for_what_any_mediator_has() -> None:
    """What only a daemon of our own can show is refused, not left out in silence."""
    with pytest.raises(click.UsageError, match="memory: not available with --target"):
        bench.main(["--target", "http://127.0.0.1:1", "--scenario", "memory"], standalone_mode=False)
    with pytest.raises(click.UsageError, match="require --target"):
        bench.main(["--target-pid", "1", "--scenario", "forward"], standalone_mode=False)


@pytest.mark.exhaustive
def test_large_databases_are_filled_and_swept(tmp_path: Path) -> None:
    """Daemons start with what was put into their files, take forwards, and none is lost."""
    results = tmp_path / "results.json"
    scale = ["--scenario", "accounts", "--accounts", "150,300", "--queued", "200"]
    assert bench.main([*TINY, *scale, "--json", str(results)], standalone_mode=False) == 0
    (found,) = json.loads(results.read_text())["scenarios"]
    assert list(found["rows"])[:3] == ["150 accounts", "300 accounts", "150 accounts, 200 messages"]
    assert all(row["msg/s"] > 0 for row in found["rows"].values())


def test_every_scenario_has_its_measure() -> None:
    """What can be asked for can be measured."""
    for where in SCENARIOS.values():
        module, _, function = where.partition(":")
        assert callable(getattr(import_module(f"mediatord.bench.{module}"), function))


def test_cost_of_a_message_is_that_of_its_life(tmp_path: Path) -> None:
    """A message takes more room than its payload, its acceptance and its end have lines, and all are fetched."""
    results = tmp_path / "results.json"
    assert bench.main([*TINY, "--scenario", "cost", "--json", str(results)], standalone_mode=False) == 0
    (cost,) = json.loads(results.read_text())["scenarios"]
    assert cost["failures"] == []
    accepted, fetched = cost["rows"]["1k  accepted"], cost["rows"]["1k  fetched"]
    assert accepted["database B"] > accepted["payload B"] > 1024
    assert accepted["log B"] > accepted["gzipped log B"] > 0
    assert fetched["log B"] > 0


def test_scenarios_on_mongodb_ask_for_one() -> None:
    """What needs a replica set says so before it measures anything."""
    with pytest.raises(click.UsageError, match="nodes: expected --mongodb"):
        bench.main(["--scenario", "opening", "--scenario", "nodes"], standalone_mode=False)


def test_memory_run_posts_exactly_what_it_says(tmp_path: Path) -> None:
    """The memory scenario accounts for every message, warm-up included."""
    results = tmp_path / "results.json"
    bench.main([*TINY, "--scenario", "memory", "--json", str(results)], standalone_mode=False)
    (memory,) = json.loads(results.read_text())["scenarios"]
    assert list(memory["rows"])[-2:] == ["after 500 more", "growth"]
    # So few messages do not tell growth from warm-up.
    assert [failure for failure in memory["failures"] if not failure.startswith("memory grew by")] == []


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_frames_are_cut_where_they_end(size: int) -> None:
    """A frame of any length is found at the start of a buffer, and not before all of it is there (RFC 6455 5.2)."""
    masked = encode_frame(bytes(size), TEXT_OPCODE)
    start = len(masked) - size
    payload = b"x" * size
    unmasked = bytes([masked[0], masked[1] & 0x7F]) + masked[2 : start - 4] + payload
    assert parse_frame(unmasked + b"rest") == (TEXT_OPCODE, payload, len(unmasked))
    assert parse_frame(unmasked[:-1]) is None


def test_masking_is_undone_by_the_mask() -> None:
    """A client's payload is XORed with the four bytes before it (RFC 6455 5.3)."""
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
def test_answers_are_complete_when_their_length_says_so(response: bytes, complete: bool) -> None:
    """The load generator sends its next request only after the whole answer (RFC 9112 6)."""
    assert is_complete_response(response) is complete


@pytest.fixture(name="site")
def stock_site() -> Iterator[TargetServer]:
    """A site that answers everything with an empty 202."""
    with spawn_module("mediatord.bench.baseline_servers", "empty") as site:
        yield TargetServer(f"http://127.0.0.1:{read_line(site)}/didcomm", site.pid)


def test_commands_are_posted_once(site: TargetServer) -> None:
    """Of several processes each posts its own part and then nothing; what may be repeated is posted to the number."""
    bodies = [b"0", b"1", b"2", b"3", b"4"]
    assert post(site, bodies, 2, once=True).statuses == {"202": 5}
    assert post(site, bodies, 2, requests=17).statuses == {"202": 17}


def test_every_connection_posts_something(site: TargetServer) -> None:
    """However short a run is, and however long a busy machine keeps it from beginning."""
    assert post(site, [b"0"], 3, 0.0).statuses == {"202": 3}


def test_refused_and_lost_messages_are_failures() -> None:
    """Every answer has to be a success, and every success a row."""
    stored, failures = iter([0, 5, 5]), list[str]()
    accounting = StoredMessageCheck(lambda: next(stored), failures, ("200",))
    accounting.check(LoadResult(Counter({"200": 5}), accepted=5))
    assert failures == []
    accounting.check(LoadResult(Counter({"200": 1, "401": 1}), accepted=1))
    refused, lost = failures
    assert "'401': 1" in refused
    assert lost == "6 messages were accepted, 5 are stored"


def test_floor_of_commands_verifies_and_stores(tmp_path: Path) -> None:
    """The stock Site answers 200 to what is signed, and then has stored it; what is forged it does not take."""
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


def test_leak_shows_as_its_size_and_jumps_do_not() -> None:
    """What every message leaves behind comes out, an allocator's one-time jump hardly does."""
    assert growth_per_message([start + 300 * 1000 * leg for leg, start in enumerate([50_000] * 6)], 1000) == 300
    assert growth_per_message([50, 9_000_000, 50, 50, 50, 50], 1000) == 0


def test_contenders_take_turns_and_medians_count() -> None:
    """Each round begins with another contender; what is compared is what ran in the same round."""
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
