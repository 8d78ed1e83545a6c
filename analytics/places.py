"""Where paths and URLs lead."""

from __future__ import annotations

import re
from pathlib import Path

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)


def local_path(url: str) -> Path | None:
    """Where a path without a scheme, or with that of files, is on this machine; None for others."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url)
    return Path(re.sub(r"^//(?=/)", "", url[scheme.end() :])) if scheme[1].lower() == "file" else None
