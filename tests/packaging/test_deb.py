"""
The Debian package on a small Debian of its own, by `make deb-test`: installed, used, upgraded, removed and purged.

DEB is the package, DEBIAN a directory that debootstrap has filled. Tests go through the life of one installation, in
order.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mediatord.wallet.temporary_daemon import find_free_port
from tests.packaging.debian_machine import MADE, DebianMachine
from tests.packaging.health_checks import await_health

DEB, DEBIAN = os.environ.get("DEB"), os.environ.get("DEBIAN")
WHY_NOT = (
    "no package and no Debian to install it on: make deb-test"
    if not (DEB and DEBIAN)
    else "debootstrap and chroot are for root"
    if os.geteuid()
    else ""
)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

COMPLETION_FILES = (
    "bash-completion/completions/mediatord",
    "bash-completion/completions/mediatord-analytics",
    "zsh/vendor-completions/_mediatord",
    "zsh/vendor-completions/_mediatord-analytics",
    "fish/vendor_completions.d/mediatord.fish",
    "fish/vendor_completions.d/mediatord-analytics.fish",
)
STATE = (
    "/var/lib/mediatord",
    "/var/log/mediatord",
    "/var/lib/mediatord-analytics",
    "/var/lib/mediatord-metrics",
)


@pytest.fixture(scope="module")
def machine() -> Iterator[DebianMachine]:
    """A fresh one, with the package installed by nothing but dpkg."""
    assert DEB and DEBIAN
    root = Path(tempfile.mkdtemp(prefix="mediatord-deb-"))
    try:
        subprocess.run(["cp", "-a", f"{DEBIAN}/.", root], check=True)
        shutil.copy(DEB, root / "mediatord.deb")
        machine = DebianMachine(root)
        machine.do("dpkg", "--install", "/mediatord.deb")
        yield machine
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)


def test_the_plugin_is_listed(machine: DebianMachine) -> None:
    """By twist and twistd, for anybody, out of the cache that came with the package and without a word of warning."""
    cache = next(machine.path("/opt/mediatord/lib").glob("python3.*/site-packages/twisted/plugins/dropin.cache"))
    before = cache.stat().st_mtime_ns
    for program in ("twist", "twistd"):
        told = machine.run(f"/opt/mediatord/bin/{program}", "--help", user="nobody:nogroup")
        assert (told.returncode, told.stderr) == (0, "")
        assert "mediatord" in told.stdout and "Mediator for DIDComm v2 and Decentrl wallets" in told.stdout
    machine.do("/opt/mediatord/bin/twist", "--help")
    assert cache.stat().st_mtime_ns == before


def test_the_programs(machine: DebianMachine) -> None:
    """On the path, with man pages and completion; none of them knows where it was built."""
    version = machine.do("dpkg-query", "--show", "--showformat=${Version}", "mediatord")
    assert machine.do("mediatord", "--version", user="nobody:nogroup") == f"mediatord {version}\n"
    assert "nightly" in machine.do("mediatord-analytics", "--help", user="nobody:nogroup")
    for script in machine.path("/opt/mediatord/bin").iterdir():
        if not script.is_symlink():
            assert script.read_text().startswith("#!/opt/mediatord/bin/python"), script
    for name in ("man1/mediatord.1.gz", "man8/mediatord-analytics-setup.8.gz"):
        assert machine.path(f"/usr/share/man/{name}").stat().st_size > 100
    # That is in no package's documentation, which need not be installed.
    assert "cryptography==" in machine.path("/usr/share/mediatord/bundled.txt").read_text()
    assert "mediatord==" in machine.do("cat", "/usr/share/doc/mediatord/bundled.txt")
    for name in COMPLETION_FILES:
        assert "_COMPLETE=" in machine.path(f"/usr/share/{name}").read_text()
    assert machine.run("mediatord-analytics-setup", "--nonsense").returncode == 2
    assert machine.do("dpkg", "--verify", "mediatord") == ""


def test_users_and_directories(machine: DebianMachine) -> None:
    """System users without a shell; what each may read and write."""
    for user in ("mediatord", "mediatord-analytics"):
        account = machine.do("getent", "passwd", user).strip().split(":")
        assert int(account[2]) < 1000 and account[5:] == [f"/var/lib/{user}", "/usr/sbin/nologin"]
    assert machine.standing("/etc/mediatord") == ("750", "root:mediatord")
    assert machine.standing("/etc/mediatord/mediator.yaml") == ("640", "root:mediatord")
    assert machine.standing("/etc/mediatord/keys.jwks") == ("600", "mediatord:mediatord")
    assert machine.standing("/var/lib/mediatord") == ("700", "mediatord:mediatord")
    assert machine.standing("/var/log/mediatord") == ("750", "mediatord:mediatord")
    assert machine.standing("/var/lib/mediatord-metrics") == ("755", "mediatord-analytics:mediatord")
    assert machine.standing("/var/lib/mediatord-analytics") == ("750", "mediatord-analytics:mediatord")
    assert sorted(path.name for path in machine.path("/etc/mediatord").iterdir()) == ["analytics.yaml", *MADE]


def test_what_the_analysis_may_read(machine: DebianMachine) -> None:
    """As its unit has it, with the group of the daemon: the logs, but neither messages nor keys."""
    night = "mediatord-analytics:mediatord"
    machine.do("ls", "/var/log/mediatord", user=night)
    for name in ("/var/lib/mediatord", "/etc/mediatord/keys.jwks"):
        assert (
            "Permission denied"
            in machine.run("ls", f"{name}/", user=night).stderr + machine.run("head", "-c1", name, user=night).stderr
        )
    machine.do("ls", "/var/lib/mediatord-analytics", user="mediatord:mediatord")


def test_the_unit_is_enabled(machine: DebianMachine) -> None:
    """As those of Debian's daemons are; socket and timer wait for somebody to want them."""
    wanted = machine.path("/etc/systemd/system/multi-user.target.wants/mediatord.service")
    assert wanted.is_symlink() and os.readlink(wanted) == "/lib/systemd/system/mediatord.service"
    for name in ("sockets.target.wants/mediatord.socket", "timers.target.wants/mediatord-analytics.timer"):
        assert not machine.path(f"/etc/systemd/system/{name}").is_symlink()
        assert machine.path(f"/lib/systemd/system/{Path(name).name}").exists()


