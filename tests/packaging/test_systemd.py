"""
The units under a systemd that runs, by `make systemd-test`: started, watched, reloaded, fenced in, upgraded.

DEB is the package, SYSTEMD_DEBIAN a directory with a Debian that has systemd. One machine is tested, in order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.certificate_authority import CertificateAuthority
from tests.packaging.debian_machine import BootedDebianMachine, DebianMachine, boot_machine

DEB, DEBIAN = os.environ.get("DEB"), os.environ.get("SYSTEMD_DEBIAN")
WHY_NOT = (
    "no package and no Debian with systemd to install it on: make systemd-test"
    if not (DEB and DEBIAN)
    else "systemd-nspawn is for root"
    if os.geteuid()
    else "there is no systemd-nspawn: apt-get install systemd-container"
    if shutil.which("systemd-nspawn") is None
    else ""
)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

URL = "http://127.0.0.1:8080"
CONFIG = "/etc/mediatord/mediator.yaml"
PYTHON = "/opt/mediatord/bin/python"
SERVICE, SOCKET, NIGHT = "mediatord.service", "mediatord.socket", "mediatord-analytics.service"
WRONG = "listen[0]: expected a port between 0 and 65535"
# Only those of this machine are named: the others of `SystemCallFilter` and the like are in the rating.
FENCED = {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0000000000000000", "CapBnd": "0000000000000000"}

# Asks again and again, each time over a new connection, until its input ends; prints how often it was answered what.
ASKING = """
import collections, select, sys, urllib.request, urllib.error
found = collections.Counter()
print("asking", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=60) as response:
            found[str(response.status)] += 1
    except urllib.error.HTTPError as error:
        found[f"{error.code} {error.read().decode()}"] += 1
    except OSError as error:
        found[str(error)] += 1
import json
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[BootedDebianMachine]:
    """One that has just been started, with the package lying there."""
    assert DEB and DEBIAN
    root = Path(tempfile.mkdtemp(prefix="mediatord-systemd-"))
    try:
        subprocess.run(["cp", "-a", f"{DEBIAN}/.", root], check=True)
        shutil.copy(DEB, root / "mediatord.deb")
        # As on hosts that only DNS knows, and here there is none.
        (root / "etc/hostname").write_text("nobody\n")
        (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n")
        with boot_machine(root) as running:
            yield running
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)


@pytest.fixture
def pristine(machine: BootedDebianMachine) -> Iterator[BootedDebianMachine]:
    """Its configuration is put back afterwards, and what a test has added to its units taken away."""
    path = machine.path(CONFIG)
    before = path.read_bytes()
    yield machine
    path.write_bytes(before)
    for unit in (SERVICE, SOCKET, NIGHT):
        shutil.rmtree(machine.path(f"/etc/systemd/system/{unit}.d"), ignore_errors=True)
    machine.do("systemctl", "daemon-reload")
    machine.run("systemctl", "reset-failed")
    machine.run("systemctl", "disable", "--now", SOCKET)
    machine.do("systemctl", "restart", SERVICE)


def add(machine: DebianMachine, unit: str, *lines: str) -> None:
    """As `systemctl edit` does."""
    directory = machine.path(f"/etc/systemd/system/{unit}.d")
    directory.mkdir()
    (directory / "override.conf").write_text("\n".join(lines) + "\n")
    machine.do("systemctl", "daemon-reload")


def setting(machine: DebianMachine, key: str, value: str) -> None:
    """Change a key of the configuration, all in one line."""
    path = machine.path(CONFIG)
    text, found = re.subn(rf"^{key}:.*$", f"{key}: {value}", path.read_text(), flags=re.MULTILINE)
    assert found == 1
    path.write_text(text)


def talk(machine: DebianMachine) -> None:
    """Let wallets write to each other."""
    assert "All steps succeeded." in machine.do("mediatord", "demo", "--url", URL)


def status(machine: DebianMachine, path: str, url: str = URL) -> str:
    """What is answered there."""
    script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())"
    return machine.do(PYTHON, "-c", script, url + path).strip()


