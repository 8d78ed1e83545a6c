"""The benchmark: that a run, however small, ends well and counts right. What it measures is not tested here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mediatord.bench.cli import bench
from mediatord.bench.figures import take_turns
from mediatord.bench.load import is_complete, read_bodies, write_bodies
from mediatord.bench.memory import growth_per_message
from mediatord.bench.plan import SCENARIOS
from mediatord.bench.rawsocket import TEXT, frame, parse

TINY = ["--seconds", "0.2", "--rounds", "1", "--clients", "3", "--sockets", "5", "--messages", "500", "--sizes", "1k"]


def test_tiny_run_measures_everything(tmp_path: Path) -> None:
    """Every scenario runs against a daemon of its own; all that was accepted is stored, and the JSON says so."""
    results = tmp_path / "results.json"
    # So few messages do not tell growth from warm-up.
    scenarios = [word for name in SCENARIOS if name != "memory" for word in ("--scenario", name)]
    status = bench.main([*TINY, *scenarios, "--json", str(results)], standalone_mode=False)
    found = json.loads(results.read_text())
    assert status == 0
    assert found["plan"]["clients"] == 3
    assert [scenario["failures"] for scenario in found["scenarios"]] == [[], [], [], []]
    forwarding = found["scenarios"][1]
    assert forwarding["rows"]["1k  mediatord, durable"]["msg/s"] > 0
    assert forwarding["targets"][0]["goal"] == 0.5


def test_memory_run_posts_exactly_what_it_says(tmp_path: Path) -> None:
    """The memory scenario accounts for every message, warm-up included."""
    results = tmp_path / "results.json"
    bench.main([*TINY, "--scenario", "memory", "--json", str(results)], standalone_mode=False)
    (memory,) = json.loads(results.read_text())["scenarios"]
    assert list(memory["rows"])[-2:] == ["after 500 more", "growth"]
    assert not [failure for failure in memory["failures"] if "accepted" in failure or "202" in failure]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_frames_are_cut_where_they_end(size: int) -> None:
    """A frame of any length is found at the start of a buffer, and not before all of it is there (RFC 6455 5.2)."""
    masked = frame(bytes(size), TEXT)
    start = len(masked) - size
    payload = b"x" * size
    unmasked = bytes([masked[0], masked[1] & 0x7F]) + masked[2 : start - 4] + payload
    assert parse(unmasked + b"rest") == (TEXT, payload, len(unmasked))
    assert parse(unmasked[:-1]) is None


def test_masking_is_undone_by_the_mask() -> None:
    """A client's payload is XORed with the four bytes before it (RFC 6455 5.3)."""
    masked = frame(b"hello", TEXT)
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
    assert is_complete(response) is complete


def test_bodies_survive_the_file(tmp_path: Path) -> None:
    """The load generator posts what the benchmark prepared."""
    write_bodies(tmp_path / "bodies", [b"one", b"", b"three"])
    assert list(read_bodies(tmp_path / "bodies")) == [b"one", b"", b"three"]


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

    found = take_turns({"a": lambda: contender("a"), "b": lambda: contender("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (found.medians("a"), found.medians("b")) == ({"rate": 2.0}, {"rate": 20.0})
    # 1/10, 2/30 and 100/20 within the rounds.
    assert found.ratio("a", "b", "rate") == 0.1
