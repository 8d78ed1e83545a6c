"""The YAML file with an operator's settings: read, and written with every key at its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from analytics.errors import WRONG_USAGE, AnalyticsError
from analytics.settings import Settings

_HEAD = """\
# mediatord-analytics: every setting, at its default. Unknown keys and impossible values are refused:
# `mediatord-analytics nightly --settings FILE` tells which.
"""


def load(path: Path | None) -> Settings:
    """
    What a file sets, defaults for the rest; without a file defaults for everything.

    :raise AnalyticsError: it cannot be read or used; the text names every key that is wrong.
    """
    try:
        return Settings() if path is None else Settings.model_validate(_read(path))
    except ValidationError as error:
        mistakes = "; ".join(f"{_key(one['loc'])}: {_cause(dict(one))}" for one in error.errors())
        raise AnalyticsError(f"{path}: {mistakes}", WRONG_USAGE) from None


def render() -> str:
    """The text of a file that :func:`load` reads as the defaults."""
    return _HEAD + "".join(
        f"\n# {field.description}\n{name}: {field.default}\n" for name, field in Settings.model_fields.items()
    )


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise AnalyticsError(f"{path}: {error.strerror}", WRONG_USAGE) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AnalyticsError(f"{path}: not YAML: {' '.join(str(error).split())}", WRONG_USAGE) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise AnalyticsError(f"{path}: not a mapping of keys to values", WRONG_USAGE)
    return {str(key): value for key, value in content.items()}


def _key(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _cause(error: dict[str, Any]) -> str:
    return "unknown key" if error["type"] == "extra_forbidden" else str(error["msg"])
