"""`mediatord status`: display of health, readiness and figures, once and repeatedly."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from threading import Thread
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from mediatord.cli.status import HealthState, MetricsSnapshot, StatusReport, StatusSample
from mediatord.observability.metrics import Metrics
from tests.cli.test_commands import METRICS, Capture, call, one_line, serve_pages

WELL = HealthState(True, "ok")
HEALTHY = (200, '{"status":"ok"}')


def make_figures(at: float, text: str) -> MetricsSnapshot:
    """Result of a scrape at a time."""
    families = text_string_to_metric_families(text)
    return MetricsSnapshot(at, tuple(sample for family in families for sample in family.samples))


def make_measurement(at: float, metrics: Metrics) -> StatusSample:
    """Measurement of a daemon with these metrics."""
    return StatusSample(WELL, None, make_figures(at, metrics.render().decode()))


def test_rates_are_counter_differences() -> None:
    """Between two scrapes."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    metrics.forwarded.inc(by=5)
    before = make_measurement(100.0, metrics)
    metrics.forwarded.inc(by=30)
    metrics.rejected.inc("recipient_unknown")
    now = make_measurement(104.0, metrics)
    found = StatusReport(now, before).values()
    assert found["messages"]["forwarded"] == {"total": 35, "per_second": 7.5}
    assert found["messages"]["expired"] == {"total": 0, "per_second": 0.0}
    assert found["refused"] == {"total": 1, "per_second": 0.25, "reasons": {"recipient_unknown": 1}}
    assert dict(StatusReport(now, before).rows())["forwarded"] == "35, 7.5/s"


def test_no_rates_without_earlier_scrape() -> None:
    """Nor across a restart of the daemon."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    metrics.forwarded.inc(by=5)
    old = make_measurement(100.0, metrics)
    new = make_measurement(104.0, Metrics(CollectorRegistry(), version="9.9"))
    assert StatusReport(old).values()["messages"]["forwarded"] == {"total": 5}
    assert StatusReport(new, old).values()["messages"]["forwarded"] == {"total": 0}
    unseen = StatusSample(WELL, None, "invalid response")
    assert StatusReport(old, unseen).values()["messages"]["forwarded"] == {"total": 5}


def test_latency_percentiles_by_path() -> None:
    """From the histogram's buckets."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    for _ in range(90):
        metrics.delivery_latency.observe(0.02, "live")  # between 0.01 and 0.025
    for _ in range(10):
        metrics.delivery_latency.observe(0.4, "live")  # between 0.25 and 0.5
    metrics.delivery_latency.observe(1e9, "pickup")  # beyond the last bucket
    found = StatusReport(make_measurement(0.0, metrics)).values()["delivery_seconds"]
    assert found == {
        "live": {"p50": pytest.approx(0.01 + 0.015 * 50 / 90, abs=1e-6), "p95": pytest.approx(0.375)},
        "pickup": {"p50": 259_200.0, "p95": 259_200.0},
    }
    rows = dict(StatusReport(make_measurement(0.0, metrics)).rows())
    assert rows["delivery live"] == "p50 18.3 ms, p95 375.0 ms"
    assert rows["delivery pickup"] == "p50 72.0 h, p95 72.0 h"


def test_table_shows_most_frequent_refusals() -> None:
    """JSON has all."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    for number in range(9):
        for _ in range(number + 1):
            metrics.rejected.inc(f"reason_{number}")
    report = StatusReport(make_measurement(0.0, metrics))
    output = [name for name, _ in report.rows() if name.startswith("  ")]
    assert output == [f"  reason_{number}" for number in (8, 7, 6, 5, 4, 3)]
    assert len(report.values()["refused"]["reasons"]) == 9


def test_shows_push_services() -> None:
    """One row for each that is configured, and none otherwise."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    report = StatusReport(make_measurement(0.0, metrics))
    assert "push" not in report.values() and not any(name.startswith("push") for name, _ in report.rows())
    metrics.push_requests.inc("web_push", "sent", by=12)
    metrics.push_requests.inc("webhook", "retry", by=3)
    metrics.push_devices = {"web_push": 2}
    metrics.count_push_hosts_backing_off = lambda: {"web_push": 1}
    report = StatusReport(make_measurement(0.0, metrics))
    assert report.values()["push"]["web_push"] == {
        "devices": 2,
        "sent": 12,
        "retry": 0,
        "rejected": 0,
        "forgotten": 0,
        "hosts_backing_off": 1,
    }
    assert report.values()["push"]["webhook"] == {
        "sent": 0,
        "retry": 3,
        "rejected": 0,
        "forgotten": 0,
        "hosts_backing_off": 0,
    }
    rows = dict(report.rows())
    assert rows["push web_push"] == "2 devices, 12 sent, 0 retry, 0 rejected, 0 forgotten, 1 hosts backing off"
    assert rows["push webhook"] == "0 sent, 3 retry, 0 rejected, 0 forgotten, 0 hosts backing off"


