"""
The commands of the documents do what the pages show.

The commands of a page run in order, in one bash with `set -e`, in an empty directory that is also HOME. On the PATH
are `mediatord` and `twistd` of this environment, and the tools of the system; no MEDIATORD_ variable or proxy is set.

Pages run at the same time and beside other daemons, so each gets ports of its own: each number of four or five digits
after a colon (`127.0.0.1:8080`, `tcp:8080`, `%3A8080`) is replaced by a free port, the same number by the same port,
in commands and shown output, but not a number of JSON. `mediatord` itself is started with its default port replaced.

After a daemon in the background, and after a SIGHUP, the next command waits until the daemon has reported `READY=1`,
as an operator waits. Daemons that still run at the end are stopped, and have to exit with 0.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from mediatord.wallet.temporary_daemon import find_free_port
from tests.docs.console_blocks import GUIDES, PROJECT, TERMINALS, TUTORIAL, Step, read_blocks, read_steps
from tests.notify_socket import NotifySocket

DEFAULT_PORT = "8080"
PAGE_SECONDS = 480.0

_PORT = re.compile(r'(?<=[^"]:)[1-9]\d{3,4}\b|(?<=%3A)[1-9]\d{3,4}\b')
_DAEMON = re.compile(r"(?:mediatord run|twistd -n) .*&$")
_RELOAD = re.compile(r"kill -(?:HUP|s HUP) ")
_WRAPPER = """#!{python}
import sys

from mediatord.cli import console
from mediatord.config.settings import Config

console.LOCAL_URL = "http://127.0.0.1:{port}"
Config.model_fields["listen"].default = ("tcp:{port}:interface=127.0.0.1",)
Config.model_rebuild(force=True)

from mediatord.cli.commands import main

sys.argv[0] = "mediatord"
main()
"""
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_HEAD = """set -e
session=$1
pids=
stop() {
    status=$?
    trap - EXIT
    for pid in $pids; do
        kill "$pid" 2>"$session/rest" || continue
        wait "$pid" || { echo "a daemon ended with $?" >&2; [ $status != 0 ] || status=3; }
    done
    exit $status
}
trap stop EXIT
await_ready() {
    until [ -e "$session/ready" ]; do
        kill -0 "$1"
        sleep 0.05
    done
}
"""

# What needs more than this machine can be expected to have.
_NOT_EVERYWHERE = {
    *("sudo", "apt-get", "dpkg-reconfigure", "systemctl", "systemd-creds", "journalctl", "podman", "docker"),
    *("certbot", "nginx", "caddy", "mongod", "mongosh", "mongodump", "pip", "ssh", "scp", "make"),
}
# Languages of blocks that have commands and no `$ `.
_OTHER_FORMS = {"", "sh", "bash", "shell", "shell-session", "sh-session", "zsh"}


def each(pages: Iterable[Path]) -> pytest.MarkDecorator:
    """Run a test for each of these pages."""
    return pytest.mark.parametrize("page", list(pages), ids=lambda page: page.relative_to(PROJECT).as_posix())


def has_commands(page: Path) -> bool:
    """Whether a page has console blocks that are run."""
    return any(block.language == "console" and block.why_not_run is None for block in read_blocks(page))


class Ports:
    """Free ports in place of those of a page."""

    def __init__(self) -> None:
        self._ports: dict[str, str] = {}

    def of(self, number: str) -> str:
        """The port in place of this number."""
        return self._ports.setdefault(number, str(find_free_port()))

    def replace(self, text: str) -> str:
        """The text with its ports replaced."""
        return _PORT.sub(lambda found: self.of(found[0]), text)


def build_script(steps: Sequence[Step]) -> str:
    """
    A bash script of the commands, each with its output in a file of its own.

    Its argument is the directory of these files.
    """
    lines = [_HEAD]
    for number, step in enumerate(steps):
        lines.append(f'exec >"$session/output-{number}" 2>&1')
        is_awaited = _DAEMON.search(step.command) or _RELOAD.match(step.command)
        if is_awaited:
            lines.append('rm -f "$session/ready"')
        lines.append(step.command)
        if step.is_background:
            lines.append('pids="$pids $!"')
        if is_awaited:
            lines.append('await_ready "${pids##* }"')
    lines.append('exec >"$session/rest" 2>&1')
    return "\n".join(lines) + "\n"


def run_script(script: Path, session: Path, directory: Path, environment: dict[str, str]) -> int:
    """Run it, and tell it when a daemon is ready; returns its exit status."""
    with NotifySocket(session, 0.2) as notifications, (session / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["bash", str(script), str(session)],
            cwd=directory,
            env={**environment, "NOTIFY_SOCKET": notifications.address},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + PAGE_SECONDS
            while shell.poll() is None and time.monotonic() < deadline:
                try:
                    if "READY=1" in notifications.next_state().splitlines():
                        (session / "ready").touch()
                except TimeoutError:
                    continue
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
        return shell.wait()


@pytest.fixture
def session() -> Iterator[Path]:
    """A directory beside the page's, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="guide-") as path:
        yield Path(path)


