"""The comparison with other software: correct arithmetic, and equal work of all contenders."""

from __future__ import annotations

import http.client
import json
import sqlite3
import tomllib
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mediatord.bench.results import InterleavedResults
from mediatord.bench.wallet_group import find_mediator
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.encoding import decode_base64url
from tests.peers import envelope_benchmark, forward_benchmark, http_benchmark, websocket_benchmark
from tests.peers.__main__ import PEERS, SCENARIOS, scenarios_with
from tests.peers.affinidi_server import find_program, read_version, write_configuration
from tests.peers.comparison import OURS, TIMES, ComparisonOptions, Participants, compare_rows, select_targets
from tests.peers.driver_processes import DriverProgram, DriverUnavailable, RunningDriver, run_driver
from tests.peers.envelope_benchmark import OPENERS, find_disagreements, make_job, read_rate, start_openers

RATE = "msg/CPU-s"
OTHER_OPENERS = [name for name in OPENERS if name != OURS]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a few envelopes for it."""
    path = tmp_path_factory.mktemp("peers") / "job.json"
    path.write_text(json.dumps(make_job((1024,), 5)), "utf-8")
    return path


def start_driver(stack: ExitStack, program: DriverProgram) -> RunningDriver:
    """A running driver; skips the test if it cannot run."""
    try:
        return stack.enter_context(run_driver(program))
    except DriverUnavailable as error:
        pytest.skip(str(error))


# --- arithmetic ---------------------------------------------------------------------------------------------------


def test_ratios_are_medians_within_rounds() -> None:
    """Ratios are medians of the ratios within rounds, so a round that is slow for all changes nothing."""
    rounds = InterleavedResults(
        {OURS: [{RATE: 900.0}, {RATE: 400.0}, {RATE: 1000.0}], "slow": [{RATE: 300.0}, {RATE: 100.0}, {RATE: 500.0}]}
    )
    rows = compare_rows(rounds, "1k  ", RATE)
    assert rows == {"1k  mediatord": {RATE: 900.0}, "1k  slow": {RATE: 300.0, TIMES: 3.0}}


def test_targets_exclude_skipped_peers() -> None:
    """Targets of peers that were not measured are neither met nor missed."""
    rows = {"1k  mediatord": {RATE: 900.0}, "1k  slow": {RATE: 300.0, TIMES: 3.0}}
    targets = select_targets(rows, "1k  ", {"slow": 3.5, "absent": 2.0}, "opened")
    assert [(target.name, target.measured, target.met) for target in targets] == [("1k opened, x slow", 3.0, False)]


def test_rate_is_per_second_of_cpu_time() -> None:
    """The rate counts CPU time; the time per message is its inverse."""
    assert read_rate({"opened": 50, "cpu_seconds": 0.25}) == {RATE: 200.0, "us each": 5000.0}


def test_disagreeing_contenders_are_named() -> None:
    """Contenders whose results differ from mediatord's are named."""
    assert find_disagreements("1k", {OURS: [["a", "b"]], "same": [["a", "b"]], "other": [["a", "c"]]}) == [
        "other reads 1k otherwise"
    ]


def test_selects_scenarios_of_a_peer() -> None:
    """A peer selects all of its scenarios; without a peer all run, in order."""
    assert scenarios_with(frozenset({"aiohttp"})) == ["post", "sockets"]
    assert scenarios_with(frozenset({"aiohttp"}), ("sockets",)) == ["sockets"]
    assert scenarios_with(frozenset()) == list(SCENARIOS)


def test_every_peer_has_a_goal() -> None:
    """Every peer has a goal in each of its scenarios."""
    assert {
        name: set(module.GOALS)
        for name, module in (
            ("opening", envelope_benchmark),
            ("forward", forward_benchmark),
            ("post", http_benchmark),
        )
    } == {name: set(PEERS[name]) for name in ("opening", "forward", "post")}
    assert websocket_benchmark.GOAL == 0.75


def test_counts_only_queued_messages(tmp_path: Path) -> None:
    """Other messages in Veramo's table are not counted."""
    database = tmp_path / "veramo.sqlite3"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE message (id, type)")
        connection.execute("INSERT INTO message VALUES (1, 'https://didcomm.org/routing/2.0/forward/queue-message')")
        connection.execute("INSERT INTO message VALUES (2, 'https://didcomm.org/routing/2.0/forward')")
    assert forward_benchmark.queued_rows(database) == 1


# --- missing peers -----------------------------------------------------------------------------------------------


