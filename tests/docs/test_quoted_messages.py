"""
Errors and log lines that the runbooks and other pages quote are in the code.

A quote is a literal of several words that is neither a command nor a setting. `...` stands for anything. What stands
between two of them has to be in one text of the code, in this order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.console_blocks import PROJECT
from tests.docs.test_documents import list_settings

PAGES = sorted(
    (
        *PROJECT.glob("docs/runbooks/*.md"),
        *PROJECT.glob("docs/how-to/*.md"),
        *PROJECT.glob("docs/explanation/*.md"),
        PROJECT / "docs/reference/addresses.md",
        PROJECT / "docs/reference/files.md",
        PROJECT / "docs/reference/limits.md",
        PROJECT / "docs/reference/protocols.md",
        PROJECT / "docs/tutorial.md",
    )
)
# Messages that the code puts together from several texts: each part has to be in one.
COMPOSED = {
    "node ... at ... does not respond",
    "node ... at ... rejects this node",
    "the clock of this host is ... ahead of",
    "worker ... was killed by ...",
}
# Messages of libraries.
FOREIGN = {"file is not a database"}
_PROGRAMS = (
    r"(?:\.venv|env)/bin/\S+|apt-get|curl|dpkg-reconfigure|iostat|journalctl|keys|kill|log-keys|make"
    r"|mediatord(?:-analytics)?|openssl|promtool|queue|ssh|systemctl|twistd"
)
# A placeholder of a message on a page: dots, or a word such as FILE or N.
_PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]+\b(?=[:,\s]|$)")


@cache
def code_texts() -> tuple[str, ...]:
    """The texts of the daemon and the analysis, with a null character in place of each value."""
    found = set()
    for path in (*PROJECT.glob("mediatord/**/*.py"), *PROJECT.glob("analytics/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = render(node)
            if text is not None and " " in text:
                found.add(re.sub(r"\{[^{}]*\}", "\0", " ".join(text.split())))
    return tuple(found)


def render(node: ast.AST) -> str | None:
    """The text of an expression; None if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = render(node.left), render(node.right)
        return None if left is None and right is None else (left or "\0") + (right or "\0")
    return None


def quotes(page: str) -> Iterator[str]:
    """The messages that a page quotes."""
    page = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    names = {name.partition(".")[0] for name in list_settings()}
    for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", page):
        literal = " ".join(found[1].split())
        name, colon, value = literal.partition(": ")
        is_setting = colon and re.fullmatch(r"[a-z_.]+", name) and name.partition(".")[0] in names
        if " " not in literal or re.match(rf"(?:{_PROGRAMS}) ", literal) or (is_setting and " " not in value):
            continue
        if re.search(r"[a-z]{2,} [a-z]{2,}|\.\.\.", literal) and not re.search(r"[{}\[\]=;(]", literal):
            yield literal


def parts(quote: str) -> list[str]:
    """The words between placeholders."""
    return [part for piece in _PLACEHOLDER.split(quote) if (part := piece.strip(" :;,.()"))]


def is_in_code(quote: str) -> bool:
    """Whether a text of the code has all parts of a message, in their order."""
    if quote in FOREIGN:
        return True
    if quote in COMPOSED:
        return all(any(part in text for text in code_texts()) for part in parts(quote))
    pattern = re.compile(".*".join(map(re.escape, parts(quote))))
    return any(pattern.search(text) for text in code_texts())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(PROJECT).as_posix())
def test_messages_are_in_the_code(page: Path) -> None:
    """A page quotes what the program prints now."""
    assert [quote for quote in quotes(page.read_text("utf-8")) if not is_in_code(quote)] == []


def test_messages_are_recognized() -> None:
    """The pages quote many; each that is composed or foreign stands on one of them."""
    found = {quote for page in PAGES for quote in quotes(page.read_text("utf-8"))}
    assert len(found) > 50
    assert COMPOSED | FOREIGN <= found


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        ("cannot listen on ...", True),
        ("cannot listen at ...", False),
        ("N operations failed, last: ...", True),
        ("node ... at ... is elsewhere", False),
    ],
)
def test_quotes_are_compared(quote: str, expected: bool) -> None:
    """With the text of the code, values left open."""
    assert is_in_code(quote) == expected
