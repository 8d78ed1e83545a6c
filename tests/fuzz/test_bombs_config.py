"""Configuration files that expand, or make PyYAML fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from mediatord.config.file import MAX_YAML_VALUES, ConfigError, load_config, parse_yaml


def nested_aliases(levels: int) -> bytes:
    """Ten aliases a line, each for ten of the line before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]" for number in range(1, levels)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("levels", [6, 60])
def test_aliases(levels: int) -> None:
    """Values are counted at each alias, so that a few lines neither fill the memory nor take forever."""
    tree = parse_yaml(nested_aliases(levels), "m.yaml")
    assert tree.count == MAX_YAML_VALUES + 1
    ((line, place, problem),) = tree.problems
    assert (place, problem) == (f"m.yaml:{line}", "invalid YAML: more than 100000 values")


def test_legitimate_aliases() -> None:
    """Some thousands of values are accepted."""
    tree = parse_yaml(nested_aliases(3), "m.yaml")
    assert tree.complete
    assert len(tree.values["a2"]) == 10


@pytest.mark.parametrize(
    "text",
    ["!!int ''", "!!float ''", "!!bool a", "!!timestamp a", "!!timestamp 2001-99-99", "!!int 0b", "!!binary é"],
)
def test_tags(tmp_path: Path, text: str) -> None:
    """A scalar that does not match its tag is an error of the file, whatever PyYAML raises."""
    path = tmp_path / "m.yaml"
    path.write_text(f"public_url: {text}\n", "utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(path, {})
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}:1: invalid YAML: ")


@pytest.mark.parametrize("text", ["x: " + "[" * 2_000, "x: " + "{a: " * 1_000, "? " * 2_000, "- " * 2_000])
def test_depth(text: str) -> None:
    """Endless nesting is an error."""
    ((_, _, problem),) = parse_yaml(text.encode(), "m.yaml").problems
    assert problem.startswith("invalid YAML: ")
