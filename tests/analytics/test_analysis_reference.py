"""docs/reference/analytics.md says what the code does, and so does the documentation of jobs."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from pyspark.testing import assertDataFrameEqual

from analytics.job import Span, __doc__
from analytics.settings import Settings
from tests.analytics.frames import DAY, event, events
from tests.docs.analysis_reference import update_document

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCUMENT = (Path(__file__).parents[2] / "docs/reference/analytics.md").read_text("utf-8")


def test_tables_kinds_and_figures() -> None:
    """They are up to date; `python -m tests.docs.analysis_reference PAGE` writes them."""
    assert update_document(DOCUMENT) == DOCUMENT


def test_the_example_of_a_job(spark: SparkSession) -> None:
    """It is twenty lines, and it works."""
    found = re.search(r"::\n\n((?:    .*\n|\n)+)", __doc__ or "")
    assert found is not None
    text = dedent(found[1])
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    example: dict[str, Any] = {}
    exec(text, example)  # the document is ours
    rows = [event("acct.deny", did="z"), *(event("acct.grant", did=did) for did in "xxy")]
    made = example["JOB"].transform({"events": events(spark, *rows)}, Settings(), Span(DAY, DAY))
    expected = spark.createDataFrame([(DAY, "a", 2)], example["GRANTS"].struct())
    assertDataFrameEqual(made["grants_daily"], expected)
