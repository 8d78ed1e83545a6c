"""The command line of the analysis: arguments, error lines, exit statuses."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Event

import click
import pytest
from click.shell_completion import ShellComplete

import analytics
from analytics.cli import (
    ProgressReporter,
    _print_items,
    _report_outcome,
    cli,
    get_today,
    is_small_input,
    main,
    make_span,
    parse_day,
    parse_heap_size,
    parse_size_bytes,
    parse_spark_conf,
)
from analytics.errors import EXIT_FAILED, EXIT_USAGE, AnalyticsError
from analytics.files import get_local_path
from analytics.job import Span
from analytics.nightly import NightlyOutcome
from analytics.privacy import PseudonymKeyFile
from analytics.settings import Settings
from analytics.writing.retention import ExpiredItem

ROOT = Path(analytics.__file__).parents[1]


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command run in this process."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    status = exit_info.value.code
    assert isinstance(status, int)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("nightly --logs LOGS", "Missing option '--out'."),
        ("nightly --out OUT", "Missing option '--logs'."),
        ("nightly --logs LOGS --out OUT --what", "No such option '--what'."),
        ("nightly --logs LOGS --out OUT more", "Got unexpected extra argument (more)"),
        ("nightly --logs LOGS/nope --out OUT", "--logs LOGS/nope: no such directory"),
        ("nightly --logs LOGS --logs file:LOGS/nope --out OUT", "--logs file:LOGS/nope: no such directory"),
        ("nightly --logs LOGS --out LOGS/file", "--out LOGS/file: not writable: File exists"),
        ("nightly --logs LOGS --out OUT --scratch LOGS/file", "--scratch LOGS/file: not writable: File exists"),
        (
            "nightly --logs LOGS --out OUT --textfile LOGS/file/a.prom",
            "--textfile: directory LOGS/file: not writable: File exists",
        ),
        ("nightly --logs LOGS --out OUT --day 2999-01-01", "Invalid value for '--day': 2999-01-01 is in the future"),
        (
            "nightly --logs LOGS --out OUT --day 20261120",
            "Invalid value for '--day': '20261120' is not a day; expected a date such as 2026-11-20",
        ),
        (
            "nightly --logs LOGS --out OUT --from 2026-02-30",
            "Invalid value for '--from': '2026-02-30' is not a day; expected a date such as 2026-11-20",
        ),
        (
            "nightly --logs LOGS --out OUT --from 2026-11-09 --to 2026-11-08",
            "--to 2026-11-08 is before --from 2026-11-09",
        ),
        ("nightly --logs LOGS --out OUT --to 2026-11-08", "--to requires --from"),
        (
            "nightly --logs LOGS --out OUT --day 2026-11-08 --to 2026-11-08",
            "--day cannot be combined with --from or --to",
        ),
        (
            "nightly --logs LOGS --out OUT --memory 4gibi",
            "Invalid value for '--memory': '4gibi' is not a size; expected one such as 512m or 4GiB",
        ),
        ("nightly --logs LOGS --out OUT --conf spark.x", "--conf spark.x: expected KEY=VALUE"),
        ("nightly --logs LOGS --out OUT --settings LOGS/nope", "LOGS/nope: No such file or directory"),
        (
            "nightly --logs LOGS --out s3a://bucket/out",
            "--keys FILE is required, because --out is not a local directory",
        ),
        ("prune --out LOGS/nope", "--out LOGS/nope: no such directory"),
        ("prune --out LOGS --logs LOGS/nope", "--logs LOGS/nope: no such directory"),
        ("prune --out LOGS --scratch LOGS/file", "--scratch LOGS/file: not writable: File exists"),
        ("sample --dir LOGS/file/logs", "--dir LOGS/file/logs: not writable: Not a directory"),
        ("knightly", "No such command 'knightly'."),
        ("pseudonyms forget --keys OUT/keys", "Missing argument 'EPOCH'."),
    ],
)
def test_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, line: str
) -> None:
    """Exit status 2, before Spark starts."""
    (tmp_path / "file").write_text("")
    paths = {"LOGS": str(tmp_path), "OUT": str(tmp_path / "out")}

    def substitute_paths(text: str) -> str:
        return re.sub("LOGS|OUT", lambda found: paths[found[0]], text)

    status, out, err = run_command(capsys, *substitute_paths(arguments).split())
    assert (status, out) == (EXIT_USAGE, "")
    assert err.startswith(f"mediatord-analytics: {substitute_paths(line)}")
    assert err.count("\n") == 1


def test_unusable_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The line begins with the path."""
    (tmp_path / "file").touch()
    status, _, err = run_command(capsys, "demo", "--dir", f"{tmp_path}/file/demo")
    assert (status, err) == (EXIT_FAILED, f"mediatord-analytics: {tmp_path}/file/demo: Not a directory\n")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments, the same text is an error."""
    status, out, _ = run_command(capsys, "--help")
    assert status == 0
    for name in cli.commands:
        assert f"  {name}" in out
    assert run_command(capsys)[0] == EXIT_USAGE


def test_makes_span_from_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yesterday, one day, several days, several days until yesterday."""
    assert datetime.now(UTC).date() <= get_today() <= datetime.now(UTC).date()
    first, last, yesterday = date(2026, 11, 1), date(2026, 11, 9), date(2026, 11, 20)
    monkeypatch.setattr("analytics.cli.get_today", lambda: yesterday + timedelta(1))
    assert make_span(None, None, None) == Span(yesterday, yesterday)
    assert make_span(first, None, None) == Span(first, first)
    assert make_span(None, first, last) == Span(first, last)
    assert make_span(None, yesterday, None) == Span(yesterday, yesterday)
    assert parse_day("2026-11-21") == yesterday + timedelta(1)