def test_it_serves(machine: DebianMachine) -> None:
    """As the unit starts it; wallets write to each other through it, and its files are where they should be."""
    machine.do("mediatord", "check-config", "--config", "/etc/mediatord/mediator.yaml", user="mediatord:mediatord")
    port = find_free_port()
    settings = {
        "MEDIATORD_LISTEN": f'["tcp:{port}:interface=127.0.0.1"]',
        "MEDIATORD_PUBLIC_URL": f"http://127.0.0.1:{port}",
    }
    daemon = ("/opt/mediatord/bin/twistd", "-n", "--pidfile=", "mediatord", "-c", "/etc/mediatord/mediator.yaml")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            # A shell, as chroot goes to / and this is where the unit has it.
            machine.command(
                "mediatord:mediatord", "sh", "-c", 'umask 027 && cd /var/lib/mediatord && exec "$@"', "sh", *daemon
            ),
            env=machine.environ(settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            await_health(f"http://127.0.0.1:{port}/health", process)
            told = machine.do("mediatord", "demo", "--url", f"http://127.0.0.1:{port}", user="mediatord:mediatord")
            assert "All steps succeeded." in told
        finally:
            process.terminate()
            assert process.wait(60) == 0
    assert machine.path("/var/lib/mediatord/mediator.sqlite3").exists()
    assert machine.standing("/var/lib/mediatord/log.key") == ("600", "mediatord:mediatord")
    assert "msg.accept" in "".join(path.read_text() for path in machine.path("/var/log/mediatord").glob("*.jsonl"))


def test_upgrade(machine: DebianMachine) -> None:
    """Settings, keys and modes that somebody has changed stay, and nobody is asked."""
    settings = machine.path("/etc/mediatord/mediator.yaml")
    settings.write_text(settings.read_text() + "# ours\n")
    before = machine.configuration()
    told = machine.run("dpkg", "--install", "/mediatord.deb")
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    assert machine.configuration() == before
    assert stat.S_IMODE(machine.path("/etc/mediatord/keys.jwks").stat().st_mode) == 0o600
    assert machine.path("/var/lib/mediatord/mediator.sqlite3").exists()
    assert not list(machine.path("/etc/mediatord").glob(".new*"))


def test_the_key_of_the_log_is_renewed(machine: DebianMachine) -> None:
    """By the daemon itself, where it may write; what is in /etc it may not, as its unit has it."""
    key = machine.path("/var/lib/mediatord/log.key")
    before = key.read_bytes()
    config = ("--config", "/etc/mediatord/mediator.yaml")
    assert "started epoch 2;" in machine.do("mediatord", "log-keys", "rotate", *config, user="mediatord:mediatord")
    assert "started epoch 3;" in machine.do("mediatord", "log-keys", "rotate", *config)
    assert machine.standing("/var/lib/mediatord/log.key") == ("600", "mediatord:mediatord")
    assert key.read_bytes() != before


def test_remove(machine: DebianMachine) -> None:
    """Programs go, whatever was added to them; configuration, keys, messages and logs stay and are used again."""
    before = machine.configuration()
    timer = machine.path("/etc/systemd/system/timers.target.wants/mediatord-analytics.timer")
    timer.parent.mkdir(parents=True, exist_ok=True)
    timer.symlink_to("/lib/systemd/system/mediatord-analytics.timer")
    machine.path("/opt/mediatord/lib/added").write_text("by pip")
    machine.do("dpkg", "--remove", "mediatord")
    assert not machine.path("/opt/mediatord").exists()
    assert not machine.path("/usr/bin/mediatord").is_symlink()
    assert not timer.is_symlink()
    assert machine.configuration() == before
    assert machine.path("/var/lib/mediatord/mediator.sqlite3").exists()
    machine.do("dpkg", "--install", "/mediatord.deb")
    assert machine.configuration() == before
    machine.do("mediatord", "check-config", "--config", "/etc/mediatord/mediator.yaml", user="mediatord:mediatord")


def test_a_lost_configuration(machine: DebianMachine) -> None:
    """Is made again beside the keys that are there."""
    before = machine.configuration()
    machine.path("/etc/mediatord/mediator.yaml").unlink()
    machine.do("dpkg-reconfigure", "mediatord")
    after = machine.configuration()
    assert after["keys.jwks"] == before["keys.jwks"]
    assert b"/var/lib/mediatord/mediator.sqlite3" in after["mediator.yaml"]
    assert b"/var/lib/mediatord/log.key" in after["mediator.yaml"]


def test_lost_keys(machine: DebianMachine) -> None:
    """Are not made again unasked: the mediator would go on as another one."""
    keys = machine.path("/etc/mediatord/keys.jwks")
    kept = keys.read_bytes()
    keys.unlink()
    machine.do("dpkg-reconfigure", "mediatord")
    assert not keys.exists()
    assert not list(machine.path("/etc/mediatord").glob(".new*"))
    keys.write_bytes(kept)
    machine.do("chown", "mediatord:mediatord", "/etc/mediatord/keys.jwks")
    keys.chmod(0o600)


def test_purge(machine: DebianMachine) -> None:
    """Nothing stays but the users."""
    machine.do("dpkg", "--purge", "mediatord")
    for name in ("/etc/mediatord", "/opt/mediatord", "/var/cache/mediatord-analytics", *STATE):
        assert not machine.path(name).exists(), name
    assert not machine.path("/etc/systemd/system/multi-user.target.wants/mediatord.service").is_symlink()
    machine.do("getent", "passwd", "mediatord")
