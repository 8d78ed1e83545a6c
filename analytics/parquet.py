"""Writing Parquet to where nobody looks yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Columns of which hardly two rows are alike: to look for those that are costs a tenth of all writing.
_UNLIKE = ("conn", "crypto_ms", "dur_ms", "latency_ms", "msg", "req", "seq", "ts")
_OPTIONS = {
    "compression": "zstd",
    **{f"parquet.enable.dictionary#{name}": "false" for name in _UNLIKE},
    # Nobody else looks at a staging directory: rows may be written to where they stay.
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


def append(frame: DataFrame, path: str, *partitions: str) -> None:
    """Add the rows to a staged table at `path`, in a directory for each value of the columns `partitions`."""
    frame.write.mode("append").options(**_OPTIONS).partitionBy(*partitions).parquet(path)
