"""docs/reference/analytics.md and the example of a job agree with the code."""

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


def test_reference_is_up_to_date() -> None:
    """`python -m tests.docs.analysis_reference PAGE` updates it."""
    assert update_document(DOCUMENT) == DOCUMENT


def test_example_job_runs(spark: SparkSession) -> None:
    """It has at most twenty lines."""
    found = re.search(r"::\n\n((?:    .*\n|\n)+)", __doc__ or "")
    assert found is not None
    text = dedent(found[1])
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    example: dict[str, Any] = {}
    exec(text, example)  # trusted: part of this repository
    rows = [event("acct.deny", did="z"), *(event("acct.grant", did=did) for did in "xxy")]
    result = example["JOB"].transform({"events": events(spark, *rows)}, Settings(), Span(DAY, DAY))
    expected = spark.createDataFrame([(DAY, "a", 2)], example["GRANTS"].struct())
    assertDataFrameEqual(result["grants_daily"], expected)
