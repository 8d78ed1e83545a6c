"""Alerts that a real Prometheus fires: on the night's figures as installed, and on a mediator that is gone."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from analytics.report.outputs import make_registry, replace_textfile
from mediatord.wallet.temporary_daemon import find_free_port
from tests.analytics.busy_day import BUSY_ROWS, make_report_data
from tests.analytics.test_units import read_unit
from tests.monitoring.prometheus import Prometheus

# Where Debian's node exporter looks, by its default.
COLLECTOR = "/var/lib/prometheus/node-exporter"
READABLE_BY_ALL, LISTABLE_BY_ALL = 0o004, 0o005


def installed(root: Path) -> Path:
    """Run what the unit runs as root before a night, in `root`; the file that the night is told to write."""
    service = read_unit("mediatord-analytics.service")
    for command in service["ExecStartPre"]:
        if command.startswith("+-"):
            here = command[2:].replace("/var/lib/", f"{root}/var/lib/")
            here = here.replace("-o mediatord-analytics -g mediatord ", "")
            subprocess.run(["/bin/sh", "-c", here], check=True)
    (night,) = service["ExecStart"]
    words = night.split()
    return root / words[words.index("--textfile") + 1].removeprefix("/")


def write_night(path: Path) -> None:
    """Write the figures of a bad day as the service does, with its umask."""
    (umask,) = read_unit("mediatord-analytics.service")["UMask"]
    before = os.umask(int(umask, 8))
    try:
        replace_textfile(path, generate_latest(make_registry(make_report_data(BUSY_ROWS))))
    finally:
        os.umask(before)


@contextmanager
def node_exporter(directory: Path) -> Iterator[str]:
    """What it shows of the directory of its textfile collector; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802  named by the base class
            self.send_response(200)
            self.end_headers()
            for path in sorted(directory.glob("*.prom")):
                self.wfile.write(path.read_bytes())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_alerts_fire(tmp_path: Path) -> None:
    """The figures of the night reach Prometheus as installed; a mediator that nobody reaches is not ready."""
    collector = tmp_path / COLLECTOR.removeprefix("/")
    collector.mkdir(parents=True)
    for _ in range(2):
        path = installed(tmp_path)
        write_night(path)
    (shown,) = collector.iterdir()
    assert shown.resolve() == path
    assert path.stat().st_mode & READABLE_BY_ALL and path.parent.stat().st_mode & LISTABLE_BY_ALL
    assert [each.name for each in path.parent.iterdir()] == ["mediatord-analytics.prom"]
    wanted = {"MediatordLedgerBroken", "MediatordNotReady"}
    firing: set[str] = set()

    def all_fire() -> bool:
        firing.update(each["metric"]["alertname"] for each in prometheus.query('ALERTS{alertstate="firing"}'))
        return wanted <= firing

    with node_exporter(collector) as exporter:
        targets = {"node": [exporter], "mediatord": [f"127.0.0.1:{find_free_port()}"]}
        with Prometheus(targets, at_once=True) as prometheus:
            prometheus.await_true(all_fire, "firing")
            missing = 'ALERTS{alertname="MediatordAnalyticsMissing", alertstate="firing"}'
            prometheus.await_true(lambda: not prometheus.query(missing), "over what was before the first scrape")
            prometheus.await_true(lambda: prometheus.values("mediatord_analytics_ledger_vanished") == ["1"], "there")


def test_no_exporter_is_no_error(tmp_path: Path) -> None:
    """Where Debian's exporter is not installed, the figures are written all the same."""
    path = installed(tmp_path)
    write_night(path)
    assert path.exists() and not (tmp_path / COLLECTOR.removeprefix("/")).exists()
