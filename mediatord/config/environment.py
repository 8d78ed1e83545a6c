"""Variables that override keys: MEDIATORD_STORAGE__BACKEND=memory, lists as JSON (contract section 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from mediatord.config.tree import Key, Tree
from mediatord.config.values import Kind
from mediatord.config_path import VARIABLE

_PREFIX = "MEDIATORD_"
# Not keys of the configuration: where it is, the Java of the analytics package, and what the test suite is told.
_OTHERS = (VARIABLE, "MEDIATORD_JAVA")
_TESTS = "MEDIATORD_TEST_"
# Problems are sorted by line.
_AFTER_THE_FILE = 1_000_000_000


def read_environment(tree: Tree, environ: Mapping[str, str], model: type[BaseModel]) -> None:
    """Put the variables into the tree, where the models will check them like anything else."""
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in _OTHERS or name.startswith(_TESTS):
            continue
        where = tuple(name[len(_PREFIX) :].lower().split("__"))
        section = _section(tree, where)
        if section is None:
            continue  # What stands where the section should be is refused by the models.
        section[where[-1]] = _value(environ[name], _annotation(model, where))
        _forget_below(tree, where)
        tree.places[where] = _AFTER_THE_FILE, f"environment {name}"
        tree.variables.add(where)


def variable_of(where: tuple[Key, ...]) -> str:
    """The variable that overrides a key."""
    return _PREFIX + "__".join(str(part) for part in where).upper()


def json_hint(model: type[BaseModel], where: tuple[Key, ...]) -> str:
    """
    How to write a value in a variable that is no text, number or switch: an example of its JSON.

    :param where: a list, a mapping or a section.
    """
    kind = _annotation(model, where)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return (
            f"a variable for each key, such as {variable_of((*where, next(iter(kind.model_fields))))}, or all as JSON"
        )
    return f"written as JSON, such as {variable_of(where)}='{json.dumps(_example(kind))}'"


def _example(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return [_example(arguments[0])]
    if origin is Mapping:
        return {_example(arguments[0]): _example(arguments[1])}
    return next((mark.example for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Kind)), "")


def _section(tree: Tree, where: tuple[str, ...]) -> dict[str, Any] | None:
    node = tree.values
    for depth, part in enumerate(where[:-1], start=1):
        if not isinstance(node, dict):
            return None
        if node.get(part) is None:
            node[part] = {}
            tree.places.setdefault(where[:depth], (_AFTER_THE_FILE, "environment"))
        node = node[part]
    return node if isinstance(node, dict) else None


def _forget_below(tree: Tree, where: tuple[str, ...]) -> None:
    for place in [place for place in tree.places if place[: len(where)] == where]:
        del tree.places[place]


def _annotation(model: type[BaseModel], where: tuple[Key, ...]) -> Any:
    """The type of a key; None for one that no model has."""
    kind: Any = model
    for part in where:
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or part not in kind.model_fields:
            return None
        kind = kind.model_fields[str(part)].annotation
    return kind


def _value(text: str, kind: Any) -> Any:
    """What a variable stands for: text where text is wanted, else JSON if it is JSON; `null` is null everywhere."""
    if text == "null":
        return None
    if _takes_text(kind):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _takes_text(kind: Any) -> bool:
    if kind in (str, Path):
        return True
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(_takes_text(member) for member in get_args(kind))
    return bool(getattr(kind, "__metadata__", ())) and _takes_text(get_args(kind)[0])
