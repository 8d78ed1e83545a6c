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
from mediatord.config.file import format_variable_name, format_yaml_value
from mediatord.config.settings import Config
from mediatord.config.value_types import ValueKind, find_value_kind
from mediatord.http.openapi import build_openapi_document
from mediatord.observability.event_schema import ENVELOPE, EVENTS, FIELDS
from mediatord.observability.metrics import METRICS, ProcessMetricsCollector


def render_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = (
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |".replace("|  |", "| |") for row in rows
    )
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *lines]) + "\n"


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
    facts = (
        _describe_type(field.annotation, field.metadata),
        f"default `{format_yaml_value(default, field)}`",
        "reload" if is_reloadable(key) else "restart",
        f"`{format_variable_name(key.split('.'))}`",
    )
    sentence = _format_sentence(field.description or "").replace("*", r"\*")
    return f"### `{key}`\n\n{_wrap(sentence)}\\\n{_wrap(' · '.join(facts))}\n\n"


_TYPE_WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
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
        return f"list of: {_describe_type(arguments[0], [])}"
    if origin is Mapping:
        return f"mapping of: {_describe_type(arguments[0], [])}; to: {_describe_type(arguments[1], [])}"
    return _TYPE_WORDS[annotation]


def _describe_bounds(metadata: list[Any]) -> Iterator[str]:
    kind = find_value_kind(None, metadata)
    write = kind.format if kind else None
    # A bound of the field itself counts instead of that of its type.
    for mark in {type(mark): mark for mark in metadata}.values():
        for name, words in _BOUNDS.items():
            bound = getattr(mark, name, None)
            if bound is not None:
                yield words.format(f"`{write(bound)}`" if write and bound else bound)


# How options of most commands are shown, which the head of the page describes.
_COMMON_OPTIONS = {"--config": "[-c PATH]", "--json": "[--json]", "--help": ""}


def render_commands() -> str:
    """All commands with their own options."""
    context = click.Context(cli, info_name="mediatord", **cli.context_settings)
    return "\n".join(_render_command(one) for one in walk_commands(context) if one.parent is not None)


def _render_command(context: click.Context) -> str:
    command = context.command
    parameters = command.get_params(context)
    options = [one for one in parameters if isinstance(one, click.Option)]
    common = [usage for one in options if (usage := _find_common_usage(one)) is not None]
    own = [one for one in options if _find_common_usage(one) is None]
    words = [context.command_path, *filter(None, common), *["[OPTIONS]"] * bool(own)]
    words += [one.make_metavar(context) for one in parameters if isinstance(one, click.Argument)]
    paragraphs = re.split(r"\n\s*\n", (command.help or "").replace("\b", "").strip())
    parts = [
        f"{'#' * min(len(context.command_path.split()), 3)} {context.command_path}",
        "" if isinstance(command, click.Group) else f"`{' '.join(words)}`",
        *(_wrap(" ".join(one.split())) for one in paragraphs),
        "\n".join(_render_option(one, context) for one in own),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _find_common_usage(option: click.Option) -> str | None:
    """How a common option is shown; None for options of the command itself, which may have the same name."""
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
    own: list[tuple[str, ...]] = [
        (f"`{name}`", one.type, ", ".join(f"`{label}`" for label in one.labels), one.text)
        for name, one in METRICS.items()
    ]
    process: list[tuple[str, ...]] = [
        (f"`{family.name}{'_total' * (family.type == 'counter')}`", family.type, "", family.documentation.rstrip("."))
        for family in ProcessMetricsCollector(CollectorRegistry()).collect()
    ]
    return render_table(("metric", "type", "labels", "meaning"), own + process)


def render_events() -> str:
    """All events with their fields."""
    rows = [
        (f"`{name}`", event.level, ", ".join(f"`{field}`" for field in event.fields), event.meaning)
        for name, event in EVENTS.items()
    ]
    return render_table(("event", "level", "fields", "meaning"), rows)


def render_fields() -> str:
    """All fields of events, those of every line first."""
    rows = [(f"`{name}`", kind, meaning) for name, (kind, meaning) in (*ENVELOPE.items(), *FIELDS.items())]
    return render_table(("field", "type", "meaning"), rows)


def render_addresses() -> str:
    """All operations of the public listener."""
    rows = [
        (f"`{method.upper()} {path}`", operation["summary"], ", ".join(sorted(operation["responses"])))
        for path, operations in build_openapi_document()["paths"].items()
        for method, operation in operations.items()
    ]
    return render_table(("address", "resource", "status codes"), rows)


def _render_terms(columns: tuple[str, str], terms: Iterable[tuple[str, str]]) -> str:
    rows = ((", ".join(f"`{term}`" for term in names.split(", ")), meaning) for names, meaning in terms)
    return render_table(columns, rows)


# Renderers of the generated parts by page and name of the part.
PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "reference/configuration.md": {"settings": render_settings},
    "reference/cli.md": {"commands": render_commands},
    "reference/metrics.md": {"metrics": render_metrics},
    "reference/log-events.md": {"events": render_events, "fields": render_fields},
    "reference/addresses.md": {"addresses": render_addresses},
    "reference/limits.md": {
        "rates": lambda: render_table(("limit", "per minute", "setting"), list_rates()),
        "limits": lambda: render_table(("limit", "value", "above it"), list_limits()),
        "buffers": lambda: render_table(("buffer", "contents", "maximum", "when full"), list_buffers()),
    },
    "reference/files.md": {
        "files": lambda: _render_terms(("file", "contents"), FILES),
        "signals": lambda: _render_terms(("signal", "effect"), SIGNALS),
        "environment": lambda: _render_terms(("variable", "meaning"), ENVIRONMENT),
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
