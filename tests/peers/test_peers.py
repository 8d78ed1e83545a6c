"""The comparison with other software: its arithmetic is right, and what is compared does the same work."""

from __future__ import annotations

import http.client
import json
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mediatord.bench.results import InterleavedResults
from tests.peers import envelope_benchmark, forward_benchmark, http_benchmark, websocket_benchmark
from tests.peers.__main__ import PEERS, SCENARIOS, scenarios_with
from tests.peers.comparison import OURS, TIMES, ComparisonOptions, Participants, compare_rows, select_targets
from tests.peers.driver_processes import DriverProgram, DriverUnavailable, RunningDriver, run_driver
from tests.peers.envelope_benchmark import OPENERS, find_disagreements, make_job, read_rate, start_openers

RATE = "msg/CPU-s"
OTHERS = [name for name in OPENERS if name != OURS]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a few envelopes for it."""
    path = tmp_path_factory.mktemp("peers") / "job.json"
    path.write_text(json.dumps(make_job((1024,), 5)), "utf-8")
    return path


def begun(stack: ExitStack, program: DriverProgram) -> RunningDriver:
    """A program that runs; the test is skipped where it cannot."""
    try:
        return stack.enter_context(run_driver(program))
    except DriverUnavailable as error:
        pytest.skip(str(error))


# --- arithmetic ---------------------------------------------------------------------------------------------------


def test_times_are_medians_of_the_ratios_within_rounds() -> None:
    """A round in which a neighbour took half of everything changes nothing."""
    rounds = InterleavedResults(
        {OURS: [{RATE: 900.0}, {RATE: 400.0}, {RATE: 1000.0}], "slow": [{RATE: 300.0}, {RATE: 100.0}, {RATE: 500.0}]}
    )
    rows = compare_rows(rounds, "1k  ", RATE)
    assert rows == {"1k  mediatord": {RATE: 900.0}, "1k  slow": {RATE: 300.0, TIMES: 3.0}}


def test_targets_are_of_those_that_took_part() -> None:
    """A peer that was skipped is neither met nor missed."""
    rows = {"1k  mediatord": {RATE: 900.0}, "1k  slow": {RATE: 300.0, TIMES: 3.0}}
    found = select_targets(rows, "1k  ", {"slow": 3.5, "absent": 2.0}, "opened")
    assert [(target.name, target.measured, target.met) for target in found] == [("1k opened, x slow", 3.0, False)]


def test_rate_is_per_second_of_cpu_time() -> None:
    """And what one costs is its inverse."""
    assert read_rate({"opened": 50, "cpu_seconds": 0.25}) == {RATE: 200.0, "us each": 5000.0}


def test_who_reads_otherwise_is_named() -> None:
    """Everybody is compared with us."""
    assert find_disagreements("1k", {OURS: [["a", "b"]], "same": [["a", "b"]], "other": [["a", "c"]]}) == [
        "other reads 1k otherwise"
    ]


def test_a_peer_chooses_its_scenarios() -> None:
    """One that takes part in several is measured in each; without a choice all are measured, in order."""
    assert scenarios_with(frozenset({"aiohttp"})) == ["post", "sockets"]
    assert scenarios_with(frozenset({"aiohttp"}), ("sockets",)) == ["sockets"]
    assert scenarios_with(frozenset()) == list(SCENARIOS)


def test_the_goals_are_those_of_the_project() -> None:
    """Every peer of a scenario has one."""
    assert {
        name: set(module.GOALS)
        for name, module in (
            ("opening", envelope_benchmark),
            ("forward", forward_benchmark),
            ("post", http_benchmark),
        )
    } == {name: set(PEERS[name]) for name in ("opening", "forward", "post")}
    assert websocket_benchmark.GOAL == 0.75


def test_only_queued_messages_count_as_stored(tmp_path: Path) -> None:
    """Veramo's table has other messages as well."""
    database = tmp_path / "veramo.sqlite3"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE message (id, type)")
        connection.execute("INSERT INTO message VALUES (1, 'https://didcomm.org/routing/2.0/forward/queue-message')")
        connection.execute("INSERT INTO message VALUES (2, 'https://didcomm.org/routing/2.0/forward')")
    assert forward_benchmark.queued_rows(database) == 1


# --- who cannot take part -----------------------------------------------------------------------------------------


def test_an_absent_peer_is_skipped_by_name(job: Path) -> None:
    """The others are measured all the same; the note says what installs it."""
    programs = {OURS: OPENERS[OURS], "nobody": DriverProgram("open_sicpa.py", ".venv-nobody")}
    company = Participants()
    with ExitStack() as stack:
        assert list(start_openers(stack, ComparisonOptions(), job, company, programs)) == [OURS]
    assert "nobody skipped: .venv-nobody is not installed; `make .venv-nobody` does that." in company.notes()


def test_a_peer_that_fails_says_why(job: Path) -> None:
    """The last line of its standard error is the reason."""
    company = Participants()
    with ExitStack() as stack:
        start_openers(
            stack,
            ComparisonOptions(),
            job,
            company,
            {"odd": DriverProgram("open_mediatord.py", arguments=("sideways",))},
        )
    assert company.skipped == {"odd": "KeyError: 'sideways'"}


# --- the same work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_openers_agree(name: str, job: Path) -> None:
    """Each reads out of the same envelopes what mediatord does, and opens as many as it says."""
    with ExitStack() as stack:
        ours, other = (begun(stack, OPENERS[one]) for one in (OURS, name))
        for opener in (ours, other):
            opener.ask(str(job))
        expected: list[Any] = ours.ask("check 1k")
        assert len({tag for _, tag in expected}) == 5
        assert other.ask("check 1k") == expected
        outcome = other.ask("run 1k 0.01")
        assert outcome["opened"] >= 20
        assert outcome["cpu_seconds"] > 0


@pytest.mark.parametrize("program", ["serve_mediatord.py", "serve_aiohttp.py"])
def test_listeners_answer_an_empty_post(program: str, tmp_path: Path) -> None:
    """With an empty 202, on a connection that stays open."""
    ours = program == "serve_mediatord.py"
    with ExitStack() as stack:
        driver = DriverProgram(program, "" if ours else http_benchmark.SERVERS, (str(tmp_path),) if ours else ())
        port = begun(stack, driver).hear()["port"]
        connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)))
        for _ in range(2):
            connection.request("POST", "/didcomm", b"", {"Content-Type": "application/didcomm-encrypted+json"})
            response = connection.getresponse()
            assert (response.status, response.read(), response.will_close) == (202, b"", False)
