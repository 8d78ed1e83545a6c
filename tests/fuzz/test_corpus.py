"""Every input of the corpora, and mutations of it, at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz import corpus
from tests.fuzz.fuzz_mediator import measure_cost
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import NAMES, Target, target

# Per target; `make fuzz` runs as many in seconds.
NEIGHBOURS = 400
# Inputs whose cost is measured, which is slower than running them.
COUNTED = 30
MOST_BYTES = 1_000_000


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def fuzz_target(name: str) -> Iterator[Target]:
    made = target(name)
    yield made
    made.close()


def inputs(name: str, fuzz_target: Target) -> list[bytes]:
    """The corpus, and the seeds."""
    return [*fuzz_target.seeds(), *(path.read_bytes() for path in corpus.corpus_files(name))]


def attempt(fuzz_target: Target, data: bytes) -> None:
    """Run an input; a failure shows it, so that it can be repeated."""
    try:
        fuzz_target.run(data)
    except Exception as error:
        raise AssertionError(f"{data!r} is not borne") from error


def test_corpus_inputs(name: str, fuzz_target: Target) -> None:
    """No input of the corpus fails."""
    for data in inputs(name, fuzz_target):
        attempt(fuzz_target, data)


def test_mutations(name: str, fuzz_target: Target) -> None:
    """No mutation of them fails; the seed determines which."""
    rng, known = Random(f"{name} 1"), inputs(name, fuzz_target)
    for _ in range(NEIGHBOURS):
        attempt(fuzz_target, mutated(rng.choice(known), rng, fuzz_target.longest, fuzz_target.words))


def test_cost(name: str, fuzz_target: Target) -> None:
    """Calls and memory are within the bounds for the length of the input."""
    rng, known = Random(f"{name} 2"), inputs(name, fuzz_target)
    chosen = rng.sample(known, min(COUNTED, len(known)))
    chosen += [mutated(rng.choice(known), rng, fuzz_target.longest, fuzz_target.words) for _ in range(COUNTED)]
    fuzz_target.run(known[0])  # warm up caches
    for data in chosen:
        work = measure_cost(fuzz_target.run, data)
        calls, more_calls = fuzz_target.most_calls
        memory, more_memory = fuzz_target.most_memory
        assert work.calls <= calls + more_calls * len(data), (work, data)
        assert work.peak <= memory + more_memory * len(data), (work, data)


def test_size() -> None:
    """The corpora are small in total, and each target has one."""
    sizes = {item: [path.stat().st_size for path in corpus.corpus_files(item)] for item in NAMES}
    assert all(sizes.values()), sizes
    assert sum(map(sum, sizes.values())) < MOST_BYTES
