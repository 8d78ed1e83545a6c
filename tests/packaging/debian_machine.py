"""Debian systems in directories: one to run commands in, and one booted by its own systemd."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Files that the first installation writes in /etc/mediatord.
GENERATED_FILES = ("keys.jwks", "mediator.yaml")
PATIENCE_SECONDS = 120.0


class DebianMachine:
    """A Debian system in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *command: str, user: str = "root", **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, whatever its exit status."""
        return subprocess.run(
            self.command(user, *command), env=self.environ(environ), capture_output=True, text=True, check=False
        )

    def run_checked(self, *command: str, user: str = "root", **environ: str) -> str:
        """
        Output of a command.

        :raise AssertionError: it failed.
        """
        result = self.run(*command, user=user, **environ)
        assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def command(self, user: str, *command: str) -> Sequence[str]:
        """Command line that runs it from outside."""
        return ("chroot", f"--userspec={user}", str(self.root), *command)

    def environ(self, more: dict[str, str]) -> dict[str, str]:
        """Environment with nothing but these variables."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **more}

    def path(self, name: str) -> Path:
        """Path of a file, from outside."""
        return self.root / name.lstrip("/")

    def mode_and_owner(self, name: str) -> tuple[str, str]:
        """Mode, owner and group of a file."""
        fields = self.run_checked("stat", "--format=%a %U:%G", name).split()
        return fields[0], fields[1]

    def configuration(self) -> dict[str, bytes]:
        """Configuration written by the first installation."""
        return {name: self.path(f"/etc/mediatord/{name}").read_bytes() for name in GENERATED_FILES}


class BootedDebianMachine(DebianMachine):
    """
    A system booted by its systemd, in its own namespaces and with a loopback network only.

    :param leader: its init process.
    """

    def __init__(self, root: Path, leader: int) -> None:
        super().__init__(root)
        self._leader = leader

    def command(self, user: str, *command: str) -> Sequence[str]:
        """Command line that runs it from outside."""
        return ("nsenter", f"--target={self._leader}", "--all", "--", "runuser", "-u", user, "--", *command)

    def unit_property(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run_checked("systemctl", "show", "--property", name, "--value", unit).strip()

    def journal(self, unit: str) -> str:
        """Journal of a unit."""
        return self.run_checked("journalctl", "--no-pager", "--output=cat", "--unit", unit)

    def await_property(self, unit: str, name: str, value: str) -> None:
        """
        Wait until a property of a unit has this value.

        :raise AssertionError: it does not in time; the text has the unit's journal.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (current := self.unit_property(unit, name)) != value:
            assert time.monotonic() < deadline, f"{unit}: {name} is {current}\n{self.journal(unit)[-4000:]}"
            time.sleep(0.1)

    def await_journal(self, unit: str, text: str) -> None:
        """
        Wait until the journal of a unit has this text.

        :raise AssertionError: it does not in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.journal(unit):
            assert time.monotonic() < deadline, self.journal(unit)[-4000:]
            time.sleep(0.1)


@contextmanager
def boot_machine(root: Path) -> Iterator[BootedDebianMachine]:
    """Boot a Debian system in a directory, and shut it down afterwards."""
    command = ["systemd-nspawn", f"--directory={root}", "--machine=debian", "--boot", "--private-network"]
    command += ["--register=no", "--link-journal=no", "--console=pipe"]
    # Without systemd on this host there is no unit to create.
    command += [] if Path("/run/systemd/system").exists() else ["--keep-unit"]
    with (root / "console").open("wb") as console:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT)
    try:
        machine = BootedDebianMachine(root, _init_process(process, root))
        _await_start(machine)
        yield machine
    finally:
        # systemd-nspawn shuts the machine down in order.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _init_process(process: subprocess.Popen[bytes], root: Path) -> int:
    """Init process of the machine, once it exists."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            # A helper process may have ended.
            with suppress(OSError):
                if os.readlink(f"/proc/{child}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                    return int(child)
        time.sleep(0.05)
    raise AssertionError(f"systemd-nspawn starts nothing: {(root / 'console').read_text(errors='replace')[-2000:]}")


def _await_start(machine: BootedDebianMachine) -> None:
    """Wait until the boot has finished, possibly with failed units."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while machine.run("systemctl", "is-system-running").stdout.strip() not in ("running", "degraded"):
        assert time.monotonic() < deadline, (machine.root / "console").read_text(errors="replace")[-2000:]
        time.sleep(0.1)
