"""docs/tutorial.md, word for word: from an empty directory to the first message over TLS."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.console_blocks import TERMINALS, TUTORIAL, Step, read_steps
from tests.packaging.health_checks import await_port

PAGE = TUTORIAL
FIRST, SECOND = TERMINALS
pytestmark = pytest.mark.skipif(
    not os.environ.get("PACKAGE_TEST"), reason="builds and installs for minutes: make package-test"
)


def assert_shown(steps: list[Step], output: str) -> None:
    """Each line that the page shows is in the output, those of one command in their order."""
    for step in steps:
        missing = step.missing_line(output)
        assert missing is None, f"{step.command} does not print {missing!r}:\n{output}"


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
        serving = read_steps(PAGE, FIRST)
        *before, last = [step.command for step in serving]
        script = "set -e\n" + "\n".join([*before, f"exec {last}"])
        daemon = subprocess.Popen(["sh", "-c", script], cwd=where, env=environ, stdout=output, stderr=output)
        try:
            await_port(8443, daemon, first)
            talking = read_steps(PAGE, SECOND)
            script = "\n".join(step.command for step in talking)
            done = subprocess.run(
                ["sh", "-ec", script], cwd=where, env=environ, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "All steps succeeded." in done.stdout
            assert_shown(serving, first.read_text("utf-8"))
            assert_shown(talking, done.stdout)
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0, first.read_text("utf-8")
