"""
The generated parts of docs/reference.

`python -m mediatord.cli.reference_pages docs` replaces what stands between `<!-- NAME: generated -->` and
`<!-- end of NAME -->` in each page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mediatord.app.reload import is_reloadable
from mediatord.cli.commands import cli
from mediatord.cli.man import ENVIRONMENT, FILES, SIGNALS, walk_commands
from mediatord.cli.reference_limits import list_buffers, list_limits, list_rates
from mediatord.config.file import format_yaml_value
from mediatord.config.settings import Config
from mediatord.config.value_types import ValueKind, find_value_kind
from mediatord.http.openapi import build_openapi_document
from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS
from mediatord.observability.metrics import METRICS, ProcessMetricsCollector


def render_list(items: Iterable[str]) -> str:
    """A paragraph for each item, wrapped."""
    return "\n\n".join(map(_wrap, items)) + "\n"


def _format_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def render_settings() -> str:
    """All settings, with a heading each."""
    general: list[str] = []
    sections: list[str] = []
    for name, value in Config():
        field = Config.model_fields[name]
        if isinstance(value, BaseModel):
            sections.append(f"## {name}\n\n{_format_sentence(field.description or '')}\n\n")
            sections += _render_section(value, f"{name}.")
        else:
            general.append(_render_setting(name, field, value))
    return "## General\n\n" + "".join(general + sections).rstrip("\n") + "\n"


def _render_section(section: BaseModel, prefix: str) -> Iterator[str]:
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from _render_section(value, f"{prefix}{name}.")
        else:
            yield _render_setting(prefix + name, type(section).model_fields[name], value)


def _render_setting(key: str, field: FieldInfo, default: Any) -> str:
    text = field.description or ""
    kind = _describe_type(field.annotation, field.metadata)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    # Most descriptions name all choices, and some types show in the default.
    is_said = choices and all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices)
    shown = f"`{format_yaml_value(default, field)}`"
    kind = _USUAL_BOUND.sub(r"\1", kind.removesuffix(f" or {shown}"))
    facts = [
        shown,
        *([] if is_said or kind in _EVIDENT_TYPES else [kind]),
        *(["reload"] if is_reloadable(key) else []),
    ]
    sentence = _format_sentence(text.replace(" | ", ", ")).replace("*", r"\*")
    return f"### `{key}`\n\n{_wrap(sentence)}\\\n{_wrap('; '.join(facts))}\n\n"


# Minima that the head of the page describes.
_USUAL_BOUND = re.compile(r"^(integer|size|duration), (?:at least `?1`?|more than 0)")
# Types that a default value shows.
_EVIDENT_TYPES = {"boolean", "duration", "integer", "size"}
_TYPE_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "text",
    Path: "path",
}
# Attributes of the marks of a type.
_BOUNDS = {
    "ge": "at least {}",
    "gt": "more than {}",
    "le": "at most {}",
    "lt": "less than {}",
    "min_length": "at least {} of them",
}


def _describe_type(annotation: Any, metadata: list[Any]) -> str:
    """What a value of this type is, in words."""
    if get_origin(annotation) is Annotated:
        bare, *marks = get_args(annotation)
        return _describe_type(bare, [*marks, *metadata])
    words = next((mark.words for mark in metadata if isinstance(mark, ValueKind)), None) or _describe_bare_type(
        annotation
    )
    bounds = list(_describe_bounds(metadata))
    return ", ".join([words, *bounds])


def _describe_bare_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join("`null`" if one is NoneType else _describe_type(one, []) for one in arguments)
    if origin is tuple:
        return f"list: {_describe_type(arguments[0], [])}"
    if origin is Mapping:
        return f"mapping: {_describe_type(arguments[0], [])} to {_describe_type(arguments[1], [])}"
    return _TYPE_WORDS[annotation]


def _describe_bounds(metadata: list[Any]) -> Iterator[str]:
    kind = find_value_kind(None, metadata)
    write = kind.format if kind else None
    # A bound of the field itself counts instead of that of its type.
    for mark in {type(mark): mark for mark in metadata}.values():
        for name, words in _BOUNDS.items():
            bound = getattr(mark, name, None)
            if bound is not None:
                number = f"{bound:.3g}" if isinstance(bound, float) else bound
                yield words.format(f"`{write(bound)}`" if write and bound else number)


# Commands with many options for special purposes: the page refers to their help.
_OPTIONS_IN_HELP = {"mediatord bench"}
# Options of most commands, which the head of the page describes, as they are listed.
_COMMON_OPTIONS = {
    "--config": "",
    "--json": "",
    "--help": "",
    "--offline": "* `--offline`",
    "--stopped": "* `--stopped`",
}


def render_commands() -> str:
    """All commands with their own options."""
    context = click.Context(cli, info_name="mediatord", **cli.context_settings)
    return "\n".join(_render_command(one) for one in walk_commands(context) if one.parent is not None)


def _render_command(context: click.Context) -> str:
    command = context.command
    parameters = command.get_params(context)
    options = [one for one in parameters if isinstance(one, click.Option)]
    arguments = [one.make_metavar(context) for one in parameters if isinstance(one, click.Argument)]
    paragraphs = re.split(r"\n\s*\n", (command.help or "").replace("\b", "").strip())
    listed = [
        _render_option(one, context) if common is None else common
        for one in options
        if (common := _find_common_line(one)) != ""
    ]
    if context.command_path in _OPTIONS_IN_HELP:
        listed = ["`--help` lists the options."]
    parts = [
        f"{'#' * min(len(context.command_path.split()), 3)} {context.command_path}",
        f"`{' '.join([context.command_path, *arguments])}`" if arguments else "",
        *(_wrap(" ".join(one.split())) for one in paragraphs),
        "\n".join(listed),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _find_common_line(option: click.Option) -> str | None:
    """How a common option is listed; None for options of the command itself, which may have the same name."""
    is_common = option.is_flag or option.default is not None or option.is_eager
    return _COMMON_OPTIONS.get(option.opts[-1]) if is_common else None


def _render_option(option: click.Option, context: click.Context) -> str:
    names, text = option.get_help_record(context) or ("", "")
    names = re.sub(r" (?:INTEGER|FLOAT)(?: RANGE)?$", " N", names).replace(" TEXT", " LIST")
    text, _, facts = text.partition(".  [")
    shown = []
    for fact in facts.rstrip("]").split("; "):
        fact = re.sub(r"^(\S+)<=x<=(\S+)$", r"\1 to \2", re.sub(r"^x>=(\S+)$", r"at least \1", fact))
        if fact and fact != 'default: ""' and not fact.startswith("env var"):
            shown.append(fact)
    text = text.rstrip(".") + (f" ({', '.join(shown)})" if shown else "") + "."
    return _wrap(f"* `{names}`: {text}", "  ")


def _wrap(text: str, indent: str = "") -> str:
    return fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def render_metrics() -> str:
    """All metrics."""
    own = [(name, (one.type, *(f"`{label}`" for label in one.labels)), one.text) for name, one in METRICS.items()]
    process = [
        (f"{family.name}{'_total' * (family.type == 'counter')}", (family.type,), family.documentation.rstrip("."))
        for family in ProcessMetricsCollector(CollectorRegistry()).collect()
    ]
    return render_list(f"`{name}` ({', '.join(kind)}): {text}" for name, kind, text in own + process)


def render_events() -> str:
    """All events with their fields."""
    return render_list(
        f"`{name}`{', warn' * (event.level == 'warn')}: {event.meaning}. "
        + ", ".join(f"`{field}`" for field in event.fields)
        for name, event in EVENTS.items()
    )


def render_fields() -> str:
    """All fields of events, those of every line first. The page says what the fields of `counters` count from."""
    return render_list(
        f"`{name}`: {meaning.removeprefix('since the start of the process: ')}"
        for name, (_, meaning) in (*ENVELOPE.items(), *FIELDS.items())
    )


def render_addresses() -> str:
    """All operations of the public listener."""
    return render_list(
        f"`{method.upper()} {path}`: {operation['summary']} ({', '.join(sorted(operation['responses']))})"
        for path, operations in build_openapi_document()["paths"].items()
        for method, operation in operations.items()
    )


def _render_terms(terms: Iterable[tuple[str, str]]) -> str:
    return render_list(f"{', '.join(f'`{term}`' for term in names.split(', '))}: {text}" for names, text in terms)


# Renderers of the generated parts by page and name of the part.
PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "reference/configuration.md": {"settings": render_settings},
    "reference/cli.md": {"commands": render_commands},
    "reference/metrics.md": {"metrics": render_metrics},
    "reference/log-events.md": {"events": render_events, "fields": render_fields},
    "reference/addresses.md": {"addresses": render_addresses},
    "reference/limits.md": {
        "rates": lambda: render_list(list_rates()),
        "limits": lambda: render_list(list_limits()),
        "buffers": lambda: render_list(list_buffers()),
    },
    "reference/files.md": {
        "files": lambda: _render_terms(FILES),
        "signals": lambda: _render_terms(SIGNALS),
        "environment": lambda: _render_terms(ENVIRONMENT),
    },
}


def update_page(page: str, text: str) -> str:
    """
    Replace the generated parts of a page.

    :param page: its name in :data:`PAGES`.
    :param text: its current text.
    :raise ValueError: it has no place for a part.
    """
    for name, render in PAGES[page].items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page}: expected {begin} and {end}")
        text = f"{before}{begin}\n\n{render()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for name in PAGES:
        file = Path(sys.argv[1]) / name
        file.write_text(update_page(name, file.read_text("utf-8")), "utf-8")