def process_status(machine: BootedDebianMachine) -> dict[str, str]:
    """What the kernel says of the main process."""
    lines = machine.do("cat", f"/proc/{machine.shown(SERVICE, 'MainPID')}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_installed_is_started(machine: BootedDebianMachine) -> None:
    """It serves, and says so, once the package is there."""
    machine.do("dpkg", "--install", "/mediatord.deb")
    machine.until(SERVICE, "ActiveState", "active")
    machine.until(SERVICE, "StatusText", "serving")
    talk(machine)
    assert json.loads(status(machine, "/ready"))["status"] == "ok"


def test_it_is_fenced_in(machine: BootedDebianMachine) -> None:
    """By what the units ask for, as far as this systemd and this kernel know it."""
    found = process_status(machine)
    assert {name: found[name] for name in FENCED} == FENCED
    for unit in (SERVICE, NIGHT):
        machine.do("systemd-analyze", "security", "--no-pager", "--threshold=20", unit)
    inside = ("nsenter", f"--target={machine.shown(SERVICE, 'MainPID')}", "--mount", "--")
    for path in ("/etc/mediatord/new", "/usr/new", "/opt/mediatord/new", "/var/lib/new"):
        assert "Read-only file system" in machine.run(*inside, "touch", path).stderr, path
    machine.do(*inside, "touch", "/var/lib/mediatord/new")
    machine.do("rm", "/var/lib/mediatord/new")


def test_it_knows_itself(machine: BootedDebianMachine) -> None:
    """The metrics of the process are there although it sees nothing of the host."""
    found = status(machine, "/metrics")
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds", "start_time_seconds"):
        assert re.search(rf"^process_{name} \d", found, re.MULTILINE), name
    assert json.loads(machine.do("mediatord", "status", "--url", URL, "--json"))


def test_reload(machine: BootedDebianMachine) -> None:
    """New keys are taken over by the process that runs, which says when it has done so."""
    before = machine.shown(SERVICE, "MainPID"), status(machine, "/did")
    machine.do("mediatord", "keys", "rotate", "--config", CONFIG)
    machine.do("systemctl", "reload", SERVICE)
    machine.until_told(SERVICE, "current DID: ")
    assert machine.shown(SERVICE, "MainPID") == before[0]
    assert status(machine, "/did") != before[1]
    assert "configuration reloaded" in machine.told(SERVICE)
    assert machine.standing("/etc/mediatord/keys.jwks") == ("600", "mediatord:mediatord")


def test_killed(machine: BootedDebianMachine) -> None:
    """It is started again."""
    restarts, before = int(machine.shown(SERVICE, "NRestarts")), machine.shown(SERVICE, "MainPID")
    machine.do("systemctl", "kill", "--signal=KILL", SERVICE)
    machine.until(SERVICE, "NRestarts", str(restarts + 1))
    machine.until(SERVICE, "ActiveState", "active")
    assert machine.shown(SERVICE, "MainPID") != before
    talk(machine)


def test_hung(pristine: BootedDebianMachine) -> None:
    """It is ended, and started again."""
    add(pristine, SERVICE, "[Service]", "WatchdogSec=3")
    pristine.do("systemctl", "restart", SERVICE)
    restarts = int(pristine.shown(SERVICE, "NRestarts"))
    pristine.do("systemctl", "kill", "--signal=STOP", SERVICE)
    pristine.until(SERVICE, "NRestarts", str(restarts + 1))
    pristine.until(SERVICE, "ActiveState", "active")
    assert "Watchdog timeout" in pristine.told(SERVICE)
    talk(pristine)


def test_a_mistake_in_the_configuration(pristine: BootedDebianMachine) -> None:
    """Is told in the journal: by one that runs and goes on, and by one that does not start and is not tried again."""
    setting(pristine, "listen", '["tcp:80800"]')
    before = pristine.shown(SERVICE, "MainPID")
    pristine.run("systemctl", "reload", SERVICE)
    pristine.until_told(SERVICE, WRONG)
    assert (pristine.shown(SERVICE, "MainPID"), pristine.shown(SERVICE, "ActiveState")) == (before, "active")
    talk(pristine)
    assert pristine.run("systemctl", "restart", SERVICE).returncode != 0
    shown = [pristine.shown(SERVICE, name) for name in ("ActiveState", "ExecMainStatus", "NRestarts")]
    assert shown == ["failed", "2", "0"]
    (line,) = re.findall(rf"^mediatord: .*{re.escape(WRONG)}$", pristine.told(SERVICE), re.MULTILINE)
    assert line.startswith(f"mediatord: {CONFIG}:")


def test_nobody_is_refused_behind_the_socket(pristine: BootedDebianMachine) -> None:
    """Also at a port that the daemon could not open itself: however often it is restarted, everybody is answered."""
    add(pristine, SOCKET, "[Socket]", "ListenStream=", "ListenStream=127.0.0.1:80")
    setting(pristine, "listen", '["systemd:domain=INET:index=0"]')
    pristine.do("systemctl", "disable", "--now", SERVICE)
    pristine.do("systemctl", "enable", "--now", SOCKET, SERVICE)
    with subprocess.Popen(
        pristine.command("root", PYTHON, "-c", ASKING, "http://127.0.0.1/health"),
        env=pristine.environ({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdin and asking.stdout and asking.stdout.readline() == "asking\n"
        for _ in range(3):
            pristine.do("systemctl", "restart", SERVICE)
        asking.stdin.close()
        found = json.loads(asking.stdout.read())
    # A connection that was taken just before the end is told that it came, and may come again.
    del found["200"]
    assert all(said.startswith("503 ") and "stopping" in said for said in found), found
    assert json.loads(status(pristine, "/ready", "http://127.0.0.1"))["status"] == "ok"


def test_tls(pristine: BootedDebianMachine) -> None:
    """Shown to clients by the daemon itself, and spoken by it as a client: it asks itself over its own listener."""
    authority = CertificateAuthority(pristine.path("/root"))
    between = CertificateAuthority(pristine.path("/root"), "Between", parent=authority)
    # As an ACME client's hook puts them there.
    pristine.do("install", "-d", "-o", "root", "-g", "mediatord", "-m", "0750", "/etc/mediatord/tls")
    issued = between.issue("mediator", ["localhost"]).read_bytes() + between.path.read_bytes()
    pristine.path("/root/both.pem").write_bytes(issued)
    pristine.do("install", "-o", "root", "-g", "mediatord", "-m", "0640", "/root/both.pem", "/etc/mediatord/tls")
    files = "privateKey=/etc/mediatord/tls/both.pem:certKey=/etc/mediatord/tls/both.pem"
    setting(pristine, "listen", f'["ssl:8443:{files}"]')
    setting(pristine, "public_url", "https://localhost:8443")
    pristine.do("systemctl", "restart", SERVICE)
    shutil.copy(authority.path, pristine.path("/root/authority.pem"))
    script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())"
    ready = pristine.do(PYTHON, "-c", script, "https://localhost:8443/ready", SSL_CERT_FILE="/root/authority.pem")
    assert json.loads(ready)["status"] == "ok"


def test_workers(pristine: BootedDebianMachine) -> None:
    """Under the same fences; one that is killed is replaced, and the service goes on."""
    setting(pristine, "workers", "2")
    pristine.do("systemctl", "restart", SERVICE)
    before = pristine.shown(SERVICE, "MainPID")
    talk(pristine)
    children = pristine.do("cat", f"/proc/{before}/task/{before}/children").split()
    assert len(children) >= 2
    pristine.do("sh", "-c", f"kill -KILL {children[0]}")
    talk(pristine)
    assert (pristine.shown(SERVICE, "MainPID"), pristine.shown(SERVICE, "ActiveState")) == (before, "active")


def test_the_night(pristine: BootedDebianMachine) -> None:
    """Spark and Java under their fences, on a host whose name has no address."""
    # What the machine trusts, its package index included, this one does.
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(authorities, pristine.path(str(authorities)))
    # With the network of the machine that tests: that in there has none.
    outside = DebianMachine(pristine.root)
    outside.do(
        "mediatord-analytics-setup", "--no-timer", **{k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    )
    (command,) = re.findall(r"argv\[\]=(.*? nightly .*?) ;", pristine.shown(NIGHT, "ExecStart"))
    today = datetime.now(UTC).date().isoformat()
    add(pristine, NIGHT, "[Service]", "ExecStart=", f"ExecStart={command} --day {today}")
    # Which closes the segment of the log.
    pristine.do("systemctl", "restart", SERVICE)
    started = pristine.run("systemctl", "start", NIGHT)
    assert started.returncode == 0, pristine.told(NIGHT)[-4000:]
    assert pristine.path(f"/var/lib/mediatord-analytics/report/{today}/index.html").stat().st_size > 10_000
    assert "mediatord_day_" in pristine.path("/var/lib/mediatord-metrics/mediatord-analytics.prom").read_text()
    # The daemon shows it to the operator.
    pristine.do("runuser", "-u", "mediatord", "--", "ls", f"/var/lib/mediatord-analytics/report/{today}/index.html")


def test_upgraded(machine: BootedDebianMachine) -> None:
    """The new one is another process, with the same keys and messages."""
    before = machine.shown(SERVICE, "MainPID"), status(machine, "/did")
    machine.do("dpkg", "--install", "/mediatord.deb")
    machine.until(SERVICE, "ActiveState", "active")
    assert machine.shown(SERVICE, "MainPID") != before[0]
    assert status(machine, "/did") == before[1]


def test_purged(machine: BootedDebianMachine) -> None:
    """It was stopped in order, and nothing of it has failed."""
    machine.do("dpkg", "--purge", "mediatord")
    assert machine.run("systemctl", "is-active", SERVICE).stdout.strip() == "inactive"
    assert "mediatord" not in machine.do("systemctl", "list-units", "--failed", "--plain", "--no-legend")
