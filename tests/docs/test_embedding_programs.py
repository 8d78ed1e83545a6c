"""docs/how-to/embed.md: its programs do what the page says, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mediatord.wallet.temporary_daemon import find_free_port

PROJECT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (PROJECT / "docs/how-to/embed.md").read_text("utf-8"), re.M | re.S)
PORT = "8081"
# What each prints, in the order of the page.
PRINTED = (
    r"",
    r"200 did:peer:2\.\S+\n",
    r"message-1 \{\"ciphertext\": \"\.\.\.\"\}\n",
    r"\['did:key:(\S+)#\1'\]\nnot at a private address\n",
)


def run(*command: str, directory: Path) -> str:
    """What a program prints; it ends well and has nothing to complain about."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATORD_")}
    completed = subprocess.run(
        command,
        cwd=directory,
        env={**environment, "PYTHONPATH": str(PROJECT), "PYTHONWARNINGS": "error::ResourceWarning"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    return completed.stdout


def test_there_is_a_page_of_programs() -> None:
    """As many as are expected to print something."""
    assert len(PROGRAMS) == len(PRINTED)


@pytest.mark.parametrize(
    ("program", "printed"), list(zip(PROGRAMS, PRINTED, strict=True)), ids=("tac", "config", "store", "did")
)
def test_programs_run(program: str, printed: str, tmp_path: Path) -> None:
    """Each prints what it is there to show, beside nothing but a configuration as `mediatord init` writes it."""
    run(sys.executable, "-m", "mediatord", "init", directory=tmp_path)
    (tmp_path / "program.py").write_text(program.replace(PORT, str(find_free_port())), "utf-8")
    found = run(sys.executable, "program.py", directory=tmp_path)
    assert re.fullmatch(printed, found), found
