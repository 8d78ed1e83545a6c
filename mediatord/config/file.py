"""
Reading, checking and writing `mediator.yaml`, with overrides from the environment (contract section 4).

YAML is parsed into plain values with the line of every key; variables such as MEDIATORD_STORAGE__BACKEND=memory
replace some of them; the models of :mod:`mediatord.config.settings` check the result. All problems are reported at
once, each with its location.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from mediatord.config.settings import Config
from mediatord.config.value_syntax import CONFIG_PATH_VARIABLE, DEFAULT_CONFIG_PATH
from mediatord.config.value_types import find_value_kind
from mediatord.errors import OperatorError

KeyPart = str | int
SourceLocation = tuple[int, str]

# A few lines of YAML aliases can expand to more values than fit into memory.
MAX_YAML_VALUES = 100_000
# Settings are nested four deep. PyYAML calls itself for each level, and so does the construction of values.
MAX_YAML_DEPTH = 20
# Added to errors of PyYAML that start so.
_YAML_HINTS = {
    "mapping values are not allowed here": "; check the indentation, and quote values that contain ': '",
    "found character '\\t'": "; indent with spaces",
    "could not determine a constructor": "; remove the tag",
    "found undefined alias": "; quote values that start with *",
}
# Raised by PyYAML for invalid characters and malformed tagged scalars.
_YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError)


@dataclass
class ConfigTree:
    """
    Values by key, and the source location of each.

    :param name: of the file, as given by the user.
    :param places: path of keys to (line for sorting, prefix of messages).
    :param variables: keys set by environment variables.
    :param problems: (line, location, text) of problems found so far.
    :param complete: whether there are values to check against the models.
    :param count: number of values; those of an alias count at every use.
    """

    name: str
    values: Any = field(default_factory=dict)
    places: dict[tuple[KeyPart, ...], SourceLocation] = field(default_factory=dict)
    variables: set[tuple[KeyPart, ...]] = field(default_factory=set)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    complete: bool = True
    count: int = 0

    def place(self, where: tuple[KeyPart, ...]) -> SourceLocation:
        """Location of a key, or of the nearest key above it."""
        for length in range(len(where), 0, -1):
            if where[:length] in self.places:
                return self.places[where[:length]]
        return 1, f"{self.name}:1"

    def locate(self, mark: yaml.Mark | None) -> SourceLocation:
        """Location of a mark; the first line without one."""
        line = mark.line + 1 if mark else 1
        return line, f"{self.name}:{line}"


class _DepthLimitedLoader(yaml.SafeLoader):
    """Refuses a document that is nested deeper than any configuration."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth == MAX_YAML_DEPTH:
            _raise_too_deep(self.peek_event().start_mark)
        self.depth += 1
        try:
            node: yaml.Node | None = super().compose_node(parent, index)
        finally:
            self.depth -= 1
        return node


def _raise_too_deep(mark: yaml.Mark) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=f"nesting is deeper than {MAX_YAML_DEPTH} levels", problem_mark=mark)


def parse_yaml(raw: bytes, name: str) -> ConfigTree:
    """
    Parse one YAML document; an empty one is an empty mapping.

    Invalid YAML, duplicate keys, too many values and too deep nesting become problems of the tree.
    """
    tree = ConfigTree(name)
    loader: yaml.SafeLoader | None = None
    try:
        loader = _DepthLimitedLoader(raw)
        root = loader.get_single_node()
        if root is not None:
            tree.values = _construct_value(loader, root, (), tree)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or "cannot be parsed"
        hint = next((hint for start, hint in _YAML_HINTS.items() if problem.startswith(start)), "")
        _add_syntax_problem(tree, error.problem_mark or error.context_mark, problem + hint)
    except yaml.reader.ReaderError as error:
        line = raw.count(b"\n", 0, error.position) + 1
        tree.complete = False
        problem = "control characters, or characters that are not UTF-8"
        tree.problems.append((line, f"{name}:{line}", f"invalid YAML: {problem}"))
    except _YAML_ERRORS:
        _add_syntax_problem(tree, None, "cannot be parsed")
    finally:
        if loader is not None:
            loader.dispose()
    return tree


