"""
The Debian package on a small Debian system, by `make deb-test`: installed, used, upgraded, removed and purged.

DEB is the package, DEBIAN a directory filled by debootstrap. The tests follow one installation, in order.
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
from tests.packaging.debian_machine import GENERATED_FILES, DebianMachine
from tests.packaging.health_checks import await_health

DEB, DEBIAN = os.environ.get("DEB"), os.environ.get("DEBIAN")
SKIP_REASON = (
    "DEB and DEBIAN are not set; run make deb-test"
    if not (DEB and DEBIAN)
    else "debootstrap and chroot need root"
    if os.geteuid()
    else ""
)
pytestmark = pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON)

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
    """A new system with the package installed by dpkg alone."""
    assert DEB and DEBIAN
    root = Path(tempfile.mkdtemp(prefix="mediatord-deb-"))
    try:
        subprocess.run(["cp", "-a", f"{DEBIAN}/.", root], check=True)
        shutil.copy(DEB, root / "mediatord.deb")
        machine = DebianMachine(root)
        machine.run_checked("dpkg", "--install", "/mediatord.deb")
        yield machine
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)


def test_twist_and_twistd_list_the_plugin(machine: DebianMachine) -> None:
    """Any user gets the plugin from the packaged plugin cache, without warnings."""
    cache = next(machine.path("/opt/mediatord/lib").glob("python3.*/site-packages/twisted/plugins/dropin.cache"))
    before = cache.stat().st_mtime_ns
    for program in ("twist", "twistd"):
        result = machine.run(f"/opt/mediatord/bin/{program}", "--help", user="nobody:nogroup")
        assert (result.returncode, result.stderr) == (0, "")
        assert "mediatord" in result.stdout and "Mediator for DIDComm v2 and Decentrl wallets" in result.stdout
    machine.run_checked("/opt/mediatord/bin/twist", "--help")
    assert cache.stat().st_mtime_ns == before


def test_programs_are_installed(machine: DebianMachine) -> None:
    """Programs are on the path, with man pages and completion, and have no paths of the build."""
    version = machine.run_checked("dpkg-query", "--show", "--showformat=${Version}", "mediatord")
    assert machine.run_checked("mediatord", "--version", user="nobody:nogroup") == f"mediatord {version}\n"
    assert "nightly" in machine.run_checked("mediatord-analytics", "--help", user="nobody:nogroup")
    for script in machine.path("/opt/mediatord/bin").iterdir():
        if not script.is_symlink():
            assert script.read_text().startswith("#!/opt/mediatord/bin/python"), script
    for name in ("man1/mediatord.1.gz", "man8/mediatord-analytics-setup.8.gz"):
        assert machine.path(f"/usr/share/man/{name}").stat().st_size > 100
    # Not in /usr/share/doc alone, which need not be installed.
    assert "cryptography==" in machine.path("/usr/share/mediatord/bundled.txt").read_text()
    assert "mediatord==" in machine.run_checked("cat", "/usr/share/doc/mediatord/bundled.txt")
    for name in COMPLETION_FILES:
        assert "_COMPLETE=" in machine.path(f"/usr/share/{name}").read_text()
    for wrong in (["--nonsense"], ["--engine"], ["--engine", "other"]):
        assert machine.run("mediatord-analytics-setup", *wrong).returncode == 2, wrong
    assert machine.run_checked("dpkg", "--verify", "mediatord") == ""


def test_users_and_directories_have_expected_modes(machine: DebianMachine) -> None:
    """Configuration, state and logs have their owners and modes; system users have no shell."""
    for user in ("mediatord", "mediatord-analytics"):
        account = machine.run_checked("getent", "passwd", user).strip().split(":")
        assert int(account[2]) < 1000 and account[5:] == [f"/var/lib/{user}", "/usr/sbin/nologin"]
    assert machine.mode_and_owner("/etc/mediatord") == ("750", "root:mediatord")
    assert machine.mode_and_owner("/etc/mediatord/mediator.yaml") == ("640", "root:mediatord")
    assert machine.mode_and_owner("/etc/mediatord/keys.jwks") == ("600", "mediatord:mediatord")
    assert machine.mode_and_owner("/var/lib/mediatord") == ("700", "mediatord:mediatord")
    assert machine.mode_and_owner("/var/log/mediatord") == ("750", "mediatord:mediatord")
    assert machine.mode_and_owner("/var/lib/mediatord-metrics") == ("755", "mediatord-analytics:mediatord")
    assert machine.mode_and_owner("/var/lib/mediatord-analytics") == ("750", "mediatord-analytics:mediatord")
    assert sorted(path.name for path in machine.path("/etc/mediatord").iterdir()) == [
        "analytics.yaml",
        *GENERATED_FILES,
    ]


def test_analysis_reads_only_logs(machine: DebianMachine) -> None:
    """The analysis, with the daemon's group as in its unit, can read neither messages nor keys."""
    user = "mediatord-analytics:mediatord"
    machine.run_checked("ls", "/var/log/mediatord", user=user)
    for name in ("/var/lib/mediatord", "/etc/mediatord/keys.jwks"):
        assert (
            "Permission denied"
            in machine.run("ls", f"{name}/", user=user).stderr + machine.run("head", "-c1", name, user=user).stderr
        )
    machine.run_checked("ls", "/var/lib/mediatord-analytics", user="mediatord:mediatord")