def test_shows_didcomm_v1() -> None:
    """Connections by state, once they were counted, and requests by protocol."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    report = StatusReport(make_measurement(0.0, metrics))
    assert "v1_connections" not in report.values() and "v1 wallets" not in dict(report.rows())
    metrics.set_v1_connections(with_account=7, pending=2)
    metrics.request_duration.observe(0.02, "didcomm_v1")
    report = StatusReport(make_measurement(0.0, metrics))
    assert report.values()["v1_connections"] == {"account": 7, "pending": 2}
    rows = dict(report.rows())
    assert rows["v1 wallets"] == "7 with an account, 2 pending"
    assert rows["response didcomm_v1"].startswith("p50 ")


def test_sum_of_other_queues_is_not_a_queue() -> None:
    text = 'mediator_message_queue_size{did="a"} 4.0\nmediator_message_queue_size{did="other"} 90.0\n'
    waiting = StatusReport(StatusSample(WELL, None, make_figures(0.0, text))).values()["waiting"]
    assert waiting == {"messages": 94, "longest_queue": 4}


def make_ledger(difference: int | None = 0, waiting: int | None = 4) -> str:
    """What the page with the figures has of the books."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    became = {"acknowledged": 3, "waiting": waiting, "expired": 2, "evicted": 1, "removed": 1, "withdrawn": 1}
    metrics.ledgers["didcomm"] = {"accepted": 12, **became}, difference
    metrics.ledgers["decentrl"] = dict.fromkeys(("accepted", *became), 0), 0
    return metrics.render().decode()


@pytest.mark.parametrize(
    ("page", "status", "output"),
    [
        (make_ledger(), 0, "4 waiting + 2 expired + 1 evicted + 1 removed + 1 withdrawn, difference 0"),
        (make_ledger(-3), 1, "4 waiting + 2 expired + 1 evicted + 1 removed + 1 withdrawn, difference -3"),
        (
            make_ledger(None, None),
            0,
            "unknown waiting + 2 expired + 1 evicted + 1 removed + 1 withdrawn, difference unknown",
        ),
    ],
)
def test_shows_ledger_as_equation(page: str, status: int, output: str, capsys: Capture) -> None:
    """One for each protocol; a difference is unhealthy."""
    with serve_pages({"/health": HEALTHY, "/metrics": (200, page)}) as url:
        assert call("status", "--url", url, "--over", "0") == status
        lines = capsys.readouterr().out.splitlines()
        assert f"ledger didcomm   12 accepted = 3 acknowledged + {output}" in lines
        (other,) = (line for line in lines if line.startswith("ledger decentrl"))
        assert other.endswith("0 withdrawn, difference 0")
        assert call("status", "--url", url, "--over", "0", "--json") == status
    found = json.loads(capsys.readouterr().out)
    difference = found["ledger"]["didcomm"]["difference"]
    assert str(difference if difference is not None else "unknown") == output.rpartition(" ")[2]
    assert (found["ledger"]["didcomm"]["accepted"], found["healthy"]) == (12, status == 0)


def test_shows_age_of_figures() -> None:
    """By the clock of the mediator's host."""
    metrics = Metrics(CollectorRegistry(), version="9.9")
    metrics.set_store_read_time(1_795_457_400.7, 4)
    samples = make_figures(0.0, metrics.render().decode()).samples
    for date, age in ((1_795_457_400.0, 0), (1_795_457_403.0, 2), (1_795_457_500.0, 99)):
        report = StatusReport(StatusSample(WELL, HealthState(True, "ok", 0.25), MetricsSnapshot(0.0, samples, date)))
        values, rows = report.values(), dict(report.rows())
        assert (values["figures_at"], values["store_at"], values["store_age_seconds"]) == (date, 1_795_457_400.7, age)
        assert rows["store as of"] == f"18:10:00 UTC, {age} s ago"
        assert (values["ready_age_seconds"], rows["ready"]) == (0.25, "ok, tried 250.0 ms ago")
    assert rows["as of"] == "18:11:40 UTC"


