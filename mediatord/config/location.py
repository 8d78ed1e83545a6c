"""Default path of the configuration file. Imports neither pydantic nor Twisted, so that the CLI starts fast."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_CONFIG_PATH = Path("/etc/mediatord/mediator.yaml")
CONFIG_PATH_VARIABLE = "MEDIATORD_CONFIG"


def get_default_config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The path in the environment variable, or the system's default; an empty variable counts as unset."""
    return Path(environ.get(CONFIG_PATH_VARIABLE) or DEFAULT_CONFIG_PATH)
