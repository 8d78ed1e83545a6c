"""
Reading `mediator.yaml` and the environment: all that is wrong at once, each with its place (contract section 4).

The file is checked in two passes over one tree: YAML into plain values with the line of every key, then the models
of :mod:`mediatord.config.settings`, whose complaints are put into words here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mediatord.config.environment import read_environment
from mediatord.config.settings import Config
from mediatord.config.tree import Key, Tree, read_tree

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
    "literal_error": "expected one of {expected}",
    "too_short": "expected at least {min_length}",
    "value_error": "{error}",
}


class ConfigError(Exception):
    """
    The configuration cannot be used.

    :ivar problems: one line each: `file:line: key: what was expected`.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: str | Path, environ: Mapping[str, str] | None = None, *, may_be_empty: bool = True) -> Config:
    """
    Read and check a file; the paths in it are relative to its directory.

    :param environ: variables `MEDIATORD_…` that override keys; those of the process by default.
    :param may_be_empty: whether a file without any key is one.
    :raise ConfigError: with everything that is wrong.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or 'cannot be read'}"]) from None
    tree = read_tree(raw, str(path))
    if tree.complete and not (tree.values or may_be_empty):
        raise ConfigError([f"{path}: expected keys with values; there are none"])
    if tree.complete:
        read_environment(tree, os.environ if environ is None else environ, Config)
    problems = list(tree.problems)
    config = None
    if tree.complete:
        try:
            config = Config.model_validate(tree.values)
        except ValidationError as refusal:
            problems += [_in_words(error, tree) for error in refusal.errors(include_url=False)]
    if config is None or problems:
        raise ConfigError([f"{place}: {text}" for _, place, text in sorted(problems)])
    return config.resolved(path.parent.absolute())


def _in_words(error: ErrorDetails, tree: Tree) -> tuple[int, str, str]:
    """A complaint as (line, place, what was expected)."""
    where: tuple[Key, ...] = tuple(part for part in error["loc"] if part != "[key]")
    line, place = tree.place(where)
    if error["type"] == "extra_forbidden":
        return line, place, _unknown(where)
    words = _EXPECTED.get(error["type"])
    text = words.format(**error.get("ctx", {})) if words else error["msg"]
    return line, place, f"{_dotted(where)}: {text}" if where else text


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
    text = ""
    for part in where:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text
