"""
The units under a running systemd, by `make systemd-test`: start, watchdog, reload, sandbox, upgrade.

DEB is the package, SYSTEMD_DEBIAN a directory with a Debian system that has systemd. The tests use one machine, in
order.
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
SKIP_REASON = (
    "DEB and SYSTEMD_DEBIAN are not set; run make systemd-test"
    if not (DEB and DEBIAN)
    else "systemd-nspawn needs root"
    if os.geteuid()
    else "no systemd-nspawn; apt-get install systemd-container"
    if shutil.which("systemd-nspawn") is None
    else ""
)
pytestmark = pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON)

URL = "http://127.0.0.1:8080"
CONFIG = "/etc/mediatord/mediator.yaml"
PYTHON = "/opt/mediatord/bin/python"
SERVICE, SOCKET, ANALYTICS = "mediatord.service", "mediatord.socket", "mediatord-analytics.service"
CONFIGURATION_ERROR = "listen[0]: expected a port between 0 and 65535"
# Only values that hold on this machine; other directives are covered by the rating.
SANDBOX_STATUS = {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0000000000000000", "CapBnd": "0000000000000000"}

# Requests over new connections until its input ends; prints the number of each response.
POLLING_PROGRAM = """
import collections, select, sys, urllib.request, urllib.error
replies = collections.Counter()
print("polling", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=60) as response:
            replies[str(response.status)] += 1
    except urllib.error.HTTPError as error:
        replies[f"{error.code} {error.read().decode()}"] += 1
    except OSError as error:
        replies[str(error)] += 1
import json
print(json.dumps(replies))
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[BootedDebianMachine]:
    """A booted machine with the package file."""
    assert DEB and DEBIAN
    root = Path(tempfile.mkdtemp(prefix="mediatord-systemd-"))
    try:
        subprocess.run(["cp", "-a", f"{DEBIAN}/.", root], check=True)
        shutil.copy(DEB, root / "mediatord.deb")
        # As on hosts whose name only DNS resolves; there is no DNS here.
        (root / "etc/hostname").write_text("nobody\n")
        (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n")
        with boot_machine(root) as machine:
            yield machine
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)


@pytest.fixture
def restored_machine(machine: BootedDebianMachine) -> Iterator[BootedDebianMachine]:
    """The machine, whose configuration and units are restored after the test."""
    path = machine.path(CONFIG)
    before = path.read_bytes()
    yield machine
    path.write_bytes(before)
    for unit in (SERVICE, SOCKET, ANALYTICS):
        shutil.rmtree(machine.path(f"/etc/systemd/system/{unit}.d"), ignore_errors=True)
    machine.run_checked("systemctl", "daemon-reload")
    machine.run("systemctl", "reset-failed")
    machine.run("systemctl", "disable", "--now", SOCKET)
    machine.run_checked("systemctl", "restart", SERVICE)


def add_drop_in(machine: DebianMachine, unit: str, *lines: str) -> None:
    """Add a drop-in to a unit, as `systemctl edit` does."""
    directory = machine.path(f"/etc/systemd/system/{unit}.d")
    directory.mkdir(exist_ok=True)
    (directory / "override.conf").write_text("\n".join(lines) + "\n")
    machine.run_checked("systemctl", "daemon-reload")


def change_setting(machine: DebianMachine, key: str, value: str) -> None:
    """Change a key of the configuration, on one line."""
    path = machine.path(CONFIG)
    text, count = re.subn(rf"^{key}:.*$", f"{key}: {value}", path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


def run_demo(machine: DebianMachine) -> None:
    """Run the demo on the machine."""
    assert "All steps succeeded." in machine.run_checked("mediatord", "demo", "--url", URL)


def fetch(machine: DebianMachine, path: str, url: str = URL) -> str:
    """Body of a response, requested on the machine."""
    script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())"
    return machine.run_checked(PYTHON, "-c", script, url + path).strip()


