"""docs/reference/glossary.md: order, form, and that the classes it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.test_documents import PROJECT, read_document

GLOSSARY = read_document("docs/reference/glossary.md")


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """The paragraphs of each section that explain a term: term, classes, meaning."""
    parts = re.split(r"^## (.+)$", GLOSSARY, flags=re.MULTILINE)[1:]
    return {
        name: [
            (found[1], found[2], found[3])
            for item in body.split("\n\n")
            if (found := re.fullmatch(r"\*\*([^*]+)\*\*((?: \(`.+?`\))?): (.+)", " ".join(item.split())))
        ]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def class_names(directory: Path) -> set[str]:
    """All classes that are defined below a directory."""
    return {
        node.name
        for path in directory.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }


def test_terms_are_in_order() -> None:
    """Alphabetical within a section, and each term once in the document."""
    terms = [[row[0].lower() for row in rows] for rows in sections().values()]
    assert [names for names in terms if names != sorted(names)] == []
    flat = [name for names in terms for name in names]
    assert len(flat) == len(set(flat)) > 80


def test_each_term_has_a_short_meaning() -> None:
    """One sentence of at most twenty words."""
    meanings = [row[2] for found in sections().values() for row in found]
    assert len(meanings) == len(re.findall(r"^\*\*", GLOSSARY, re.MULTILINE))
    assert [one for one in meanings if not re.fullmatch(r"[^.]*(?:\.\w[^.]*)*\.", one)] == []
    assert [one for one in meanings if len(one.split()) > 20] == []


def test_classes_exist() -> None:
    """A class that is named beside a term is one of the daemon or the analysis."""
    known = class_names(PROJECT / "mediatord") | class_names(PROJECT / "analytics")
    named = {name for rows in sections().values() for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[1])}
    assert len(named) > 50
    assert named - known == set()


def test_every_package_has_its_terms() -> None:
    """Each package of the daemon is named by a section, except those that are clients of it."""
    packages = {path.parent.name for path in (PROJECT / "mediatord").glob("*/__init__.py")}
    named = set(re.findall(r"`mediatord/(\w+)[/\w]*`", GLOSSARY))
    assert packages - named == {"wallet"}
