"""
Reading `mediator.yaml` and the environment: all that is wrong at once, each with its place (contract section 4).

The file is checked in two passes over one tree: YAML into plain values with the line of every key, then the models
of :mod:`mediatord.config.settings`, whose complaints are put into words here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mediatord.config.environment import json_hint, read_environment
from mediatord.config.settings import Config
from mediatord.config.template import BEGINNING, END
from mediatord.config.tree import Key, Tree, read_tree
from mediatord.config_path import DEFAULT_PATH, VARIABLE

Problem = tuple[int, str, str]

_HINT = f"; name it with --config PATH or {VARIABLE}, or write it with mediatord init --dir {DEFAULT_PATH.parent}"
# Mistakes that only show once others are taken away.
_ROUNDS = 4

_RESTORE = "Restore the file; `mediatord init` writes one for a new mediator"

_EXPECTED = {
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "path_type": "expected a path",
    "tuple_type": "expected a list",
    "mapping_type": "expected keys with values",
    "dict_type": "expected keys with values",
    "model_type": "expected keys with values",
    "model_attributes_type": "expected keys with values",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "literal_error": "expected one of {expected}",
    "too_short": "expected at least {min_length}",
    "value_error": "{error}",
}
# Whose values are no scalars.
_STRUCTURED = ("tuple_type", "mapping_type", "dict_type", "model_type", "model_attributes_type")


class ConfigError(Exception):
    """
    The configuration cannot be used.

    :ivar problems: one line each: `file:line: key: what was expected`.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """
    Read and check a file; the paths in it are relative to its directory.

    :param environ: variables `MEDIATORD_…` that override keys; those of the process by default.
    :raise ConfigError: with everything that is wrong.
    """
    path = Path(path)
    tree = _read(path, environ)
    config, refusals = _checked(tree)
    if config is None or tree.problems:
        raise ConfigError(_in_order([*tree.problems, *(_in_words(one, tree) for one in refusals)]))
    return config.resolved(path.parent.absolute())


@dataclass(frozen=True, slots=True)
class Draft:
    """
    A configuration with all that is wrong in it.

    :param config: what is right, with defaults for the rest, its paths resolved; None if nothing can be made of it.
    :param problems: of the file and the environment.
    :param wrong: the keys that these are about.
    """

    config: Config | None
    problems: list[Problem]
    wrong: list[tuple[Key, ...]]
    _tree: Tree

    def problem(self, where: tuple[Key, ...], text: str) -> Problem:
        """Another one, of what a key names. :param where: the key."""
        return (*self._tree.place(where), f"{_dotted(where)}: {text}")

    def is_wrong(self, where: tuple[Key, ...]) -> bool:
        """Whether a key, or something above or below it, is among those."""
        return any(all(one == other for one, other in zip(where, wrong, strict=False)) for wrong in self.wrong)

    def lines(self, more: Iterable[Problem] = ()) -> list[str]:
        """The problems as one line each, in the order of the file. :param more: found elsewhere."""
        return _in_order([*self.problems, *more])


def examine(path: str | Path, environ: Mapping[str, str] | None = None) -> Draft:
    """
    As :func:`load`, for whoever wants to look further although there are mistakes.

    :raise ConfigError: the file cannot be read.
    """
    path = Path(path)
    tree = _read(path, environ)
    config, refusals = _checked(tree)
    problems = [*tree.problems, *(_in_words(one, tree) for one in refusals)]
    wrong = [_where(one) for one in refusals]
    values = tree.values
    for _ in range(_ROUNDS):
        if config is not None or not tree.complete:
            break
        for refusal in refusals:
            values = _without(values, _where(refusal))
        config, refusals = _checked(replace(tree, values=values))
    resolved = config and config.resolved(path.parent.absolute())
    return Draft(resolved, problems, wrong, tree)


def _read(path: Path, environ: Mapping[str, str] | None) -> Tree:
    """:raise ConfigError: the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = _HINT if path == DEFAULT_PATH and isinstance(error, FileNotFoundError) else ""
        raise ConfigError([f"{path}: {error.strerror or 'cannot be read'}{hint}"]) from None
    tree = read_tree(raw, str(path))
    if tree.values is None:
        tree.values = {}  # a document without content
    written = bool(tree.values)
    if tree.complete:
        read_environment(tree, os.environ if environ is None else environ, Config)
    if not written and not tree.problems and "public_url" not in tree.values:
        # With defaults it would be another mediator.
        tree.problems.append((1, str(path), f"expected keys with values; there are none. {_RESTORE}"))
    elif not _is_whole(raw):
        line = raw.count(b"\n") + 1
        tree.problems.append((line, f"{path}:{line}", f"expected the line {END!r}: the rest is missing. {_RESTORE}"))
    return tree


def _is_whole(raw: bytes) -> bool:
    """Whether a file that was written by `mediatord init` still has its end."""
    lines = {line.rstrip() for line in raw.splitlines()}
    return BEGINNING.encode() not in lines or END.encode() in lines


def _checked(tree: Tree) -> tuple[Config | None, list[ErrorDetails]]:
    """The configuration, its paths as written, or what is against it."""
    if not tree.complete:
        return None, []
    try:
        return Config.model_validate(tree.values), []
    except ValidationError as refusal:
        return None, list(_first_hand(refusal.errors(include_url=False)))


def _first_hand(refusals: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Without those of lists that are only too short once items are taken away that cannot be used."""
    above = {one["loc"][:-1] for one in refusals}
    return (one for one in refusals if one["type"] != "too_short" or one["loc"] not in above)


def _without(values: Any, where: tuple[Key, ...]) -> Any:
    """The same without what is there; a list without one of its items is none."""
    if not where or not isinstance(values, dict):
        return None if isinstance(values, list) else {}
    key, *rest = where
    left = {name: value for name, value in values.items() if name != key}
    if rest and isinstance(values.get(str(key)), dict):
        left[str(key)] = _without(values[str(key)], tuple(rest))
    return left


def _in_order(problems: Iterable[Problem]) -> list[str]:
    return [f"{place}: {text}" for _, place, text in sorted(problems)]


def _in_words(error: ErrorDetails, tree: Tree) -> Problem:
    """A complaint as (line, place, what was expected)."""
    where = _where(error)
    line, place = tree.place(where)
    if error["type"] == "extra_forbidden":
        return line, place, _unknown(where)
    words = _EXPECTED.get(error["type"])
    text = words.format(**error.get("ctx", {})) if words else error["msg"]
    if error["type"] in _STRUCTURED and where in tree.variables:
        text += f", {json_hint(Config, where)}"
    return line, place, f"{_dotted(where)}: {text}" if where else text


def _where(error: ErrorDetails) -> tuple[Key, ...]:
    """The key that it is about."""
    return tuple(part for part in error["loc"] if part != "[key]")


def _unknown(where: tuple[Key, ...]) -> str:
    """What to say about a key that no model has."""
    known = list(_fields_at(where[:-1]))
    close = get_close_matches(str(where[-1]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
    return f"{_dotted(where)}: unknown key; {hint}"


def _fields_at(where: tuple[Key, ...]) -> Mapping[str, Any]:
    model: type[BaseModel] = Config
    for part in where:
        model = model.model_fields[str(part)].annotation  # type: ignore[assignment]  # only sections have keys below
    return model.model_fields


def _dotted(where: tuple[Key, ...]) -> str:
    """As in most paths into YAML and JSON: the first item of a list is `key[0]`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
