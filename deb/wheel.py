"""`make wheel`: the sdist and the wheel, from a clean copy of this tree."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from deb.tree import build_wheel


def main(out: Path) -> None:
    """:param out: directory for both files."""
    with tempfile.TemporaryDirectory(prefix="mediatord-wheel-") as scratch:
        wheel = build_wheel(Path(scratch), out)
    for file in (wheel.with_name(wheel.name.split("-py3")[0] + ".tar.gz"), wheel):
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
