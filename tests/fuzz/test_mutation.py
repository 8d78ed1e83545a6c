"""The mutator, and the command that runs the fuzzer."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
from twisted.logger import Logger

from mediatord.errors import MediatorError
from tests.fuzz import __main__ as command
from tests.fuzz import corpus
from tests.fuzz.fuzz_mediator import FuzzMediator
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import NAMES, target
from tests.fuzz.targets.features import FeaturesTarget, matches
from tests.in_memory_mediator import PING, InMemoryWallet, pack_forward

GOOD = b'j{"a":[1,{"b":"c"}],"d":"e"}'


def test_mutations_differ() -> None:
    """Mutations are of all kinds: mostly JSON, never too long; the seed determines them."""
    made = [mutated(GOOD, Random(seed), 200, [b"word"]) for seed in range(500)]
    assert made == [mutated(GOOD, Random(seed), 200, [b"word"]) for seed in range(500)]
    assert len(set(made)) > 300
    assert max(map(len, made)) <= 200
    assert {element[:1] for element in made} == {b"j"}
    assert any(b"word" in member for member in made)
    readable = 0
    for item in made:
        try:
            json.loads(item[1:])
        except ValueError:
            continue
        readable += 1
    assert 100 < readable < 450


def test_failure_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failure of a target is raised; `--repeat` shows it again."""
    path = tmp_path / "input"
    path.write_bytes(b'q{"queries":[{"feature-type":"protocol","match":"*"}]}')
    assert command.main(["--target", "features", "--repeat", str(path)]) == 0
    monkeypatch.setattr("tests.fuzz.targets.features.matches", lambda match, text: False)
    with pytest.raises(AssertionError, match="instead of"):
        command.main(["--target", "features", "--repeat", str(path)])


def test_without_fuzzer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what is missing."""
    monkeypatch.setattr("tests.fuzz.__main__.find_spec", lambda name: None)
    assert command.main([]) == 2
    assert "there is no atheris here" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("atheris") is None, reason="no atheris here, which `make fuzz` installs")
def test_with_fuzzer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs, reports numbers and coverage, and keeps a minimal corpus."""
    monkeypatch.setattr(command, "FOUND", tmp_path / "found")
    monkeypatch.setattr(corpus, "CORPUS", tmp_path / "corpus")
    monkeypatch.setattr(corpus, "CRASHES", tmp_path / "crashes")
    assert command.main(["--target", "features", "--seconds", "60", "--", "-runs=500", "-seed=1"]) == 0
    assert "features: 500 runs, " in capsys.readouterr().out
    assert command.main(["--target", "features", "--merge"]) == 0
    assert 1 < len(corpus.corpus_files("features")) < 200


def test_store_content() -> None:
    """It stays the same after reads, and changes after writes."""
    fuzz_mediator = FuzzMediator(lambda site_fixture: None)
    site_fixture = fuzz_mediator.enter()
    guest = InMemoryWallet(site_fixture).enrol()
    before = fuzz_mediator.store_content()
    guest.answer(PING)
    assert fuzz_mediator.store_content() == before
    assert site_fixture.receive(pack_forward(site_fixture, guest.did, guest.make_payload())).status == 202
    assert fuzz_mediator.store_content() != before
    fuzz_mediator.close()


def test_logged_failure() -> None:
    """A failure that was caught and logged is raised."""
    fuzz_mediator = FuzzMediator(lambda site_fixture: None)
    fuzz_mediator.assert_no_failures()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        Logger().failure("it has failed")
    with pytest.raises(ZeroDivisionError):
        fuzz_mediator.assert_no_failures()
    fuzz_mediator.assert_no_failures()
    fuzz_mediator.close()


def test_targets_are_complete() -> None:
    """Each target has different seeds, and words."""
    for name in NAMES:
        tried = target(name)
        seeds = list(tried.seeds())
        assert len(seeds) == len(set(seeds)) > 3, name
        assert tried.words
        tried.close()
    with pytest.raises(KeyError):
        target("none")


def test_simple_pattern_matching() -> None:
    """The implementation for comparison is right."""
    for match, text, expected in (
        ("*", "", True),
        ("", "", True),
        ("", "a", False),
        ("a*c", "abbc", True),
        ("a*c", "ab", False),
        ("**b*", "abc", True),
        ("a", "aa", False),
        ("*a", "ba", True),
    ):
        assert matches(match, text) is expected, (match, text)


def test_declared_errors_are_no_failures() -> None:
    """A declared refusal is not raised by a target."""
    try:
        FeaturesTarget().run(b'q{"queries":1}')
    except MediatorError as error:
        raise AssertionError("it did") from error
