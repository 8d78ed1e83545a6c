"""docs/how-to/read-a-nightly-report.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.testing import assertDataFrameEqual

from analytics.job import Span
from analytics.reference import renewed
from analytics.settings import Settings
from tests.analytics.frames import DAY, event, events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCUMENT = (Path(__file__).parents[2] / "docs/how-to/read-a-nightly-report.md").read_text("utf-8")


def test_tables_kinds_and_figures() -> None:
    """They are up to date; `python -m analytics.reference PAGE` writes them."""
    assert renewed(DOCUMENT) == DOCUMENT


def test_the_example_of_a_job(spark: SparkSession) -> None:
    """It is twenty lines, and it works."""
    found = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found and len([line for line in found[1].splitlines() if line.strip()]) <= 20
    example: dict[str, Any] = {}
    exec(found[1], example)  # the document is ours
    rows = [event("acct.deny", did="z"), *(event("acct.grant", did=did) for did in "xxy")]
    made = example["JOB"].transform({"events": events(spark, *rows)}, Settings(), Span(DAY, DAY))
    expected = spark.createDataFrame([(DAY, "a", 2)], example["GRANTS"].struct())
    assertDataFrameEqual(made["grants_daily"], expected)
