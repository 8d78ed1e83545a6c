"""
`make deb`: builds the Debian package mediatord_<version>_<arch>.deb, with its own environment in /opt/mediatord.

Of Debian's programs the build needs only dpkg-deb and python3.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from deb.environment import list_distributions, make_environment
from deb.tree import ROOT, build_wheel, source_date

HERE = Path(__file__).parent
PYTHON = os.environ.get("DEB_PYTHON", "/usr/bin/python3")
MAINTAINER = os.environ.get("DEBEMAIL", "mediatord <root@localhost>")
_SHARED = ("etc/prometheus", "etc/grafana", "etc/nginx", "etc/spark")
_LINKS = {
    "usr/bin/mediatord": "/opt/mediatord/bin/mediatord",
    "usr/bin/mediatord-analytics": "/opt/mediatord/bin/mediatord-analytics",
}
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions",
    "zsh": "usr/share/zsh/vendor-completions",
    "fish": "usr/share/fish/vendor_completions.d",
}


def main(out: Path) -> None:
    """:param out: directory for wheel and package."""
    with tempfile.TemporaryDirectory(prefix="m-") as scratch:
        root = Path(scratch) / "r"
        # nosemgrep: open-to-others  the root of a package has this mode
        root.mkdir(mode=0o755)
        wheel = build_wheel(Path(scratch), out)
        python = make_environment(root, PYTHON, wheel)
        _install_files(root)
        _install_documentation(root)
        package = out / f"mediatord_{_version()}_{_architecture()}.deb"
        _write_control_files(root, python)
        _normalize_modes_and_times(root)
        _build_package(root, package)
    sys.stdout.write(f"{package}\n")


def _version() -> str:
    found = ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    return found["metadata"]["version"]


def _architecture() -> str:
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def _install(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _write(target: Path, text: str | bytes, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode() if isinstance(text, str) else text)
    target.chmod(mode)


def _install_files(root: Path) -> None:
    """Install all files but the environment and generated ones."""
    for unit in sorted((ROOT / "systemd").glob("mediatord*")):
        _install(unit, root / "lib/systemd/system" / unit.name)
    _install(ROOT / "etc/analytics.yaml", root / "etc/mediatord/analytics.yaml")
    _install(HERE / "analytics-setup", root / "usr/sbin/mediatord-analytics-setup", 0o755)
    _install(HERE / "lintian-overrides", root / "usr/share/lintian/overrides/mediatord")
    for place in _SHARED:
        for file in sorted((ROOT / place).rglob("*.*")):
            _install(file, root / "usr/share/mediatord" / file.relative_to(ROOT / "etc"))
    for shell, place in _COMPLETIONS.items():
        for file in sorted((ROOT / "etc/completion" / shell).iterdir()):
            _install(file, root / place / file.name)
    _install(ROOT / "etc/mediator.yaml", root / "usr/share/doc/mediatord/examples/mediator.yaml")
    for name, leads_to in _LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(leads_to)


def _install_documentation(root: Path) -> None:
    docs = root / "usr/share/doc/mediatord"
    _install(HERE / "copyright", docs / "copyright")
    rows = "".join("{}=={}  # {}\n".format(*row) for row in list_distributions(root))
    # mediatord-analytics-setup reads it; files in /usr/share/doc may be missing on a system.
    _write(root / "usr/share/mediatord/bundled.txt", rows)
    (docs / "bundled.txt").symlink_to("../../mediatord/bundled.txt")
    _write(docs / "changelog.gz", _compress(_changelog()))
    _write(docs / "NEWS.gz", _compress((ROOT / "CHANGELOG.rst").read_text("utf-8")))
    with tempfile.TemporaryDirectory() as scratch:
        _run_module(root, "mediatord.cli.man", scratch)
        for page in sorted(Path(scratch).glob("*.[1-8]")):
            section = root / f"usr/share/man/man{page.suffix[1:]}"
            _write(section / f"{page.name}.gz", _compress(page.read_text("utf-8")))
    _write(
        root / "usr/share/man/man8/mediatord-analytics-setup.8.gz",
        _compress((HERE / "analytics-setup.8").read_text()),
    )


def _run_module(root: Path, *arguments: str) -> str:
    """Run a module in the environment, and return its output."""
    command = [str(root / "opt/mediatord/bin/python"), "-I", "-m", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _changelog() -> str:
    when = format_datetime(datetime.fromtimestamp(source_date(), UTC))
    return (
        f"mediatord ({_version()}) stable; urgency=medium\n\n"
        f"  * This release; see NEWS.gz.\n\n -- {MAINTAINER}  {when}\n"
    )


def _compress(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)


def _list_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and "DEBIAN" not in path.relative_to(root).parts:
            yield path


def _md5(path: Path) -> str:
    """Checksum for dpkg, against accidental changes only."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _write_control_files(root: Path, python: tuple[int, int]) -> None:
    """:param python: the version that compiled modules and the path of the environment require."""
    sizes = (-(-path.lstat().st_size // 1024) if path.is_file() else 1 for path in root.rglob("*"))
    sums = [f"{_md5(path)}  {path.relative_to(root)}\n" for path in _list_files(root)]
    major, minor = python
    fields = {
        "version": _version(),
        "architecture": _architecture(),
        "size": str(sum(sizes)),
        "maintainer": MAINTAINER,
        "python": f"python3 (>= {major}.{minor}), python3 (<< {major}.{minor + 1})",
    }
    place = root / "DEBIAN"
    _write(place / "control", (HERE / "control.in").read_text("utf-8").format_map(fields))
    _write(place / "md5sums", "".join(sums))
    _write(place / "conffiles", "/etc/mediatord/analytics.yaml\n")
    for script in ("postinst", "prerm", "postrm"):
        _install(HERE / script, place / script, 0o755)


def _normalize_modes_and_times(root: Path) -> None:
    """Make modes independent of the umask, and times independent of the time of the build."""
    for path in (root, *root.rglob("*")):
        if path.is_symlink():
            continue
        executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
        path.chmod(0o755 if executable else 0o644)
        if "opt" not in path.relative_to(root).parts:
            os.utime(path, (source_date(),) * 2)


def _build_package(root: Path, package: Path) -> None:
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(source_date())}
    # With several threads, the bytes would depend on their number.
    form = ("--root-owner-group", "-Zxz", "--threads-max=1")
    subprocess.run(["dpkg-deb", *form, "--build", root, package], env=environ, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
