"""
Install pinned packages of Java into a directory: `python -m tests.analytics.stores.install LIST DIRECTORY`.

Ivy, which is part of Spark, fetches them. IVY_SETTINGS names a file of its settings, for machines that reach another
repository than Ivy's default.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from analytics.java import find_java

_MODULE = """\
<ivy-module version="2.0">
 <info organisation="mediatord" module="tests"/>
 <dependencies>
{dependencies}
 </dependencies>
</ivy-module>
"""
_DEPENDENCY = '  <dependency org="{one.group}" name="{one.name}" rev="{one.version}" transitive="false"/>'


@dataclass(frozen=True, slots=True)
class Package:
    """:param digest: SHA-256 of its file, in hexadecimal."""

    group: str
    name: str
    version: str
    digest: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.jar"


def read_packages(path: Path) -> Iterator[Package]:
    """Packages of a list: a line each, with comments."""
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            yield Package(*line.split())


def install_packages(packages: list[Package], directory: Path) -> None:
    """
    Fetch packages and check them.

    :param directory: created, and replaced if it exists.
    :raise SystemExit: they cannot be fetched, or differ from what the list says.
    """
    with tempfile.TemporaryDirectory() as scratch:
        module, fetched = Path(scratch, "ivy.xml"), Path(scratch, "jars")
        module.write_text(_MODULE.format(dependencies="\n".join(_DEPENDENCY.format(one=one) for one in packages)))
        _run_ivy(module, fetched)
        for one in packages:
            if hashlib.sha256((fetched / one.file_name).read_bytes()).hexdigest() != one.digest:
                sys.exit(f"{one.file_name}: differs from the one that was tested")
        shutil.rmtree(directory, ignore_errors=True)
        shutil.move(fetched, directory)


def _run_ivy(module: Path, target: Path) -> None:
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    settings: list[str | Path] = ["-settings", os.environ["IVY_SETTINGS"]] if "IVY_SETTINGS" in os.environ else []
    command = [find_java().home / "bin/java", "-cp", f"{jars}/*", "org.apache.ivy.Main", *settings]
    command += ["-ivy", module, "-cache", module.parent / "cache", "-types", "jar"]
    completed = subprocess.run(
        [*command, "-retrieve", f"{target}/[artifact]-[revision].[ext]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if completed.returncode:
        sys.exit("\n".join(completed.stdout.splitlines()[-20:]))


if __name__ == "__main__":
    install_packages(list(read_packages(Path(sys.argv[1]))), Path(sys.argv[2]))
