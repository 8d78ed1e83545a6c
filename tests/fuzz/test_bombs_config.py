"""Configuration files that are longer than they look, or that YAML itself chokes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from mediatord.config.file import MAX_YAML_VALUES, ConfigError, load_config, parse_yaml


def laughs(levels: int) -> bytes:
    """Ten aliases a line, each for ten of the line before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]" for number in range(1, levels)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("levels", [6, 60])
def test_aliases(levels: int) -> None:
    """Values are counted wherever they stand, so that a few lines neither fill the memory nor take forever."""
    tree = parse_yaml(laughs(levels), "m.yaml")
    assert tree.count == MAX_YAML_VALUES + 1
    ((line, place, problem),) = tree.problems
    assert (place, problem) == (f"m.yaml:{line}", "invalid YAML: more than 100000 values")


def test_what_aliases_are_for() -> None:
    """Some thousands of values are as good as ever."""
    tree = parse_yaml(laughs(3), "m.yaml")
    assert tree.complete
    assert len(tree.values["a2"]) == 10


@pytest.mark.parametrize(
    "text",
    ["!!int ''", "!!float ''", "!!bool a", "!!timestamp a", "!!timestamp 2001-99-99", "!!int 0b", "!!binary é"],
)
def test_tags(tmp_path: Path, text: str) -> None:
    """A scalar that is not of the kind it is said to be is a problem of the file, however PyYAML puts it."""
    path = tmp_path / "m.yaml"
    path.write_text(f"public_url: {text}\n", "utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(path, {})
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}:1: invalid YAML: ")


@pytest.mark.parametrize("text", ["x: " + "[" * 2_000, "x: " + "{a: " * 1_000, "? " * 2_000, "- " * 2_000])
def test_depth(text: str) -> None:
    """Nesting without end is unreadable, and says so."""
    ((_, _, problem),) = parse_yaml(text.encode(), "m.yaml").problems
    assert problem.startswith("invalid YAML: ")
