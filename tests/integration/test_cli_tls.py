"""The command line with a mediator whose certificate authority is not in the system's trust store."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from mediatord.cli.init import write_initial_files
from mediatord.wallet.temporary_daemon import find_free_port
from tests.certificate_authority import CertificateAuthority
from tests.packaging.health_checks import START_SECONDS, await_port

# Interval of readiness checks.
POLL_SECONDS = 0.05


class TLSDaemon:
    """A mediator at https://localhost. :ivar ca: root certificate of its chain."""

    def __init__(self, directory: Path) -> None:
        authority = CertificateAuthority(directory)
        self.ca = authority.path
        intermediate = CertificateAuthority(directory, "Between", parent=authority)
        chain = intermediate.issue("mediator", ["localhost"])
        # As ACME clients write it: the certificate and the intermediate one.
        with chain.open("ab") as file:
            file.write(intermediate.path.read_bytes())
        self.port = find_free_port()
        self.url = f"https://localhost:{self.port}"
        _, self.config = write_initial_files(directory / "mine", self.url)
        endpoint = f"ssl:{self.port}:interface=127.0.0.1:privateKey={chain}:certKey={chain}"
        self.environ = {**os.environ, "MEDIATORD_LISTEN": f'["{endpoint}"]'}

    def await_ready(self) -> None:
        """
        Wait until it is ready; the first probe may take longer than a response waits for it.

        :raise AssertionError: it is not in time.
        """
        context = ssl.create_default_context(cafile=self.ca)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urlopen(f"{self.url}/ready", timeout=START_SECONDS, context=context):
                    return
            except OSError as error:
                assert time.monotonic() < deadline, error
            time.sleep(POLL_SECONDS)

    def command_line(self, *arguments: str) -> list[str]:
        """Arguments of the command for this configuration."""
        return [sys.executable, "-m", "mediatord", *arguments]

    def run_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand against the daemon."""
        command = self.command_line(*arguments, "--url", self.url)
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def running_daemon(tmp_path: Path) -> Iterator[TLSDaemon]:
    """A running daemon."""
    running_daemon = TLSDaemon(tmp_path)
    output = tmp_path / "output"
    with output.open("wb") as output_file:
        process = subprocess.Popen(
            running_daemon.command_line("run", "--config", str(running_daemon.config)),
            env=running_daemon.environ,
            stdout=output_file,
            stderr=output_file,
        )
        try:
            await_port(running_daemon.port, process, output)
            running_daemon.await_ready()
            yield running_daemon
        finally:
            process.terminate()
            assert process.wait(60) == 0, output.read_text("utf-8")


def test_demo_requires_trusted_certificate_authority(running_daemon: TLSDaemon) -> None:
    """Requests, sockets and did:web work with --ca only; without it one line says what is missing."""
    told = running_daemon.run_command("demo", "--ca", str(running_daemon.ca))
    assert (told.returncode, told.stderr) == (0, ""), told.stdout + told.stderr
    assert told.stdout.endswith("\nAll steps succeeded.\n")
    told = running_daemon.run_command("demo")
    assert (told.returncode, told.stderr) == (
        1,
        "The demo failed: the mediator's certificate is not trusted; use --ca to trust its certificate authority\n",
    )


def test_status_requires_trusted_certificate_authority(running_daemon: TLSDaemon) -> None:
    """As the demo."""
    assert running_daemon.run_command("status", "--over", "0", "--ca", str(running_daemon.ca)).returncode == 0
    told = running_daemon.run_command("status", "--over", "0")
    assert told.returncode == 1 and "certificate verify failed" in told.stderr.lower()
    assert running_daemon.run_command("status", "--ca", "/nowhere").returncode == 2
