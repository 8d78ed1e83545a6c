"""Debian on machines that are directories: one that commands are run on, and one that its own systemd has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# What the first installation writes in /etc/mediatord.
MADE = ("keys.jwks", "mediator.yaml")
PATIENCE_SECONDS = 120.0


class DebianMachine:
    """A Debian in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *command: str, user: str = "root", **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end, whatever that is."""
        return subprocess.run(
            self.command(user, *command), env=self.environ(environ), capture_output=True, text=True, check=False
        )

    def do(self, *command: str, user: str = "root", **environ: str) -> str:
        """
        What a command there prints.

        :raise AssertionError: it failed.
        """
        done = self.run(*command, user=user, **environ)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def command(self, user: str, *command: str) -> Sequence[str]:
        """How to run it from outside."""
        return ("chroot", f"--userspec={user}", str(self.root), *command)

    def environ(self, more: dict[str, str]) -> dict[str, str]:
        """Nothing of ours but what is given."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **more}

    def path(self, name: str) -> Path:
        """From outside."""
        return self.root / name.lstrip("/")

    def standing(self, name: str) -> tuple[str, str]:
        """Mode, owner and group of a file."""
        told = self.do("stat", "--format=%a %U:%G", name).split()
        return told[0], told[1]

    def configuration(self) -> dict[str, bytes]:
        """What the first installation wrote."""
        return {name: self.path(f"/etc/mediatord/{name}").read_bytes() for name in MADE}


class BootedDebianMachine(DebianMachine):
    """
    One whose own systemd runs, in namespaces of its own and with no network but its loopback.

    :param leader: the process that is its first one.
    """

    def __init__(self, root: Path, leader: int) -> None:
        super().__init__(root)
        self._leader = leader

    def command(self, user: str, *command: str) -> Sequence[str]:
        """How to run it from outside."""
        return ("nsenter", f"--target={self._leader}", "--all", "--", "runuser", "-u", user, "--", *command)

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.do("systemctl", "show", "--property", name, "--value", unit).strip()

    def told(self, unit: str) -> str:
        """All that it has said."""
        return self.do("journalctl", "--no-pager", "--output=cat", "--unit", unit)

    def until(self, unit: str, name: str, value: str) -> None:
        """
        Wait for a property to become something.

        :raise AssertionError: it did not; the text has what the unit said.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.shown(unit, name)) != value:
            assert time.monotonic() < deadline, f"{unit}: {name} is {found}\n{self.told(unit)[-4000:]}"
            time.sleep(0.1)

    def until_told(self, unit: str, text: str) -> None:
        """
        Wait for a unit to say something.

        :raise AssertionError: it did not.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.told(unit):
            assert time.monotonic() < deadline, self.told(unit)[-4000:]
            time.sleep(0.1)


@contextmanager
def boot_machine(root: Path) -> Iterator[BootedDebianMachine]:
    """A Debian in a directory, with its systemd running, which is told to end afterwards."""
    command = ["systemd-nspawn", f"--directory={root}", "--machine=debian", "--boot", "--private-network"]
    command += ["--register=no", "--link-journal=no", "--console=pipe"]
    # Without a systemd on this machine there is nobody to ask for a unit.
    command += [] if Path("/run/systemd/system").exists() else ["--keep-unit"]
    with (root / "console").open("wb") as console:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT)
    try:
        machine = BootedDebianMachine(root, _init_process(process, root))
        _await_start(machine)
        yield machine
    finally:
        # Its way of being told to shut down in order.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _init_process(process: subprocess.Popen[bytes], root: Path) -> int:
    """Its first process, once there is one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            # One that only starts it may be gone by now.
            with suppress(OSError):
                if os.readlink(f"/proc/{child}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                    return int(child)
        time.sleep(0.05)
    raise AssertionError(f"systemd-nspawn starts nothing: {(root / 'console').read_text(errors='replace')[-2000:]}")


def _await_start(machine: BootedDebianMachine) -> None:
    """Until it has started all that it is to start, of which not everything has to work."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while machine.run("systemctl", "is-system-running").stdout.strip() not in ("running", "degraded"):
        assert time.monotonic() < deadline, (machine.root / "console").read_text(errors="replace")[-2000:]
        time.sleep(0.1)
