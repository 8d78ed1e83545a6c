"""
The reference pages of the documentation that are generated from the code.

`python -m mediatord.cli.settings_and_command_reference docs` writes them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mediatord.app.reload import is_reloadable
from mediatord.cli.commands import cli
from mediatord.cli.man import walk_commands
from mediatord.config.file import format_variable_name, format_yaml_value
from mediatord.config.settings import Config
from mediatord.config.value_types import ValueKind, find_value_kind

_SETTINGS_HEAD = """\
# Configuration

<!-- Written by `python -m mediatord.cli.settings_and_command_reference docs`; a test compares. -->

One YAML file, `mediator.yaml`. `mediatord init` writes it with every key at its default and a line about each, as
[etc/mediator.yaml](../../etc/mediator.yaml) has it; a key that is left out has its default. Paths are relative to it,
those in endpoint strings (`unix:`, `ssl:`) included. The first item of a list is `key[0]` in messages.

* **Mistakes** are refused at start, all at once, a line for each with file, line and key; so are keys that do not
  exist. `mediatord check-config --config PATH` looks without starting anything.
* **Durations** are written `500ms`, `60s`, `5m`, `72h`, `365d`, or as a number of seconds.
* **Sizes** are written `64KiB`, `1MiB`, `2GiB`, `512k` or `64M` (powers of 1024), `64MB` (a power of 1000), or as a
  number of bytes.
* **Environment.** A variable overrides its key: `MEDIATORD_QUEUE__TTL=24h`. Two underscores stand between section and
  key. Lists and mappings are written as JSON, as in `MEDIATORD_LISTEN='["tcp:8080"]'`; `null` is no value. A variable
  that names no key is refused.
* **SIGHUP** has the file read again. What *counts at once* does so from then on. What differs besides is named in a
  line of the output and needs a restart. Files of keys and certificates are read again as well, as long as they have
  the same names; [reload](../how-to/run-under-systemd.md#reload) has the details.

"""
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


def render_settings_page() -> str:
    """The page, as Markdown."""
    general: list[str] = []
    sections: list[str] = []
    for name, value in Config():
        field = Config.model_fields[name]
        if isinstance(value, BaseModel):
            sections.append(f"## {name}\n\n{_format_sentence(field.description or '')}\n\n")
            sections += _render_section(value, f"{name}.")
        else:
            general.append(_render_setting(name, field, value))
    return _SETTINGS_HEAD + "## General\n\n" + "".join(general + sections).rstrip("\n") + "\n"


def _render_section(section: BaseModel, prefix: str) -> Iterator[str]:
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from _render_section(value, f"{prefix}{name}.")
        else:
            yield _render_setting(prefix + name, type(section).model_fields[name], value)


def _render_setting(key: str, field: FieldInfo, default: Any) -> str:
    count = "counts at once" if is_reloadable(key) else "needs a restart"
    facts = (
        f"Type: {_describe_type(field.annotation, field.metadata)}",
        f"Default: `{format_yaml_value(default, field)}`",
        f"After SIGHUP: {count}",
        f"Variable: `{format_variable_name(key.split('.'))}`",
    )
    listed = "".join(f"* {fact}\n" for fact in facts)
    return f"### `{key}`\n\n{_format_sentence(field.description or '')}\n\n{listed}\n"


def _format_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


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


_COMMANDS_HEAD = """\
# Command line

<!-- Written by `python -m mediatord.cli.settings_and_command_reference docs`; a test compares. -->

One program, `mediatord`; this is what its `--help` says. Every command exits with 0 when done, 1 when it failed, and
2 when it was called wrongly or the configuration cannot be used. What went wrong is one line on standard error.

Commands that read the configuration take `-c PATH` or `--config PATH`, before the command, between its words or after
them; if there are several, the last one counts. Otherwise the variable `MEDIATORD_CONFIG` names the file; without it
that is `/etc/mediatord/mediator.yaml`. `twistd mediatord` goes by the same.

"""
_HELP_WIDTH = 100


def render_commands_page() -> str:
    """The page, as Markdown."""
    context = click.Context(
        cli,
        info_name="mediatord",
        terminal_width=_HELP_WIDTH,
        max_content_width=_HELP_WIDTH,
        **cli.context_settings,
    )
    sections = []
    for one in walk_commands(context):
        level = min(len(one.command_path.split()) + 1, 3)
        sections.append(f"{'#' * level} {one.command_path}\n\n```text\n{one.get_help().rstrip()}\n```\n")
    return _COMMANDS_HEAD + "\n".join(sections)


def render_reference_pages() -> dict[str, str]:
    """Texts by file name."""
    return {"reference/configuration.md": render_settings_page(), "reference/cli.md": render_commands_page()}


if __name__ == "__main__":
    for name, text in render_reference_pages().items():
        (Path(sys.argv[1]) / name).write_text(text, "utf-8")
