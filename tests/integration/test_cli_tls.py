"""The console script and a mediator with a certificate of an authority that the system has not heard of."""

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

# It is asked so often.
LOOK_SECONDS = 0.05


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

    def await_ready(self) -> None:
        """
        Wait until it says so; its first self-test may take longer than an answer waits for it.

        :raise AssertionError: it does not.
        """
        context = ssl.create_default_context(cafile=self.ca)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urlopen(f"{self.url}/ready", timeout=START_SECONDS, context=context):
                    return
            except OSError as error:
                assert time.monotonic() < deadline, error
            time.sleep(LOOK_SECONDS)

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
            in_memory.await_ready()
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