def test_parses_sizes_and_paths() -> None:
    """Sizes in Java's notation, paths in Spark's."""
    assert [parse_size_bytes(text) for text in ("0", "7", "2k", "512M", "1g", "1t", "1 GiB", "2MB", "1.5g")] == [
        0, 7, 2048, 512 << 20, 1 << 30, 1 << 40, 1 << 30, 2_000_000, 3 << 29,
    ]  # fmt: skip
    assert [parse_heap_size(text) for text in ("512m", "4GiB", "1t", "1.5g", "2MB")] == [
        "512m", "4g", "1024g", "1536m", "1953k",
    ]  # fmt: skip
    for text in ("1.5x", "-1g", "g", "1h"):
        with pytest.raises(click.BadParameter):
            parse_size_bytes(text)
    with pytest.raises(click.BadParameter):
        parse_heap_size("7")
    assert get_local_path("a/b") == Path("a/b")
    assert get_local_path("file:/a/b") == get_local_path("file:///a/b") == Path("/a/b")
    assert get_local_path("hdfs://a/b") is get_local_path("s3a://a/b") is None
    assert parse_spark_conf(["a.b=c=d", "e="]) == {"a.b": "c=d", "e": ""}


def test_commands_without_spark(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Columns, the schema of a line, settings, and pseudonym keys."""
    assert run_command(capsys, "schema")[1].startswith("dt ")
    assert "opening" in run_command(capsys, "schema", "ledger_daily")[1]
    assert '"$schema"' in run_command(capsys, "schema", "line")[1]
    assert run_command(capsys, "schema", "nope")[0] == EXIT_USAGE
    assert run_command(capsys, "settings")[1] == (ROOT / "etc/analytics.yaml").read_text("utf-8")
    assert run_command(capsys, "pseudonyms", "list", "--keys", f"{tmp_path}/keys") == (0, "", "")
    status, _, err = run_command(capsys, "pseudonyms", "forget", "--keys", f"{tmp_path}/keys", "7")
    assert status == EXIT_FAILED and err.count("\n") == 1


def test_print_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Columns, settings, key epochs and generated days; the schema of a line is JSON anyway."""
    ledger = json.loads(run_command(capsys, "schema", "ledger_daily", "--json")[1])
    assert (ledger["table"], ledger["key"], ledger["private"]) == ("ledger_daily", ["dt"], False)
    assert {"name": "dt", "type": "date", "meaning": "day, UTC"} in ledger["columns"]
    assert json.loads(run_command(capsys, "settings", "--json")[1]) == Settings().model_dump()
    keys = PseudonymKeyFile(tmp_path / "keys", 90)
    keys.make_pseudonym_function(date(2026, 11, 20))
    [epoch] = json.loads(run_command(capsys, "pseudonyms", "list", "--keys", f"{tmp_path}/keys", "--json")[1])
    assert epoch == {"epoch": 1, "first_day": "2026-10-01", "last_day": "2026-12-29", "key": "kept"}
    arguments = f"sample --dir {tmp_path}/logs --from 2026-11-20 --days 1 --messages 20 --json"
    [day] = json.loads(run_command(capsys, *arguments.split())[1])
    assert day["day"] == "2026-11-20" and 0 < day["accepted"] < day["lines"]


def test_prints_the_outcome_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The report's path or JSON on standard output; warnings and integrity errors on standard error."""
    outcome = NightlyOutcome(
        4, "run", "out/report/2026-11-20/index.html", ["2026-11-20: missing log lines: 3"], ["w"]
    )
    assert _report_outcome(outcome, show=False, as_json=False) == 4
    assert capsys.readouterr() == (
        "out/report/2026-11-20/index.html\n",
        "warning: w\nintegrity error: 2026-11-20: missing log lines: 3\n",
    )
    _report_outcome(outcome, show=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "run_id": "run",
        "exit_status": 4,
        "report": "out/report/2026-11-20/index.html",
        "integrity_errors": ["2026-11-20: missing log lines: 3"],
        "warnings": ["w"],
    }


def test_prints_expired_items(capsys: pytest.CaptureFixture[str]) -> None:
    items = [ExpiredItem("out/report/2025-01-01", "report of 2025-01-01")]
    _print_items(items, dry_run=True, as_json=False)
    assert capsys.readouterr().out == (
        "would delete report of 2025-01-01: out/report/2025-01-01\nwould delete 1 item\n"
    )
    _print_items(items, dry_run=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "dry_run": False,
        "items": [{"path": "out/report/2025-01-01", "what": "report of 2025-01-01"}],
    }


def test_failed_prune_prints_what_it_deleted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The items come before the error; without any there is only the error."""
    items = [ExpiredItem("out/report/2025-01-01", "report of 2025-01-01")]

    def delete_some(_options: object, _settings: object, report_item: Callable[[ExpiredItem], None]) -> None:
        for item in items:
            report_item(item)
        raise AnalyticsError("out/report/2025-01-02: permission denied")

    monkeypatch.setattr("analytics.cli._find_and_delete", delete_some)
    error = "mediatord-analytics: out/report/2025-01-02: permission denied\n"
    printed = "deleted report of 2025-01-01: out/report/2025-01-01\ndeleted 1 item\n"
    assert run_command(capsys, "prune", "--out", str(tmp_path)) == (EXIT_FAILED, printed, error)
    status, out, _ = run_command(capsys, "prune", "--out", str(tmp_path), "--json")
    assert (status, json.loads(out)["items"][0]["path"]) == (EXIT_FAILED, "out/report/2025-01-01")
    items.clear()
    assert run_command(capsys, "prune", "--out", str(tmp_path)) == (EXIT_FAILED, "", error)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal, and tells when a text was written."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited
        self.found = Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._awaited in text:
            self.found.set()
        return super().write(text)


def test_shows_the_running_step_on_a_terminal_only() -> None:
    terminal, file = Terminal("ingest, 0 s"), io.StringIO()
    with ProgressReporter(terminal, 0.001) as progress:
        progress.set_status("ingest")
        assert terminal.found.wait(30)
        progress.print("done")
    assert "\r\x1b[Kdone\n" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    with ProgressReporter(file, 0.001) as progress:
        progress.set_status("ingest")
        progress.print("done")
    assert file.getvalue() == "done\n"


def test_reports_nothing_without_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has no such stream if it was closed before the start; standard output is for results."""
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressReporter(interval=0.001) as progress:
        progress.set_status("ingest")
        progress.print("done")
    assert capsys.readouterr().out == ""


def test_completes_directories_tables_and_options() -> None:
    complete = ShellComplete(cli, {}, "mediatord-analytics", "_X")
    assert [item.value for item in complete.get_completions(["schema"], "ledger")] == ["ledger_daily"]
    assert [item.value for item in complete.get_completions(["goals"], "--s")] == ["--scale"]
    for option, kind in {"--logs": "dir", "--out": "dir", "--textfile": "file", "--settings": "file"}.items():
        assert [item.type for item in complete.get_completions(["nightly", option], "x")] == [kind]


def start_nightly(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """Start `python -m analytics nightly` on an empty directory."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "analytics",
            "nightly",
            "--logs",
            tmp_path / "logs",
            "--out",
            tmp_path / "out",
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def test_spark_error_is_one_line(tmp_path: Path) -> None:
    """The Java stack trace is printed with `--debug` only."""
    mistake = ("--conf", "spark.driver.port=none", "--memory", "512m")
    _, err = (process := start_nightly(tmp_path, *mistake)).communicate()
    assert process.returncode == EXIT_FAILED
    _, line = err.splitlines()
    assert line.startswith("mediatord-analytics: ") and "spark.driver.port" in line
    _, err = (process := start_nightly(tmp_path, *mistake, "--debug")).communicate()
    assert process.returncode == EXIT_FAILED
    assert "Traceback" in err and "\tat org.apache.spark" in err and err.splitlines()[-1] == line


def test_small_input_counts_uncompressed_bytes(tmp_path: Path) -> None:
    """Only segments of the requested days count; remote input is never small."""
    days = Span(date(2026, 11, 18), date(2026, 11, 20))
    assert is_small_input([str(tmp_path)], days)
    assert not is_small_input([str(tmp_path), "hdfs:///logs"], days)
    os.truncate(_create_file(tmp_path / "events-20261117T000000Z-a-b-000001.jsonl"), 1 << 30)
    assert is_small_input([str(tmp_path)], days)
    os.truncate(_create_file(tmp_path / "events-20261118T000000Z-a-b-000002.jsonl.gz"), 8 << 20)
    assert not is_small_input([str(tmp_path)], days)


def _create_file(path: Path) -> Path:
    path.touch()
    return path