def process_status(machine: BootedDebianMachine) -> dict[str, str]:
    """/proc/PID/status of the main process."""
    lines = machine.run_checked("cat", f"/proc/{machine.unit_property(SERVICE, 'MainPID')}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_installation_starts_the_service(machine: BootedDebianMachine) -> None:
    """The package starts the service, which reports to systemd that it serves."""
    machine.run_checked("dpkg", "--install", "/mediatord.deb")
    machine.await_property(SERVICE, "ActiveState", "active")
    machine.await_property(SERVICE, "StatusText", "serving")
    run_demo(machine)
    assert json.loads(fetch(machine, "/ready"))["status"] == "ok"


def test_process_is_sandboxed(machine: BootedDebianMachine) -> None:
    """The sandbox of the units is in force, as far as this systemd and kernel support it."""
    status = process_status(machine)
    assert {name: status[name] for name in SANDBOX_STATUS} == SANDBOX_STATUS
    for unit in (SERVICE, ANALYTICS):
        machine.run_checked("systemd-analyze", "security", "--no-pager", "--threshold=20", unit)
    in_sandbox = ("nsenter", f"--target={machine.unit_property(SERVICE, 'MainPID')}", "--mount", "--")
    for path in ("/etc/mediatord/new", "/usr/new", "/opt/mediatord/new", "/var/lib/new"):
        assert "Read-only file system" in machine.run(*in_sandbox, "touch", path).stderr, path
    machine.run_checked(*in_sandbox, "touch", "/var/lib/mediatord/new")
    machine.run_checked("rm", "/var/lib/mediatord/new")


def test_process_metrics_are_available(machine: BootedDebianMachine) -> None:
    """The daemon exports the metrics of its process although /proc hides other processes."""
    metrics = fetch(machine, "/metrics")
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds", "start_time_seconds"):
        assert re.search(rf"^process_{name} \d", metrics, re.MULTILINE), name
    assert json.loads(machine.run_checked("mediatord", "status", "--url", URL, "--json"))


def test_reload_applies_new_keys(machine: BootedDebianMachine) -> None:
    """A reload applies rotated keys in the same process, which reports the end of the reload."""
    before = machine.unit_property(SERVICE, "MainPID"), fetch(machine, "/did")
    machine.run_checked("mediatord", "keys", "rotate", "--config", CONFIG)
    machine.run_checked("systemctl", "reload", SERVICE)
    machine.await_journal(SERVICE, "current DID: ")
    assert machine.unit_property(SERVICE, "MainPID") == before[0]
    assert fetch(machine, "/did") != before[1]
    assert "configuration reloaded" in machine.journal(SERVICE)
    assert machine.mode_and_owner("/etc/mediatord/keys.jwks") == ("600", "mediatord:mediatord")


def test_restarts_after_kill(machine: BootedDebianMachine) -> None:
    """systemd restarts a killed daemon."""
    restarts, before = int(machine.unit_property(SERVICE, "NRestarts")), machine.unit_property(SERVICE, "MainPID")
    machine.run_checked("systemctl", "kill", "--signal=KILL", SERVICE)
    machine.await_property(SERVICE, "NRestarts", str(restarts + 1))
    machine.await_property(SERVICE, "ActiveState", "active")
    assert machine.unit_property(SERVICE, "MainPID") != before
    run_demo(machine)


def test_watchdog_restarts_hung_process(restored_machine: BootedDebianMachine) -> None:
    """systemd ends and restarts a daemon that misses the watchdog."""
    add_drop_in(restored_machine, SERVICE, "[Service]", "WatchdogSec=3")
    restored_machine.run_checked("systemctl", "restart", SERVICE)
    restarts = int(restored_machine.unit_property(SERVICE, "NRestarts"))
    restored_machine.run_checked("systemctl", "kill", "--signal=STOP", SERVICE)
    restored_machine.await_property(SERVICE, "NRestarts", str(restarts + 1))
    restored_machine.await_property(SERVICE, "ActiveState", "active")
    assert "Watchdog timeout" in restored_machine.journal(SERVICE)
    run_demo(restored_machine)


def test_configuration_errors_are_in_the_journal(restored_machine: BootedDebianMachine) -> None:
    """A running daemon continues; one that cannot start is not restarted."""
    change_setting(restored_machine, "listen", '["tcp:80800"]')
    before = restored_machine.unit_property(SERVICE, "MainPID")
    restored_machine.run("systemctl", "reload", SERVICE)
    restored_machine.await_journal(SERVICE, CONFIGURATION_ERROR)
    assert (
        restored_machine.unit_property(SERVICE, "MainPID"),
        restored_machine.unit_property(SERVICE, "ActiveState"),
    ) == (
        before,
        "active",
    )
    run_demo(restored_machine)
    assert restored_machine.run("systemctl", "restart", SERVICE).returncode != 0
    properties = [
        restored_machine.unit_property(SERVICE, name) for name in ("ActiveState", "ExecMainStatus", "NRestarts")
    ]
    assert properties == ["failed", "2", "0"]
    (line,) = re.findall(
        rf"^mediatord: .*{re.escape(CONFIGURATION_ERROR)}$", restored_machine.journal(SERVICE), re.MULTILINE
    )
    assert line.startswith(f"mediatord: {CONFIG}:")


def test_socket_activation_refuses_no_client(restored_machine: BootedDebianMachine) -> None:
    """Every client gets a response during restarts, on a privileged port as well."""
    add_drop_in(restored_machine, SOCKET, "[Socket]", "ListenStream=", "ListenStream=127.0.0.1:80")
    change_setting(restored_machine, "listen", '["systemd:domain=INET:index=0"]')
    restored_machine.run_checked("systemctl", "disable", "--now", SERVICE)
    restored_machine.run_checked("systemctl", "enable", "--now", SOCKET, SERVICE)
    with subprocess.Popen(
        restored_machine.command("root", PYTHON, "-c", POLLING_PROGRAM, "http://127.0.0.1/health"),
        env=restored_machine.environ({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as poller:
        assert poller.stdin and poller.stdout and poller.stdout.readline() == "polling\n"
        for _ in range(3):
            restored_machine.run_checked("systemctl", "restart", SERVICE)
        poller.stdin.close()
        replies = json.loads(poller.stdout.read())
    # A connection accepted just before the stop is refused with the advice to retry.
    del replies["200"]
    assert all(reply.startswith("503 ") and "stopping" in reply for reply in replies), replies
    assert json.loads(fetch(restored_machine, "/ready", "http://127.0.0.1"))["status"] == "ok"


def test_tls_as_server_and_client(restored_machine: BootedDebianMachine) -> None:
    """The daemon serves TLS with its certificate and verifies it in its probes."""
    authority = CertificateAuthority(restored_machine.path("/root"))
    intermediate = CertificateAuthority(restored_machine.path("/root"), "Between", parent=authority)
    # As the hook of an ACME client installs them.
    restored_machine.run_checked("install", "-d", "-o", "root", "-g", "mediatord", "-m", "0750", "/etc/mediatord/tls")
    issued = intermediate.issue("mediator", ["localhost"]).read_bytes() + intermediate.path.read_bytes()
    restored_machine.path("/root/both.pem").write_bytes(issued)
    restored_machine.run_checked(
        "install", "-o", "root", "-g", "mediatord", "-m", "0640", "/root/both.pem", "/etc/mediatord/tls"
    )
    files = "privateKey=/etc/mediatord/tls/both.pem:certKey=/etc/mediatord/tls/both.pem"
    change_setting(restored_machine, "listen", f'["ssl:8443:{files}"]')
    change_setting(restored_machine, "public_url", "https://localhost:8443")
    restored_machine.run_checked("systemctl", "restart", SERVICE)
    shutil.copy(authority.path, restored_machine.path("/root/authority.pem"))
    script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())"
    ready = restored_machine.run_checked(
        PYTHON, "-c", script, "https://localhost:8443/ready", SSL_CERT_FILE="/root/authority.pem"
    )
    assert json.loads(ready)["status"] == "ok"


def test_workers_are_sandboxed_and_replaced(restored_machine: BootedDebianMachine) -> None:
    """A killed worker is replaced while the service continues."""
    change_setting(restored_machine, "workers", "2")
    restored_machine.run_checked("systemctl", "restart", SERVICE)
    before = restored_machine.unit_property(SERVICE, "MainPID")
    run_demo(restored_machine)
    children = restored_machine.run_checked("cat", f"/proc/{before}/task/{before}/children").split()
    assert len(children) >= 2
    restored_machine.run_checked("sh", "-c", f"kill -KILL {children[0]}")
    run_demo(restored_machine)
    assert (
        restored_machine.unit_property(SERVICE, "MainPID"),
        restored_machine.unit_property(SERVICE, "ActiveState"),
    ) == (
        before,
        "active",
    )


def test_nightly_analysis_runs_sandboxed(restored_machine: BootedDebianMachine) -> None:
    """The sandbox lets Spark and Java run, on a host whose name has no address; and DuckDB."""
    # Copy the trusted certificates of this host, for its package index.
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(authorities, restored_machine.path(str(authorities)))
    # With the network of this host: the machine has none.
    outside = DebianMachine(restored_machine.root)
    outside.run_checked(
        "mediatord-analytics-setup", "--no-timer", **{k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    )
    (command,) = re.findall(r"argv\[\]=(.*? nightly .*?) ;", restored_machine.unit_property(ANALYTICS, "ExecStart"))
    today = datetime.now(UTC).date().isoformat()
    report = restored_machine.path(f"/var/lib/mediatord-analytics/report/{today}/index.html")
    for engine in ("duckdb", "spark"):
        lines = ("[Service]", "ExecStart=", f"ExecStart={command} --day {today}", f"Environment=ENGINE={engine}")
        add_drop_in(restored_machine, ANALYTICS, *lines)
        # Closes the segment of the event log.
        restored_machine.run_checked("systemctl", "restart", SERVICE)
        report.unlink(missing_ok=True)
        started = restored_machine.run("systemctl", "start", ANALYTICS)
        assert started.returncode == 0, restored_machine.journal(ANALYTICS)[-4000:]
        assert report.stat().st_size > 10_000
    assert (
        "mediatord_day_" in restored_machine.path("/var/lib/mediatord-metrics/mediatord-analytics.prom").read_text()
    )
    # The daemon serves the report to the operator.
    restored_machine.run_checked(
        "runuser", "-u", "mediatord", "--", "ls", f"/var/lib/mediatord-analytics/report/{today}/index.html"
    )


def test_upgrade_restarts_with_same_data(machine: BootedDebianMachine) -> None:
    """An upgrade starts another process with the same DID."""
    before = machine.unit_property(SERVICE, "MainPID"), fetch(machine, "/did")
    machine.run_checked("dpkg", "--install", "/mediatord.deb")
    machine.await_property(SERVICE, "ActiveState", "active")
    assert machine.unit_property(SERVICE, "MainPID") != before[0]
    assert fetch(machine, "/did") == before[1]


def test_purge_stops_the_service(machine: BootedDebianMachine) -> None:
    """A purge stops the service in order; no unit fails."""
    machine.run_checked("dpkg", "--purge", "mediatord")
    assert machine.run("systemctl", "is-active", SERVICE).stdout.strip() == "inactive"
    assert "mediatord" not in machine.run_checked("systemctl", "list-units", "--failed", "--plain", "--no-legend")
