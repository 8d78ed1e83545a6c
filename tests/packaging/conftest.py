"""Fixtures of the packaging tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deb.tree import build_wheel


@pytest.fixture(scope="session")
def wheel() -> Iterator[Path]:
    """The wheel, built from a clean copy of this tree by way of the sdist, which is beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        yield build_wheel(Path(scratch), Path(scratch) / "out")
