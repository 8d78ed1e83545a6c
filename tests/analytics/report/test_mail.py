"""The report as a message to mail."""

from __future__ import annotations

import email
import email.policy
import re
from email.message import EmailMessage

import pytest

from analytics.report.outputs import render_report
from tests.analytics.busy_day import BUSY_ROWS, HOSTILE, make_report_data
from tests.analytics.report.test_report import ParsedPage


def parse_message(content: bytes) -> EmailMessage:
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    assert not list(message.defects)
    return message


def get_text(message: EmailMessage, kind: str) -> str:
    body = message.get_body((kind,))
    assert body is not None
    text = body.get_content()
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def message() -> EmailMessage:
    return parse_message(render_report(make_report_data(BUSY_ROWS))["report.eml"])


def test_message_can_be_sent_as_it_is(message: EmailMessage) -> None:
    """Seven bits, short lines, and nothing that the mail server has to add."""
    content = render_report(make_report_data(BUSY_ROWS))["report.eml"]

    assert content.isascii() and b"\r" not in content
    assert max(map(len, content.splitlines())) <= 998
    assert message["Subject"] == "CRITICAL: 362 messages lost (normal: 23.5), mediator 2026-11-20"
    assert set(message.keys()) == {"Subject", "Auto-Submitted", "MIME-Version", "Content-Type"}


def test_html_needs_no_style_sheet_and_no_script(message: EmailMessage) -> None:
    """Gmail removes what is not inline, and clips messages of more than 102 KB."""
    html = get_text(message, "html")
    page = ParsedPage(html.encode())

    assert not {"style", "script", "svg", "link", "form", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert "data:" not in html and "var(" not in html and "http" not in re.sub(HOSTILE, "", html.split("<h2")[0])
    assert len(html.encode()) < 102_000
    assert not page.open


def test_charts_are_parts_of_the_message(message: EmailMessage) -> None:
    """PNG images referenced by Content-ID, with a text instead of each."""
    html = ParsedPage(get_text(message, "html").encode())
    pictures = {
        part["Content-ID"].strip("<>"): part.get_content()
        for part in message.walk()
        if part.get_content_type() == "image/png"
    }

    assert len(pictures) == 5
    assert [name.removeprefix("cid:") for name in html.values("src")] == list(pictures)
    assert all(picture.startswith(b"\x89PNG") and len(picture) < 100_000 for picture in pictures.values())
    assert len(html.values("alt")) == 5 and all(len(text) > 20 for text in html.values("alt"))


def test_text_and_html_have_the_overview(message: EmailMessage) -> None:
    """Readable without images: the verdict, what to do, each figure with its normal value and its section."""
    text, html = get_text(message, "plain"), ParsedPage(get_text(message, "html").encode())
    cells = html.find_row("Messages lost")

    assert cells == ["362", "23.5", "10", "15 times normal, highest of 28 nights"]
    assert "* Messages lost: 362; normal 23.5; day before 10; 15 times normal, highest of 28 nights (#lost)" in text
    assert text.index("1. CRITICAL Missing log lines: 5 (") < text.index("Is mail being lost?")
    assert html.texts["h2"][0] == "What to do"
    figures = [row for row in html.rows if len(row) == 5 and "#" in row[0]]
    assert len(figures) == text.count("; day before ") == 24


def test_html_has_the_tables_to_look_at(message: EmailMessage) -> None:
    """Those of the sections that the actions name, cut; text from logs stays text."""
    html = get_text(message, "html")
    page = ParsedPage(html.encode())

    assert page.texts["h2"][1:] == [
        "Ledger and reconciliation",
        "Lost messages",
        "Anomalies",
        "Push notifications",
        "Log quality",
    ]
    assert "<script" not in html and HOSTILE in " ".join(cell for row in page.rows for cell in row)


def test_message_of_a_day_without_data() -> None:
    message = parse_message(render_report(make_report_data({}))["report.eml"])

    assert message["Subject"] == "WARNING: No message ledger for this day, mediator 2026-11-20"
    assert "There are no normal values yet" in get_text(message, "plain")
    assert "cid:" not in get_text(message, "html")
