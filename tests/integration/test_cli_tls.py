"""The console script and a mediator with a certificate of an authority that the system has not heard of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mediatord.cli.init import write_initial_files
from mediatord.wallet.temporary_daemon import find_free_port
from tests.certificate_authority import CertificateAuthority
from tests.packaging.health_checks import await_port


class TLSDaemon:
    """A mediator at https://localhost. :ivar ca: who vouches for who signed its certificate."""

    def __init__(self, directory: Path) -> None:
        authority = CertificateAuthority(directory)
        self.ca = authority.path
        between = CertificateAuthority(directory, "Between", above=authority)
        both = between.issue("mediator", ["localhost"])
        # As ACME clients write them: its own, and what is between it and who is trusted.
        with both.open("ab") as file:
            file.write(between.path.read_bytes())
        self.port = find_free_port()
        self.url = f"https://localhost:{self.port}"
        _, self.config = write_initial_files(directory / "mine", self.url)
        endpoint = f"ssl:{self.port}:interface=127.0.0.1:privateKey={both}:certKey={both}"
        self.environ = {**os.environ, "MEDIATORD_LISTEN": f'["{endpoint}"]'}

    def command(self, *arguments: str) -> list[str]:
        """Of the console script."""
        return [sys.executable, "-m", "mediatord", *arguments]

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand against it."""
        command = self.command(*arguments, "--url", self.url)
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[TLSDaemon]:
    """It serves."""
    in_memory = TLSDaemon(tmp_path)
    output = tmp_path / "output"
    with output.open("wb") as written:
        process = subprocess.Popen(
            in_memory.command("run", "--config", str(in_memory.config)),
            env=in_memory.environ,
            stdout=written,
            stderr=written,
        )
        try:
            await_port(in_memory.port, process, output)
            yield in_memory
        finally:
            process.terminate()
            assert process.wait(60) == 0, output.read_text("utf-8")


def test_wallets_talk_over_tls(in_memory: TLSDaemon) -> None:
    """Requests, sockets and did:web, each only to whom --ca vouches for; without it a line says what is missing."""
    told = in_memory.ask("demo", "--ca", str(in_memory.ca))
    assert (told.returncode, told.stderr) == (0, ""), told.stdout + told.stderr
    assert told.stdout.endswith("\nAll steps succeeded.\n")
    told = in_memory.ask("demo")
    assert (told.returncode, told.stderr) == (
        1,
        "The demo failed: the mediator's certificate is not trusted; use --ca to trust its certificate authority\n",
    )


def test_status_over_tls(in_memory: TLSDaemon) -> None:
    """Likewise."""
    assert in_memory.ask("status", "--over", "0", "--ca", str(in_memory.ca)).returncode == 0
    told = in_memory.ask("status", "--over", "0")
    assert told.returncode == 1 and "certificate verify failed" in told.stderr.lower()
    assert in_memory.ask("status", "--ca", "/nowhere").returncode == 2
