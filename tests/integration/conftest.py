"""Ids for what pytest-xdist would take for one and the same test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """
    Schemathesis gives all operations of a test one id, and of tests with the same id only one would be run.

    :raise UsageError: there still are such tests.
    """
    for item in items:
        _, mark, operation = item.name.partition("[")
        if mark and not item.nodeid.endswith("]"):
            item._id = replace(item._id, params=operation.removesuffix("]"))
    ids = [item.nodeid for item in items]
    if len(set(ids)) < len(ids):
        raise pytest.UsageError("several tests have the same id")
