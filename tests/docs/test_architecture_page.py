"""docs/explanation/architecture.md and CONTRIBUTING.rst: the packages, modules and classes that they name exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_documents import PROJECT, find_literals, read_document, read_table_rows
from tests.docs.test_glossary import class_names

PAGES = ("docs/explanation/architecture.md", "CONTRIBUTING.rst")


@pytest.mark.parametrize("page", PAGES)
def test_modules_exist(page: str) -> None:
    """Paths of modules and packages are those of the repository, or of the daemon's package."""
    named = {
        word for word in find_literals(read_document(page)) if re.fullmatch(r"[a-z_]+(?:/[a-z_]+)*(?:/|\.py)", word)
    }
    assert len(named) > 10
    roots = (PROJECT, PROJECT / "mediatord", *(path.parent for path in PROJECT.glob("mediatord/*/__init__.py")))
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize("page", PAGES)
def test_classes_exist(page: str) -> None:
    """Words that can only be names of classes name some."""
    named = {
        word for word in find_literals(read_document(page)) if re.fullmatch(r"I?[A-Z][a-z]+(?:[A-Z][a-z]+)+", word)
    }
    assert named - class_names(PROJECT / "mediatord") == set()


def test_every_package_has_a_row() -> None:
    """The table has each package and each loose module once."""
    table = read_table_rows(read_document("docs/explanation/architecture.md"), "## Packages", "`wallet/` talks")
    named = [name for row in table for name in re.findall(r"`(\w+(?:/|\.py))`", row[0])]
    packages = [f"{path.parent.name}/" for path in PROJECT.glob("mediatord/*/__init__.py")]
    modules = [path.name for path in PROJECT.glob("mediatord/*.py") if not path.name.startswith("__")]
    assert sorted(named) == sorted(packages + modules)
