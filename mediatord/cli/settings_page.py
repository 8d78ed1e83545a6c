"""docs/configuration.md: every key of the configuration, from its declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mediatord.config import Config
from mediatord.config.template import written
from mediatord.config.values import DurationMark, Kind, SizeMark, duration_text
from mediatord.sizes import format_size
from mediatord.wiring.reloading import is_applicable

_HEAD = """\
# Configuration

<!-- Written by `python -m mediatord.cli.reference docs`; a test compares. -->

One YAML file, `mediator.yaml`. `mediatord init` writes it with every key at its default and a line about each, as
[etc/mediator.yaml](../etc/mediator.yaml) has it; a key that is left out has its default. Paths are relative to it,
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
  the same names; [reload](operations.md#reload) has the details.

"""
_WORDS: dict[Any, str] = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}
_GENERAL = "General"


def settings_page() -> str:
    """The page, as Markdown."""
    general: list[str] = []
    sections: list[str] = []
    for name, field in Config.model_fields.items():
        if _is_section(field):
            about = field.description or ""
            sections.append(f"## {name}\n\n{_sentence(about)}\n\n" + "".join(_below(field.annotation, f"{name}.")))
        else:
            general.append(_entry(name, field, getattr(Config(), name)))
    return _HEAD + f"## {_GENERAL}\n\n" + "".join(general + sections).rstrip("\n") + "\n"


def _below(model: Any, prefix: str) -> Iterator[str]:
    default = model()
    for name, field in model.model_fields.items():
        if _is_section(field):
            yield from _below(field.annotation, f"{prefix}{name}.")
        else:
            yield _entry(prefix + name, field, getattr(default, name))


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _entry(key: str, field: FieldInfo, default: Any) -> str:
    variable = "MEDIATORD_" + key.upper().replace(".", "__")
    count = "counts at once" if is_applicable(key) else "needs a restart"
    facts = (
        f"Type: {_kind(field.annotation, field.metadata)}",
        f"Default: `{written(default, field)}`",
        f"After SIGHUP: {count}",
        f"Variable: `{variable}`",
    )
    listed = "".join(f"* {fact}\n" for fact in facts)
    return f"### `{key}`\n\n{_sentence(field.description or '')}\n\n{listed}\n"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """What a value of this type is, in words."""
    if get_origin(annotation) is Annotated:
        bare, *marks = get_args(annotation)
        return _kind(bare, [*marks, *metadata])
    words = next((mark.words for mark in metadata if isinstance(mark, Kind)), None) or _bare(annotation)
    bounds = list(_bounds(metadata))
    return ", ".join([words, *bounds])


def _bare(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join("`null`" if one is NoneType else _kind(one, []) for one in arguments)
    if origin is tuple:
        return f"list of: {_kind(arguments[0], [])}"
    if origin is Mapping:
        return f"mapping of: {_kind(arguments[0], [])}; to: {_kind(arguments[1], [])}"
    return _WORDS[annotation]


def _bounds(metadata: list[Any]) -> Iterator[str]:
    text = _bound_text(metadata)
    # A bound of the field itself counts instead of that of its type.
    for mark in {type(mark): mark for mark in metadata}.values():
        match mark:
            case Ge(ge=bound):
                yield f"at least {text(bound)}"
            case Gt(gt=bound):
                yield f"more than {text(bound)}"
            case Le(le=bound):
                yield f"at most {text(bound)}"
            case Lt(lt=bound):
                yield f"less than {text(bound)}"
            case MinLen(min_length=bound):
                yield f"at least {bound} of them"


def _bound_text(metadata: list[Any]) -> Callable[[Any], str]:
    """How bounds of such a value are written."""
    if any(isinstance(mark, DurationMark) for mark in metadata):
        return lambda bound: f"`{duration_text(bound)}`" if bound else f"{bound}"
    if any(isinstance(mark, SizeMark) for mark in metadata):
        return lambda bound: f"`{format_size(bound)}`"
    return str
