"""
The console blocks of the guides: commands after `$ `, with the output that the page shows.

A command that ends with a backslash or a pipe goes on in the next line. In output, `...` stands for any text, and as
a line of its own for any lines; one space stands for several, as columns are as wide as their content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
# Two terminals: its blocks are run by tests/packaging/test_quickstart.py.
TUTORIAL = PROJECT / "docs/tutorial.md"
TERMINALS = ("first terminal", "second terminal")
# Pages whose blocks are run.
GUIDES = (
    *sorted(path for path in PROJECT.glob("docs/**/*.md") if path != TUTORIAL),
    PROJECT / "CONTRIBUTING.rst",
    PROJECT / "README.rst",
    PROJECT / "SECURITY.md",
)

# A fenced block with the comment above it; in reStructuredText a directive with an indented body.
_FENCED = re.compile(r"(?:^ *<!-- ([^\n]*) -->\n)?^( *)```([\w{}-]*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"(?:^\.\. (not run: .*)\n\n?)?^()\.\. code-block:: ([\w-]+)\n((?:\n|^ .*\n)+)", re.MULTILINE)
_NOT_RUN = "not run: "


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and the lines that the page shows of its output."""

    command: str
    shown: tuple[str, ...]

    @property
    def is_background(self) -> bool:
        """Whether it keeps running while the next ones are typed."""
        return self.command.endswith(" &")

    def missing_line(self, output: str) -> str | None:
        """The first line shown that does not follow in the output; None if all are there, in this order."""
        rest = iter(" ".join(line.split()) for line in output.splitlines())
        for line in self.shown:
            if line.strip() in ("", "..."):
                continue
            pattern = ".*".join(map(re.escape, " ".join(line.split()).split("...")))
            if not any(re.fullmatch(pattern, found) for found in rest):
                return line
        return None


@dataclass(frozen=True, slots=True)
class Block:
    """
    A fenced block.

    :param comment: the text of the comment above it.
    :param line: its number in the page.
    """

    language: str
    body: str
    comment: str
    line: int

    @property
    def why_not_run(self) -> str | None:
        """The reason that the page gives; None if it is to be run."""
        return self.comment.removeprefix(_NOT_RUN) if self.comment.startswith(_NOT_RUN.strip()) else None

    def steps(self) -> list[Step]:
        """
        Its commands.

        :raise ValueError: it begins with something else.
        """
        found: list[tuple[str, list[str]]] = []
        lines = iter(self.body.splitlines())
        for line in lines:
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
                while command.endswith(("\\", "|")):
                    command += "\n" + next(lines)
                found.append((command, []))
            elif found:
                found[-1][1].append(line)
            elif line.strip():
                raise ValueError(f"line {self.line}: expected a command after '$ ' before output: {line!r}")
        return [Step(command, tuple(shown)) for command, shown in found]


def read_blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = page.read_text("utf-8")
    for found in (_FENCED if page.suffix == ".md" else _DIRECTIVE).finditer(text):
        comment, indent, language, body = found.groups()
        if page.suffix != ".md":
            indent = "    "
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        yield Block(language, body, comment or "", text.count("\n", 0, found.start(3)) + 1)


def read_steps(page: Path, comment: str | None = None) -> list[Step]:
    """
    The commands of a page that are run, in order.

    :param comment: only those of console blocks below this comment.
    """
    blocks = (block for block in read_blocks(page) if block.language == "console" and block.why_not_run is None)
    chosen: Sequence[Block] = [block for block in blocks if comment is None or block.comment == comment]
    return [step for block in chosen for step in block.steps()]