@pytest.mark.system
@each(filter(has_commands, GUIDES))
def test_commands_run(page: Path, session: Path) -> None:
    """Each exits with 0 and prints the lines that the page shows."""
    ports = Ports()
    steps = [Step(ports.replace(step.command), tuple(map(ports.replace, step.shown))) for step in read_steps(page)]
    programs, directory = session / "bin", session / "page"
    programs.mkdir()
    directory.mkdir()
    wrapper = programs / "mediatord"
    wrapper.write_text(_WRAPPER.format(python=sys.executable, port=ports.of(DEFAULT_PORT)), "utf-8")
    wrapper.chmod(0o755)
    script = session / "script"
    script.write_text(build_script(steps), "utf-8")
    environment = {
        "PATH": ":".join((str(programs), str(Path(sys.executable).parent), *_SYSTEM_PATH)),
        "PYTHONPATH": str(PROJECT),
        "HOME": str(directory),
        "LANG": "C.UTF-8",
    }

    status = run_script(script, session, directory, environment)

    for number, step in enumerate(steps):
        path = session / f"output-{number}"
        output = path.read_text("utf-8", "replace") if path.exists() else "never run"
        is_last = not (session / f"output-{number + 1}").exists()
        assert status == 0 or not is_last, f"$ {step.command}\n{output}\nexit status {status}"
        missing = step.missing_line(output)
        assert missing is None, f"$ {step.command}\ndoes not print\n{missing}\nbut\n{output}"
    assert status == 0, (session / "log").read_text("utf-8") + (session / "rest").read_text("utf-8")


@each(GUIDES)
def test_blocks_are_run_or_say_why_not(page: Path) -> None:
    """A console block has commands that can run on any machine, or a reason above it."""
    for block in read_blocks(page):
        if block.language != "console":
            continue
        steps = block.steps()
        assert steps, f"line {block.line}: no command after '$ '"
        if block.why_not_run is not None:
            assert block.why_not_run.strip(), f"line {block.line}: no reason after 'not run:'"
            continue
        programs = {word for step in steps for word in re.findall(r"(?:^|[|;&(]\s*)([\w.-]+)", step.command)}
        assert not programs & _NOT_EVERYWHERE, f"line {block.line}: give the reason why this is not run"


def test_the_tutorial_is_run() -> None:
    """Each console block says in which terminal, or why it is not run."""
    for block in read_blocks(TUTORIAL):
        if block.language == "console":
            assert block.comment in TERMINALS or block.why_not_run, f"line {block.line}: {block.comment!r}"


@each((*GUIDES, TUTORIAL))
def test_prompts_are_in_console_blocks(page: Path) -> None:
    """No command after a dollar stands elsewhere, as in a literal block of reStructuredText."""
    steps = [step for block in read_blocks(page) if block.language == "console" for step in block.steps()]
    assert len(re.findall(r"^\s*\$ ", page.read_text("utf-8"), re.MULTILINE)) == len(steps)


@each(page for page in (*GUIDES, TUTORIAL) if page.suffix == ".md")
def test_commands_are_in_console_blocks(page: Path) -> None:
    """No shell blocks without prompts, no indented commands, and none after the prompt of root."""
    for block in read_blocks(page):
        # A script that is to be saved as a file begins with its interpreter.
        is_script = block.language == "sh" and block.body.startswith("#!")
        assert block.language not in _OTHER_FORMS or is_script, f"line {block.line}: expected a console block"
    text = page.read_text("utf-8")
    for block in read_blocks(page):
        text = text.replace(block.body, "")
    assert re.findall(r"^(?:    |\t)+[$#] .+$", text, re.MULTILINE) == []
    assert re.findall(r"^\$ .+$", text, re.MULTILINE) == []


# --- the test itself ----------------------------------------------------------------------------------------------


def write_page(directory: Path, text: str) -> Path:
    page = directory / "page.md"
    page.write_text(text, "utf-8")
    return page


def test_blocks_and_reasons(tmp_path: Path) -> None:
    """Commands with their output; continued lines; blocks that are not run."""
    page = write_page(
        tmp_path,
        "```console\n$ one \\\n    --more\nprints\n$ two &\n```\n\n"
        "<!-- not run: needs root -->\n```console\n$ three\n```\n",
    )
    assert read_steps(page) == [Step("one \\\n    --more", ("prints",)), Step("two &", ())]
    assert [block.why_not_run for block in read_blocks(page)] == [None, "needs root"]


def test_output_before_a_command(tmp_path: Path) -> None:
    """It is no command without a dollar."""
    page = write_page(tmp_path, "```console\none\n```\n")
    with pytest.raises(ValueError, match="expected a command"):
        read_steps(page)


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        ("first 1\nmore\nlast\n", None),
        ("first 1\n  \nlast  \n", None),
        ("last\nfirst 1\n", "last"),
        ("last\n", "first ..."),
        ("first 1\nthe last\n", "last"),
    ],
)
def test_shown_output(output: str, missing: str | None) -> None:
    """Whole lines, in order; three dots stand for anything."""
    assert Step("any", ("first ...", "...", "", "last")).missing_line(output) == missing


def test_ports_are_replaced() -> None:
    """The same number by the same port; other numbers stay."""
    ports = Ports()
    port = ports.of("8080")
    other = ports.of("8081")
    text = 'http://127.0.0.1:8080/ did:web:a%3A8080 tcp:8080:x 12:30 8080 id:123456 "ms":8080 :8081'
    replaced = f'http://127.0.0.1:{port}/ did:web:a%3A{port} tcp:{port}:x 12:30 8080 id:123456 "ms":8080 :{other}'
    assert ports.replace(text) == replaced
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(port)))


@pytest.mark.system
@pytest.mark.parametrize(
    ("commands", "status"), [("true\nsleep 900 &\nfalse", 1), ("echo one\nexport A=two\necho $A", 0)]
)
def test_sessions(commands: str, status: int, session: Path) -> None:
    """A failing command ends the session, and stops what is in the background; variables stay."""
    script = session / "script"
    script.write_text(build_script([Step(command, ()) for command in commands.splitlines()]), "utf-8")
    began = time.monotonic()
    found = run_script(script, session, session, dict(os.environ))
    assert (found, time.monotonic() - began < 300) == (status, True)
    if status == 0:
        assert (session / "output-2").read_text("utf-8") == "two\n"