def test_unit_is_enabled(machine: DebianMachine) -> None:
    """The package enables the service, as daemons of Debian are; socket and timer stay disabled."""
    wanted = machine.path("/etc/systemd/system/multi-user.target.wants/mediatord.service")
    assert wanted.is_symlink() and os.readlink(wanted) == "/lib/systemd/system/mediatord.service"
    for name in ("sockets.target.wants/mediatord.socket", "timers.target.wants/mediatord-analytics.timer"):
        assert not machine.path(f"/etc/systemd/system/{name}").is_symlink()
        assert machine.path(f"/lib/systemd/system/{Path(name).name}").exists()


def test_serves_as_started_by_the_unit(machine: DebianMachine) -> None:
    """The demo succeeds with the command of the unit, and files are in the directories of the package."""
    machine.run_checked(
        "mediatord", "check-config", "--config", "/etc/mediatord/mediator.yaml", user="mediatord:mediatord"
    )
    port = find_free_port()
    settings = {
        "MEDIATORD_LISTEN": f'["tcp:{port}:interface=127.0.0.1"]',
        "MEDIATORD_PUBLIC_URL": f"http://127.0.0.1:{port}",
    }
    daemon = ("/opt/mediatord/bin/twistd", "-n", "--pidfile=", "mediatord", "-c", "/etc/mediatord/mediator.yaml")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            # A shell, as chroot changes to / and the unit sets this directory.
            machine.command(
                "mediatord:mediatord", "sh", "-c", 'umask 027 && cd /var/lib/mediatord && exec "$@"', "sh", *daemon
            ),
            env=machine.environ(settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            await_health(f"http://127.0.0.1:{port}/health", process)
            output_text = machine.run_checked(
                "mediatord", "demo", "--url", f"http://127.0.0.1:{port}", user="mediatord:mediatord"
            )
            assert "All steps succeeded." in output_text
        finally:
            process.terminate()
            assert process.wait(60) == 0
    assert machine.path("/var/lib/mediatord/mediator.sqlite3").exists()
    assert machine.mode_and_owner("/var/lib/mediatord/log.key") == ("600", "mediatord:mediatord")
    assert "msg.accept" in "".join(path.read_text() for path in machine.path("/var/log/mediatord").glob("*.jsonl"))


def test_upgrade_keeps_changes(machine: DebianMachine) -> None:
    """An upgrade keeps changed settings, keys and modes, and asks nothing."""
    settings = machine.path("/etc/mediatord/mediator.yaml")
    settings.write_text(settings.read_text() + "# ours\n")
    before = machine.configuration()
    result = machine.run("dpkg", "--install", "/mediatord.deb")
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert machine.configuration() == before
    assert stat.S_IMODE(machine.path("/etc/mediatord/keys.jwks").stat().st_mode) == 0o600
    assert machine.path("/var/lib/mediatord/mediator.sqlite3").exists()
    assert not list(machine.path("/etc/mediatord").glob(".new*"))


def test_daemon_rotates_log_key(machine: DebianMachine) -> None:
    """The log key is in the directory of the daemon, which cannot write to /etc."""
    key = machine.path("/var/lib/mediatord/log.key")
    before = key.read_bytes()
    config = ("--config", "/etc/mediatord/mediator.yaml")
    assert machine.run_checked("mediatord", "log-keys", "rotate", *config, user="mediatord:mediatord").startswith(
        "started epoch 2;"
    )
    assert machine.run_checked("mediatord", "log-keys", "rotate", *config).startswith("started epoch 3;")
    assert machine.mode_and_owner("/var/lib/mediatord/log.key") == ("600", "mediatord:mediatord")
    assert key.read_bytes() != before


def test_remove_keeps_data(machine: DebianMachine) -> None:
    """Programs are removed; configuration, keys, messages and logs stay and are used by the next installation."""
    before = machine.configuration()
    timer = machine.path("/etc/systemd/system/timers.target.wants/mediatord-analytics.timer")
    timer.parent.mkdir(parents=True, exist_ok=True)
    timer.symlink_to("/lib/systemd/system/mediatord-analytics.timer")
    machine.path("/opt/mediatord/lib/added").write_text("by pip")
    machine.run_checked("dpkg", "--remove", "mediatord")
    assert not machine.path("/opt/mediatord").exists()
    assert not machine.path("/usr/bin/mediatord").is_symlink()
    assert not timer.is_symlink()
    assert machine.configuration() == before
    assert machine.path("/var/lib/mediatord/mediator.sqlite3").exists()
    machine.run_checked("dpkg", "--install", "/mediatord.deb")
    assert machine.configuration() == before
    machine.run_checked(
        "mediatord", "check-config", "--config", "/etc/mediatord/mediator.yaml", user="mediatord:mediatord"
    )


def test_missing_configuration_is_recreated(machine: DebianMachine) -> None:
    """Reconfiguring writes a missing configuration and keeps the keys."""
    before = machine.configuration()
    machine.path("/etc/mediatord/mediator.yaml").unlink()
    machine.run_checked("dpkg-reconfigure", "mediatord")
    after = machine.configuration()
    assert after["keys.jwks"] == before["keys.jwks"]
    assert b"/var/lib/mediatord/mediator.sqlite3" in after["mediator.yaml"]
    assert b"/var/lib/mediatord/log.key" in after["mediator.yaml"]


def test_missing_keys_are_not_recreated(machine: DebianMachine) -> None:
    """Reconfiguring creates no keys where they are missing: the mediator would have another identity."""
    keys = machine.path("/etc/mediatord/keys.jwks")
    kept = keys.read_bytes()
    keys.unlink()
    machine.run_checked("dpkg-reconfigure", "mediatord")
    assert not keys.exists()
    assert not list(machine.path("/etc/mediatord").glob(".new*"))
    keys.write_bytes(kept)
    machine.run_checked("chown", "mediatord:mediatord", "/etc/mediatord/keys.jwks")
    keys.chmod(0o600)


def test_purge_leaves_only_users(machine: DebianMachine) -> None:
    """A purge removes all files, also one of mediatord-analytics-setup; the users stay."""
    engine = machine.path("/etc/systemd/system/mediatord-analytics.service.d/engine.conf")
    engine.parent.mkdir(parents=True)
    engine.write_text("[Service]\nEnvironment=ENGINE=duckdb\n")
    machine.run_checked("dpkg", "--purge", "mediatord")
    for name in ("/etc/mediatord", "/opt/mediatord", "/var/cache/mediatord-analytics", *STATE):
        assert not machine.path(name).exists(), name
    assert not engine.parent.exists()
    assert not machine.path("/etc/systemd/system/multi-user.target.wants/mediatord.service").is_symlink()
    machine.run_checked("getent", "passwd", "mediatord")
