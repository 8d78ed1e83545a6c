"""Writing a configuration file: every key, each under its one line of explanation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mediatord.config.settings import Config
from mediatord.config.values import DurationMark, SizeMark, duration_text
from mediatord.sizes import format_size

# The line with which a file that was written here ends, and the first one, which says so: a file that has that and
# not the other has lost its end.
END = "# end of mediator.yaml"
BEGINNING = f"# Without the line {END!r} this file is refused as cut short."

_HEAD = f"""\
{BEGINNING}
# mediatord: every setting, at its default unless changed. Unknown keys and impossible values are refused at start;
# `mediatord check-config --config FILE` tells which. A variable MEDIATORD_STORAGE__BACKEND=memory overrides
# storage.backend, and so on; lists are written as JSON there. Paths are relative to this file, those in endpoint
# strings included.
# Durations: 500ms, 60s, 5m, 72h, 365d, or a number of seconds. Sizes: 64KiB, 1MiB, 512k (powers of 1024),
# 64MB (a power of 1000), or a number of bytes.
"""


def render(config: Config | None = None) -> str:
    """The text of a file that :func:`~mediatord.config.load` reads as `config` (the defaults when None)."""
    return _HEAD + "\n".join(_section(config or Config(), "")) + f"\n\n{END}\n"


def _section(section: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if not indent:
            yield ""
        yield f"{indent}# {field.description}"
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _section(value, indent + "  ")
        else:
            yield f"{indent}{name}: {written(value, field)}"


def written(value: Any, field: FieldInfo) -> str:
    """A value as YAML on one line."""
    if any(isinstance(mark, DurationMark) for mark in field.metadata):
        return duration_text(value)
    if any(isinstance(mark, SizeMark) for mark in field.metadata):
        return format_size(value)
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, Path | IPv4Network | IPv6Network):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