def _add_syntax_problem(tree: ConfigTree, mark: yaml.Mark | None, problem: str) -> None:
    tree.complete = False
    tree.problems.append((*tree.locate(mark), f"invalid YAML: {problem}"))


def _construct_value(loader: yaml.SafeLoader, node: yaml.Node, where: tuple[KeyPart, ...], tree: ConfigTree) -> Any:
    if len(where) >= MAX_YAML_DEPTH:
        _raise_too_deep(node.start_mark)  # an alias that refers to itself, or aliases within aliases
    tree.count += 1
    if tree.count > MAX_YAML_VALUES:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_YAML_VALUES} values", problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _construct_mapping(loader, node, where, tree)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            tree.places[*where, index] = tree.locate(item.start_mark)
        return [_construct_value(loader, item, (*where, index), tree) for index, item in enumerate(node.value)]
    try:
        return loader.construct_object(node)
    except yaml.MarkedYAMLError:
        raise
    except _YAML_ERRORS:
        problem = "the value is not what its tag or form says; put it in quotes"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _construct_mapping(
    loader: yaml.SafeLoader, node: yaml.MappingNode, where: tuple[KeyPart, ...], tree: ConfigTree
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        # Keys stay text: `on:` and `8080:` are not converted.
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node.tag)
        if key in values:
            first = tree.place((*where, key))[0]
            dotted = ".".join(str(part) for part in (*where, key))
            text = f"{dotted}: duplicate key, already set in line {first}; remove one"
            tree.problems.append((*tree.locate(key_node.start_mark), text))
            continue
        tree.places[*where, key] = tree.locate(key_node.start_mark)
        values[key] = _construct_value(loader, value_node, (*where, key), tree)
    return values


_VARIABLE_PREFIX = "MEDIATORD_"
# Variables that are not settings: the file's path, Java of the analytics package, options of the test suite.
_OTHER_VARIABLES = (CONFIG_PATH_VARIABLE, "MEDIATORD_JAVA")
_TEST_PREFIX = "MEDIATORD_TEST_"
# Sorts after all lines of a file.
_ENVIRONMENT_LINE = 1_000_000_000


def apply_environment(tree: ConfigTree, environ: Mapping[str, str]) -> None:
    """Override values of the tree by environment variables; the models check them later."""
    for name in sorted(environ):
        if not name.startswith(_VARIABLE_PREFIX) or name in _OTHER_VARIABLES or name.startswith(_TEST_PREFIX):
            continue
        where = tuple(name[len(_VARIABLE_PREFIX) :].lower().split("__"))
        section = _find_section(tree, where)
        if section is None:
            continue  # the models report a section that is no mapping
        section[where[-1]] = _parse_variable(environ[name], _find_annotation(where))
        tree.places = {key: place for key, place in tree.places.items() if key[: len(where)] != where}
        tree.places[where] = _ENVIRONMENT_LINE, f"environment {name}"
        tree.variables.add(where)


def format_variable_name(where: Iterable[KeyPart]) -> str:
    """Environment variable that overrides a key."""
    return _VARIABLE_PREFIX + "__".join(str(part) for part in where).upper()


def _describe_json_value(where: tuple[KeyPart, ...]) -> str:
    """
    How to write a structured value in an environment variable, by example.

    :param where: key of a list, a mapping or a section.
    """
    kind = _find_annotation(where)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        example = format_variable_name((*where, next(iter(kind.model_fields))))
        return f"; set one variable per key, such as {example}, or write JSON"
    return f" in JSON, such as {format_variable_name(where)}='{json.dumps(_make_example(kind))}'"