def test_missing_peer_is_skipped_with_reason(job: Path) -> None:
    """A peer that is not installed is skipped; a note says how to install it."""
    programs = {OURS: OPENERS[OURS], "nobody": DriverProgram("open_sicpa.py", ".venv-nobody")}
    participants = Participants()
    with ExitStack() as stack:
        assert list(start_openers(stack, ComparisonOptions(), job, participants, programs)) == [OURS]
    assert "nobody skipped: .venv-nobody is not installed; `make .venv-nobody` does that." in participants.notes()


def test_failing_peer_is_reported(job: Path) -> None:
    """A peer that fails is skipped with the last line of its standard error."""
    participants = Participants()
    with ExitStack() as stack:
        start_openers(
            stack,
            ComparisonOptions(),
            job,
            participants,
            {"odd": DriverProgram("open_mediatord.py", arguments=("sideways",))},
        )
    assert participants.skipped == {"odd": "KeyError: 'sideways'"}


# --- Affinidi's mediator ------------------------------------------------------------------------------------------


def read_secret(entries: dict[str, str], name: str) -> Any:
    """The data of an entry."""
    return json.loads(decode_base64url(entries[name]))["data"]


def test_configuration_of_the_mediator(tmp_path: Path) -> None:
    """Valid TOML, whose secrets are those of the keys in its DID."""
    settings = tomllib.loads(write_configuration(tmp_path, 7037).read_text("utf-8"))
    mediator = find_mediator("http://127.0.0.1:7037", settings["mediator_did"].removeprefix("did://"))
    assert mediator.http_uri == "http://127.0.0.1:7037/mediator/v1"
    assert settings["limits"]["rate_limit_per_ip"] == "0"
    assert settings["storage"]["data_dir"] == str(tmp_path / "data")
    entries = json.loads((tmp_path / "secrets.json").read_text())["entries"]
    agreement, _ = read_secret(entries, "mediator_operating_secrets")
    (method,) = mediator.document.key_agreement
    assert (agreement["id"], PrivateKey.from_jwk(agreement["privateKeyJwk"]).public) == (method.id, method.key)
    token_key = bytes(read_secret(entries, "mediator_jwt_secret"))
    assert (len(token_key), token_key[1]) == (83, 81)
    assert PrivateKey.from_secret("Ed25519", token_key[16:48]).public.raw == token_key[51:]


def test_missing_mediator_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary given by path is taken; without one the text says what to do."""
    monkeypatch.setattr("tests.peers.affinidi_server.PROJECT", tmp_path)
    monkeypatch.delenv("AFFINIDI_MEDIATOR", raising=False)
    with pytest.raises(DriverUnavailable, match=r"`make .affinidi` compiles it with cargo"):
        find_program()
    program = tmp_path / "bin" / "mediator"
    monkeypatch.setenv("AFFINIDI_MEDIATOR", str(program))
    with pytest.raises(DriverUnavailable, match="names no program"):
        find_program()
    program.parent.mkdir()
    program.touch(0o755)
    assert find_program() == program
    assert read_version(program) == "of unknown version"
    (tmp_path / ".crates.toml").write_text(
        '[v1]\n"affinidi-messaging-mediator 0.18.21 (registry+x)" = ["mediator"]\n'
    )
    assert read_version(program) == "0.18.21"


# --- equal work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHER_OPENERS)
def test_openers_return_the_same(name: str, job: Path) -> None:
    """Each opens the same envelopes as mediatord, and as many as it reports."""
    with ExitStack() as stack:
        reference, other = (start_driver(stack, OPENERS[opener]) for opener in (OURS, name))
        for opener in (reference, other):
            opener.request(str(job))
        expected: list[Any] = reference.request("check 1k")
        assert len({tag for _, tag in expected}) == 5
        assert other.request("check 1k") == expected
        outcome = other.request("run 1k 0.01")
        assert outcome["opened"] >= 20
        assert outcome["cpu_seconds"] > 0


@pytest.mark.parametrize("program", ["serve_mediatord.py", "serve_aiohttp.py"])
def test_listeners_answer_empty_posts(program: str, tmp_path: Path) -> None:
    """Listeners answer empty posts with an empty 202, on a persistent connection."""
    is_mediatord = program == "serve_mediatord.py"
    with ExitStack() as stack:
        driver = DriverProgram(
            program, "" if is_mediatord else http_benchmark.SERVERS, (str(tmp_path),) if is_mediatord else ()
        )
        port = start_driver(stack, driver).receive()["port"]
        connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)))
        for _ in range(2):
            connection.request("POST", "/didcomm", b"", {"Content-Type": "application/didcomm-encrypted+json"})
            response = connection.getresponse()
            assert (response.status, response.read(), response.will_close) == (202, b"", False)
