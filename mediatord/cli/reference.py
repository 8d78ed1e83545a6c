"""
The pages of the documentation that say what the code says: every setting, every command.

`python -m mediatord.cli.reference docs` writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mediatord.cli.commands_page import commands_page
from mediatord.cli.settings_page import settings_page


def pages() -> dict[str, str]:
    """Texts by file name."""
    return {"configuration.md": settings_page(), "cli.md": commands_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, "utf-8")
