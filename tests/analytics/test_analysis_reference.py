"""docs/reference/analytics.md and the example of a job agree with the code."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

from analytics.engine import AnalysisSession
from analytics.job import JobRun, Span, __doc__
from analytics.schema import make_events_table
from analytics.settings import Settings
from analytics.writing.warehouse import make_table_query
from tests.analytics.job_tables import DAY, event, fill_table
from tests.docs.analysis_reference import update_document

DOCUMENT = (Path(__file__).parents[2] / "docs/reference/analytics.md").read_text("utf-8")


def test_reference_is_up_to_date() -> None:
    """`python -m tests.docs.analysis_reference PAGE` updates it."""
    assert update_document(DOCUMENT) == DOCUMENT


def test_example_job_runs(session: AnalysisSession, tmp_path: Path) -> None:
    """It has at most twenty lines."""
    found = re.search(r"::\n\n((?:    .*\n|\n)+)", __doc__ or "")
    assert found is not None
    text = dedent(found[1])
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    example: dict[str, Any] = {}
    exec(text, example)  # trusted: part of this repository
    rows = [event("acct.deny", did="z"), *(event("acct.grant", did=did) for did in "xxy")]
    fill_table(session.database, make_events_table(), rows)
    run = JobRun(session.database, session.make_engine(str(tmp_path)), Settings(), Span(DAY, DAY))
    content = example["JOB"].make_tables(run)["grants_daily"]
    query = make_table_query(session.database, example["GRANTS"], content, "grants")
    assert session.database.rows(query) == [{"dt": DAY, "node": "a", "n": 2}]
