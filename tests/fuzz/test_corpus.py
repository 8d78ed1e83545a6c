"""Every input that is kept goes through its target, and so do neighbours of it, at a cost that is counted."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz import corpus
from tests.fuzz.fuzz_mediator import measure_cost
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import NAMES, Target, target

# Of each target; `make fuzz` tries as many in seconds.
NEIGHBOURS = 400
# Inputs whose cost is counted, which takes longer than trying them.
COUNTED = 30
MOST_BYTES = 1_000_000


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def tried(name: str) -> Iterator[Target]:
    made = target(name)
    yield made
    made.close()


def inputs(name: str, tried: Target) -> list[bytes]:
    """Those that are kept, and those that all began with."""
    return [*tried.seeds(), *(path.read_bytes() for path in corpus.kept(name))]


def attempt(tried: Target, data: bytes) -> None:
    """Fails with the input, so that it can be tried again."""
    try:
        tried.run(data)
    except Exception as error:
        raise AssertionError(f"{data!r} is not borne") from error


def test_kept(name: str, tried: Target) -> None:
    """What once led further leads to nothing bad."""
    for data in inputs(name, tried):
        attempt(tried, data)


def test_neighbours(name: str, tried: Target) -> None:
    """Nor does what is close to it; which ones that are follows from a seed."""
    dice, known = Random(f"{name} 1"), inputs(name, tried)
    for _ in range(NEIGHBOURS):
        attempt(tried, mutated(dice.choice(known), dice, tried.longest, tried.words))


def test_cost(name: str, tried: Target) -> None:
    """Calls and memory are within what the length of an input allows."""
    dice, known = Random(f"{name} 2"), inputs(name, tried)
    chosen = dice.sample(known, min(COUNTED, len(known)))
    chosen += [mutated(dice.choice(known), dice, tried.longest, tried.words) for _ in range(COUNTED)]
    tried.run(known[0])  # what is only done once is done now
    for data in chosen:
        work = measure_cost(tried.run, data)
        calls, more_calls = tried.most_calls
        memory, more_memory = tried.most_memory
        assert work.calls <= calls + more_calls * len(data), (work, data)
        assert work.peak <= memory + more_memory * len(data), (work, data)


def test_size() -> None:
    """The corpora of all targets together are small, and each target has one."""
    sizes = {one: [path.stat().st_size for path in corpus.kept(one)] for one in NAMES}
    assert all(sizes.values()), sizes
    assert sum(map(sum, sizes.values())) < MOST_BYTES
