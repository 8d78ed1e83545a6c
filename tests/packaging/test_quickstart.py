"""docs/tutorial.md, literally: from an empty directory to the first message over TLS."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.console_blocks import PROJECT, Step, read_steps
from tests.packaging.health_checks import await_port

PAGE = PROJECT / "docs/tutorial.md"
pytestmark = pytest.mark.skipif(
    not os.environ.get("PACKAGE_TEST"), reason="builds and installs for minutes: make package-test"
)


def assert_output_shown(steps: list[Step], output: str) -> None:
    """Assert that the output has each line that the page shows, those of one command in order."""
    for step in steps:
        missing = step.missing_line(output)
        assert missing is None, f"{step.command} does not print {missing!r}:\n{output}"


def test_tutorial_commands_succeed(tmp_path: Path, wheel: Path) -> None:
    """
    One terminal serves, the other one runs the client. The package is installed from this tree's wheel instead of an
    index.
    """
    environ = {
        **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "no_proxy"))},
        "PIP_FIND_LINKS": str(wheel.parent),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    server_output = tmp_path / "first-terminal"
    with server_output.open("wb") as output:
        directory = tmp_path / "empty"
        directory.mkdir()
        # exec, so that the signal reaches the daemon and not a shell that waits for it.
        server_steps = read_steps(PAGE, "first terminal")
        *before, last = [step.command for step in server_steps]
        script = "set -e\n" + "\n".join([*before, f"exec {last}"])
        daemon = subprocess.Popen(["sh", "-c", script], cwd=directory, env=environ, stdout=output, stderr=output)
        try:
            await_port(8443, daemon, server_output)
            client_steps = read_steps(PAGE, "second terminal")
            script = "\n".join(step.command for step in client_steps)
            result = subprocess.run(
                ["sh", "-ec", script], cwd=directory, env=environ, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, result.stdout + result.stderr
            assert "All steps succeeded." in result.stdout
            assert_output_shown(server_steps, server_output.read_text("utf-8"))
            assert_output_shown(client_steps, result.stdout)
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0, server_output.read_text("utf-8")
