"""docs/explanation/durability.md names the test of each promise, and that test exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/durability.md").read_text("utf-8")

# `tests/a/test_b.py::Class.name`, `tests/a/test_b.py::name`, or a whole file.
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::([\w.]+))?`")
_PROMISES = PAGE.partition("## Promises")[2].partition("\n## ")[0]
_ITEMS = re.findall(r"^\* .*(?:\n  .*)*", _PROMISES, re.MULTILINE)


@cache
def _names(path: Path) -> frozenset[str]:
    """Classes and functions of a module, with their methods as `Class.name`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{one.name}" for one in inside)
    return frozenset(found)


def test_there_are_promises() -> None:
    """The page is read as it is meant."""
    assert len(_ITEMS) > 30
    assert len(_NAMED.findall(PAGE)) > 40


@pytest.mark.parametrize("item", _ITEMS, ids=lambda item: item[2:62])
def test_every_promise_has_its_test(item: str) -> None:
    """And the test is there."""
    assert _NAMED.search(item), "names no test"
    for path, name in _NAMED.findall(item):
        assert (ROOT / path).is_file(), path
        assert not name or name in _names(ROOT / path), f"{path} has no {name}"
