"""
Prints size and shape of the project: modules of `mediatord/`, lines of code, loose modules, repeated class names,
cycles, modules of `analytics/` and `tests/`, and words of the documents.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The load generator and the wallet library are programs of their own beside the daemon.
PROGRAMS = {"bench", "wallet"}
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Module:
    """
    A source file.

    :param name: dotted; a package under its own name.
    :param lines: lines of code, without blank lines, comments and docstrings.
    :param imports: dotted names imported at load time; `from a import b` is `a.b`.
    """

    path: Path
    name: str
    lines: int
    classes: tuple[str, ...]
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """The package directly below `mediatord`; empty for a loose module."""
        inner = self.path.relative_to(ROOT / "mediatord").parts
        return inner[0] if len(inner) > 1 else ""


def read_modules() -> list[Module]:
    """All modules of `mediatord/`, sorted by path."""
    return [_read(path) for path in sorted((ROOT / "mediatord").rglob("*.py"))]


def package_cycles(modules: list[Module]) -> list[tuple[str, ...]]:
    """Groups of packages that import each other at load time, directly or through others."""
    known = {module.package for module in modules if module.package}
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for imported in module.imports:
            parts = imported.split(".")
            if parts[0] == "mediatord" and len(parts) > 1 and parts[1] in known and module.package:
                graph[module.package].add(parts[1])
    reachable = {package: _reach(graph, package) for package in known}
    groups = {
        tuple(sorted(other for other in known if other in reachable[package] and package in reachable[other]))
        for package in known
        if package in reachable[package] - {package}
        or any(package in reachable[o] for o in reachable[package] - {package})
    }
    return sorted(group for group in groups if len(group) > 1)


def repeated_class_names(modules: list[Module]) -> dict[str, int]:
    """Class names that occur more than once in the daemon."""
    counted = Counter(name for module in modules if module.package not in PROGRAMS for name in module.classes)
    return {name: count for name, count in sorted(counted.items()) if count > 1}


def list_documents() -> list[Path]:
    """The documents: README, CONTRIBUTING, SECURITY and the pages in `docs/`, sorted."""
    pages = [page for suffix in ("md", "rst") for page in (ROOT / "docs").rglob(f"*.{suffix}")]
    return sorted([ROOT / "README.rst", ROOT / "CONTRIBUTING.rst", ROOT / "SECURITY.md", *pages])


def count_words(path: Path) -> int:
    """Words of a document as `wc -w` counts them, symbols of tables and lists included."""
    return len(path.read_text(encoding="utf-8").split())


def list_analytics_modules() -> list[Path]:
    """Modules of `analytics/`, without empty files that only mark a package."""
    return [path for path in sorted((ROOT / "analytics").rglob("*.py")) if path.stat().st_size]


def count_words_by_kind() -> dict[str, int]:
    """Words by kind of document: a directory of `docs/`, `tutorial`, or `top level`."""
    words: Counter[str] = Counter()
    for path in list_documents():
        parts = path.relative_to(ROOT / "docs").parts if path.is_relative_to(ROOT / "docs") else ()
        kind = parts[0] if len(parts) > 1 else "tutorial" if path.stem == "tutorial" else "top level"
        words[kind] += count_words(path)
    return dict(sorted(words.items()))


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        package = waiting.pop()
        if package not in found:
            found.add(package)
            waiting.extend(graph[package])
    return found


def _read(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return Module(
        path=path,
        name=name,
        lines=len(_code_lines(source) - _docstring_lines(tree)),
        classes=tuple(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        imports=frozenset(_load_time_imports(tree.body)),
    )


def _code_lines(source: str) -> set[int]:
    return {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def _load_time_imports(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", node)):
            yield from _load_time_imports(node.body)


def main() -> int:
    """Print the figures, one a line."""
    modules = read_modules()
    sizes = [module.lines for module in modules if module.lines > 1]
    loose = [module.path.stem for module in modules if not module.package]
    repeated = repeated_class_names(modules)
    print(f"modules                 {len(modules)}")
    print(f"median lines a module   {statistics.median(sizes):.0f}")
    print(f"modules under 50 lines  {sum(size < 50 for size in sizes)}")
    print(f"lines of code           {sum(module.lines for module in modules)}")
    print(f"classes                 {sum(len(module.classes) for module in modules)}")
    print(f"loose modules           {len(loose)}: {' '.join(loose)}")
    print(f"repeated class names    {len(repeated)}: {' '.join(f'{n} x{c}' for n, c in repeated.items())}")
    cycles = package_cycles(modules)
    print(f"package cycles          {len(cycles)}: {'; '.join(' '.join(cycle) for cycle in cycles)}")
    print(f"modules of analytics    {len(list_analytics_modules())}")
    tests = sorted((ROOT / "tests").rglob("*.py"))
    print(f"modules of tests        {len(tests)}, with tests {sum(path.name.startswith('test_') for path in tests)}")
    words = count_words_by_kind()
    kinds = ", ".join(f"{kind} {count}" for kind, count in words.items())
    print(f"words of documents      {sum(words.values())}: {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