def _make_example(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return [_make_example(arguments[0])]
    if origin is Mapping:
        return {_make_example(arguments[0]): _make_example(arguments[1])}
    found = find_value_kind(kind)
    return found.example if found else ""


def _find_section(tree: ConfigTree, where: tuple[str, ...]) -> dict[str, Any] | None:
    node = tree.values
    for depth, part in enumerate(where[:-1], start=1):
        if not isinstance(node, dict):
            return None
        if node.get(part) is None:
            node[part] = {}
            tree.places.setdefault(where[:depth], (_ENVIRONMENT_LINE, "environment"))
        node = node[part]
    return node if isinstance(node, dict) else None


def _find_annotation(where: tuple[KeyPart, ...]) -> Any:
    """Type of a key; None if there is no such setting."""
    kind: Any = Config
    for part in where:
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or part not in kind.model_fields:
            return None
        kind = kind.model_fields[str(part)].annotation
    return kind


def _parse_variable(text: str, kind: Any) -> Any:
    """Value of a variable: text for text settings, else JSON if valid; `null` is null everywhere."""
    if text == "null":
        return None
    if _accepts_text(kind):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _accepts_text(kind: Any) -> bool:
    if kind in (str, Path):
        return True
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(_accepts_text(member) for member in get_args(kind))
    return bool(getattr(kind, "__metadata__", ())) and _accepts_text(get_args(kind)[0])


# Last and first line of a generated file: a file with the first but without the last was truncated.
LAST_LINE = "# end of mediator.yaml"
FIRST_LINE = f"# Without the line {LAST_LINE!r} this file is rejected as truncated."

_FILE_HEADER = f"""\
{FIRST_LINE}
# All settings of mediatord, at their defaults unless changed. `mediatord check-config --config FILE` validates the
# file. An environment variable overrides a key: MEDIATORD_STORAGE__BACKEND=memory; lists are written as JSON.
# Relative paths, including those in endpoint strings, are relative to this file.
# Durations: 500ms, 60s, 5m, 72h, 365d, or a number of seconds. Sizes: 64KiB, 1MiB, 512k (powers of 1024),
# 64MB (a power of 1000), or a number of bytes.
"""


def render_config(config: Config | None = None) -> str:
    """Text of a configuration file with these values; default: all defaults. :func:`load_config` reads it back."""
    return _FILE_HEADER + "\n".join(_render_section(config or Config(), "")) + f"\n\n{LAST_LINE}\n"


def _render_section(section: BaseModel, indent: str) -> Iterator[str]:
    for name, information in type(section).model_fields.items():
        value = getattr(section, name)
        if not indent:
            yield ""
        yield f"{indent}# {information.description}"
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _render_section(value, indent + "  ")
        else:
            yield f"{indent}{name}: {format_yaml_value(value, information)}"


def format_yaml_value(value: Any, field: FieldInfo) -> str:
    """A value as YAML on one line."""
    kind = find_value_kind(field.annotation, field.metadata)
    if kind is not None and kind.format is not None and value is not None:
        return kind.format(value)
    return format_yaml_text(to_jsonable_python(value))


def format_yaml_text(value: Any) -> str:
    """Plain data as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


ConfigProblem = tuple[int, str, str]

_MISSING_FILE_HINT = (
    f"; pass --config PATH, set {CONFIG_PATH_VARIABLE}, "
    f"or create it with `mediatord init --dir {DEFAULT_CONFIG_PATH.parent}`"
)
# Rounds of validation: some problems show only after others are removed.
_MAX_ROUNDS = 4

_RESTORE_HINT = "restore it, or write one for a new mediator with `mediatord init`"

_ERROR_TEXTS = {
    "string_type": "expected a string",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "path_type": "expected a path",
    "tuple_type": "expected a list",
    "mapping_type": "expected a mapping of keys to values",
    "dict_type": "expected a mapping of keys to values",
    "model_type": "expected a mapping of keys to values",
    "model_attributes_type": "expected a mapping of keys to values",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "literal_error": "expected {expected}",
    "too_short": "expected at least {min_length} item",
    "value_error": "{error}",
}
# Errors about values that are not scalars.
_STRUCTURED_ERRORS = ("tuple_type", "mapping_type", "dict_type", "model_type", "model_attributes_type")


class ConfigError(OperatorError):
    """The configuration is invalid; the lines are `file:line: key: what was expected`."""

    exit_status = 2

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self._problems = problems

    @property
    def problems(self) -> list[str]:
        return self._problems


def load_config(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """
    Read and check a configuration file; relative paths are resolved against its directory.

    :param environ: variables `MEDIATORD_...` that override settings; default: those of the process.
    :raise ConfigError: with all problems.
    """
    path = Path(path)
    tree = _read_file(path, environ)
    config, refusals = _validate(tree)
    if config is None or tree.problems:
        raise ConfigError(_format_problems([*tree.problems, *(_describe_error(one, tree) for one in refusals)]))
    return config.resolved(path.parent.absolute())


@dataclass(frozen=True, slots=True)
class ConfigExamination:
    """
    A configuration with all its problems.

    :param config: valid settings, defaults for the rest, paths resolved; None if nothing is usable.
    :param problems: of file and environment.
    :param wrong: the keys concerned.
    """

    config: Config | None
    problems: list[ConfigProblem]
    wrong: list[tuple[KeyPart, ...]]
    _tree: ConfigTree

    def problem(self, where: tuple[KeyPart, ...], text: str) -> ConfigProblem:
        """A problem of a key, with its location."""
        return (*self._tree.place(where), f"{_format_key(where)}: {text}")

    def is_wrong(self, where: tuple[KeyPart, ...]) -> bool:
        """Whether a key, or one above or below it, has a problem."""
        return any(all(one == other for one, other in zip(where, wrong, strict=False)) for wrong in self.wrong)

    def lines(self, more: Iterable[ConfigProblem] = ()) -> list[str]:
        """All problems as lines, sorted by location. :param more: further problems."""
        return _format_problems([*self.problems, *more])


def examine_config(path: str | Path, environ: Mapping[str, str] | None = None) -> ConfigExamination:
    """
    As :func:`load_config`, but returns what is usable despite problems.

    :raise ConfigError: the file cannot be read.
    """
    path = Path(path)
    tree = _read_file(path, environ)
    config, refusals = _validate(tree)
    problems = [*tree.problems, *(_describe_error(one, tree) for one in refusals)]
    wrong = [_find_key_path(one) for one in refusals]
    values = tree.values
    for _ in range(_MAX_ROUNDS):
        if config is not None or not tree.complete:
            break
        for refusal in refusals:
            values = _remove_key(values, _find_key_path(refusal))
        config, refusals = _validate(replace(tree, values=values))
    resolved = config and config.resolved(path.parent.absolute())
    return ConfigExamination(resolved, problems, wrong, tree)


def _read_file(path: Path, environ: Mapping[str, str] | None) -> ConfigTree:
    """:raise ConfigError: the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = _MISSING_FILE_HINT if path == DEFAULT_CONFIG_PATH and isinstance(error, FileNotFoundError) else ""
        raise ConfigError([f"{path}: {error.strerror or 'cannot read the file'}{hint}"]) from None
    tree = parse_yaml(raw, str(path))
    if tree.values is None:
        tree.values = {}  # an empty document
    written = bool(tree.values)
    if tree.complete:
        apply_environment(tree, os.environ if environ is None else environ)
    if not written and not tree.problems and "public_url" not in tree.values:
        # Defaults would make it another mediator.
        tree.problems.append((1, str(path), f"the file contains no settings; {_RESTORE_HINT}"))
    elif not _is_complete(raw):
        line = raw.count(b"\n") + 1
        tree.problems.append(
            (line, f"{path}:{line}", f"the file is truncated: its last line is not {LAST_LINE!r}; {_RESTORE_HINT}")
        )
    return tree


def _is_complete(raw: bytes) -> bool:
    """Whether a generated file still has its last line."""
    lines = {line.rstrip() for line in raw.splitlines()}
    return FIRST_LINE.encode() not in lines or LAST_LINE.encode() in lines


def _validate(tree: ConfigTree) -> tuple[Config | None, list[ErrorDetails]]:
    """The configuration with paths as written, or validation errors."""
    if not tree.complete:
        return None, []
    try:
        return Config.model_validate(tree.values), []
    except ValidationError as refusal:
        return None, list(_drop_secondary_errors(refusal.errors(include_url=False)))


def _drop_secondary_errors(refusals: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Drop errors about lists that are too short only because invalid items were removed."""
    above = {one["loc"][:-1] for one in refusals}
    return (one for one in refusals if one["type"] != "too_short" or one["loc"] not in above)


def _remove_key(values: Any, where: tuple[KeyPart, ...]) -> Any:
    """A copy without a key; a list without one of its items is None."""
    if not where or not isinstance(values, dict):
        return None if isinstance(values, list) else {}
    key, *rest = where
    left = {name: value for name, value in values.items() if name != key}
    if rest and isinstance(values.get(str(key)), dict):
        left[str(key)] = _remove_key(values[str(key)], tuple(rest))
    return left


def _format_problems(problems: Iterable[ConfigProblem]) -> list[str]:
    return [f"{place}: {text}" for _, place, text in sorted(problems)]


def _describe_error(error: ErrorDetails, tree: ConfigTree) -> ConfigProblem:
    """A validation error as (line, location, text)."""
    where = _find_key_path(error)
    line, place = tree.place(where)
    if error["type"] == "extra_forbidden":
        return line, place, _describe_unknown_key(where, where in tree.variables)
    words = _ERROR_TEXTS.get(error["type"])
    text = words.format(**_format_limits(where, error.get("ctx", {}))) if words else error["msg"]
    if error["type"] in _STRUCTURED_ERRORS:
        text += _describe_json_value(where) if where in tree.variables else _describe_yaml_value(where)
    if error["loc"][-1:] == ("[key]",):
        text += " as the key"
    return line, place, f"{_format_key(where)}: {text}" if where else text


def _format_limits(where: tuple[KeyPart, ...], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Limits of a number as the configuration writes them: `24h`, `64KiB`, `0.5`."""
    section = _find_annotation(where[:-1]) if where else None
    fields: Mapping[str, FieldInfo] = getattr(section, "model_fields", {})
    field = fields.get(str(where[-1])) if where else None
    kind = field and find_value_kind(field.annotation, field.metadata)
    write = (kind and kind.format) or (lambda value: f"{value:g}" if isinstance(value, float) else value)
    return {name: write(value) if isinstance(value, float | int) else value for name, value in limits.items()}


def _describe_yaml_value(where: tuple[KeyPart, ...]) -> str:
    """How to write a structured value in the file, by example; empty for the whole file."""
    kind = _find_annotation(where) if where else None
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        name, field = next(iter(kind.model_fields.items()))
        return f", such as {name}: {format_yaml_value(getattr(kind(), name), field)}"
    example = _make_example(kind)
    if not isinstance(example, list | dict) or not all(example):
        return ""
    return f", such as {format_yaml_text(example)}"


def _find_key_path(error: ErrorDetails) -> tuple[KeyPart, ...]:
    """Key that a validation error concerns."""
    return tuple(part for part in error["loc"] if part != "[key]")


def _describe_unknown_key(where: tuple[KeyPart, ...], is_variable: bool) -> str:
    """Message for an unknown key, with a suggestion. :param is_variable: whether an environment variable sets it."""
    known = list(_find_annotation(where[:-1]).model_fields)
    close = get_close_matches(str(where[-1]), known, n=1)
    if is_variable and not close:
        # A single underscore in place of the double one between section and key is a common slip.
        close = get_close_matches(format_variable_name(where), _list_variable_names(Config, ()), n=1, cutoff=0.9)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
    return f"{_format_key(where)}: unknown key; {hint}"


def _list_variable_names(section: type[BaseModel], where: tuple[KeyPart, ...]) -> Iterator[str]:
    """Environment variables of all keys of a section that are no sections themselves."""
    for name, information in section.model_fields.items():
        kind = information.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _list_variable_names(kind, (*where, name))
        else:
            yield format_variable_name((*where, name))


def _format_key(where: tuple[KeyPart, ...]) -> str:
    """Dotted path of a key; list items as `key[0]`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
