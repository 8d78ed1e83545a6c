"""docs/tutorial.md, word for word: from an empty directory to the first message over TLS."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.health_checks import await_port

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"
pytestmark = pytest.mark.skipif(
    not os.environ.get("PACKAGE_TEST"), reason="builds and installs for minutes: make package-test"
)


def block(name: str) -> str:
    """The commands behind a comment with this name."""
    found = re.search(rf"<!-- {name} -->\n```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None, f"{PAGE}: nothing to {name}"
    return found[1]


def test_as_it_is_written(tmp_path: Path, wheel: Path) -> None:
    """One terminal serves, the other talks. The package comes from our own wheel instead of an index."""
    environ = {
        **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "no_proxy"))},
        "PIP_FIND_LINKS": str(wheel.parent),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    first = tmp_path / "first-terminal"
    with first.open("wb") as output:
        where = tmp_path / "empty"
        where.mkdir()
        # exec, so that the signal reaches the daemon and not a shell that waits for it.
        *before, last = block("try").strip().split("\n")
        script = "set -e\n" + "\n".join([*before, f"exec {last}"])
        daemon = subprocess.Popen(["sh", "-c", script], cwd=where, env=environ, stdout=output, stderr=output)
        try:
            await_port(8443, daemon, first)
            done = subprocess.run(
                ["sh", "-ec", block("talk")], cwd=where, env=environ, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "All steps succeeded." in done.stdout
            assert re.search(r"status +ok", done.stdout)
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0, first.read_text("utf-8")