def test_figures_without_time_of_store() -> None:
    """A mediator may not report when the store was read."""
    report = StatusReport(make_measurement(0.0, Metrics(CollectorRegistry(), version="9.9")))
    assert "store_at" not in report.values() and "store as of" not in dict(report.rows())


def test_omits_ledger_before_first_reading() -> None:
    report = StatusReport(make_measurement(0.0, Metrics(CollectorRegistry(), version="9.9")))
    assert report.healthy and "ledger" not in report.values()


@pytest.mark.parametrize(
    ("page", "status", "output"),
    [
        ((200, '{"status":"ok","cycle_ms":3}'), 0, "ok"),
        ((503, '{"status":"error","detail":"listener"}'), 1, "error: listener"),
        ((500, "what"), 1, "HTTP 500"),
        (None, 0, None),
    ],
)
def test_readiness_counts(page: tuple[int, str] | None, status: int, output: str | None, capsys: Capture) -> None:
    """If it can be requested."""
    pages = {"/health": HEALTHY, "/metrics": (200, METRICS), **({"/ready": page} if page else {})}
    with serve_pages(pages) as url:
        assert call("status", "--url", url, "--over", "0", "--json") == status
    found = json.loads(capsys.readouterr().out)
    assert found.get("ready") == output
    assert found["figures_at"] > 0
    assert found["healthy"] is (status == 0)


def test_scrapes_twice_for_rates_by_default(capsys: Capture) -> None:
    with serve_pages({"/health": HEALTHY, "/metrics": (200, METRICS)}) as url:
        assert call("status", "--url", url, "--over", "0.05", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["messages"]["forwarded"] == {"total": 12, "per_second": 0.0}


def test_shows_state_without_access_to_figures(capsys: Capture) -> None:
    """In JSON as well."""
    with serve_pages({"/health": HEALTHY, "/metrics": (403, "")}) as url:
        assert call("status", "--url", url, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "status": "ok",
        "healthy": True,
        "metrics": "hidden from this address (HTTP 403), by metrics.allow or a proxy",
    }


_INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from mediatord.cli import main
main()
"""


def watch_status(url: str, *options: str) -> subprocess.Popen[str]:
    """Run the command in a process that can be interrupted, even if the test runner ignores the signal."""
    command = [sys.executable, "-c", _INTERRUPTIBLE, "status", "--url", url, "--watch", "0.1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.system
def test_watch_until_interrupted() -> None:
    """Through a restart of the daemon; exit status 0."""
    pages = {"/health": HEALTHY, "/metrics": (200, METRICS)}
    with serve_pages(pages) as url:
        process = watch_status(url, "--json")
        assert process.stdout is not None
        scrapes: list[dict[str, Any]] = [json.loads(process.stdout.readline()) for _ in range(3)]
        pages["/health"] = (404, "")
        while scrapes[-1]["healthy"]:
            scrapes.append(json.loads(process.stdout.readline()))
        pages["/health"] = HEALTHY
        while not scrapes[-1]["healthy"]:
            scrapes.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
    assert (process.returncode, complaint) == (0, "")
    assert "per_second" not in scrapes[0]["messages"]["forwarded"]
    assert scrapes[2]["messages"]["forwarded"] == {"total": 12, "per_second": 0.0}
    assert [one["status"] for one in scrapes if not one["healthy"]][0] == (
        f"unreachable: {url}/health: not a mediatord response (HTTP 404)"
    )


@pytest.mark.system
def test_watch_without_terminal_prints_tables() -> None:
    with serve_pages({"/health": HEALTHY, "/metrics": (200, METRICS)}) as url:
        process = watch_status(url)
        assert process.stdout is not None
        lines: list[str] = []
        while lines.count("status       ok\n") < 2:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 0
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    "output", [b"SSH-2.0-\x1b]0;title\x07\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
def test_invalid_response_is_one_line(output: bytes, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(output)

        thread = Thread(target=answer)
        thread.start()
        assert call("status", "--url", f"http://127.0.0.1:{listening.getsockname()[1]}") == 1
        thread.join()
    assert one_line(capsys).endswith("invalid or incomplete HTTP response")
