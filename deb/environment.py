"""The virtual environment of the Debian package: built elsewhere, with the paths that it has in /opt/mediatord."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

from deb.tree import source_date

PREFIX = Path("/opt/mediatord")
# Programs that stay in the environment; twistd, twist and the analysis need no others.
_KEPT = {"mediatord", "mediatord-analytics", "twist", "twistd", "python", "python3"}


def make_environment(root: Path, python: str, wheel: Path) -> tuple[int, int]:
    """
    Install the wheel and the MongoDB driver below `root`. Return the version of Python that they require.

    :param root: the root directory of the package. Its path must be short, because first lines of scripts contain it.
    :param python: path of the interpreter on the target system.
    """
    target = root / PREFIX.relative_to("/")
    _run(python, "-m", "venv", "--without-pip", "--symlinks", str(target))
    # pip is for mediatord-analytics-setup.
    install = ("install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-warn-script-location")
    _run(sys.executable, "-m", "pip", "--python", str(target / "bin/python"), *install, f"{wheel}[mongodb]", "pip")
    version = _version(target)
    _delete_unneeded_files(target, version)
    _replace_build_path(target, root)
    _update_records(target, version)
    _compile(target, root)
    _fill_plugin_cache(target, version)
    return version


def list_distributions(root: Path) -> list[tuple[str, str, str]]:
    """Name, version and licence of all distributions in the environment, by name."""
    program = (
        "import importlib.metadata as m\n"
        "for d in m.distributions():\n"
        "    i = d.metadata\n"
        "    c = [x.split(' :: ')[-1] for x in i.get_all('Classifier') or () if x.startswith('License ::')]\n"
        "    l = i.get('License-Expression') or ', '.join(c) or i.get('License') or 'see its files'\n"
        "    print(i['Name'], i['Version'], l.split('\\n')[0], sep='\\t')\n"
    )
    target = root / PREFIX.relative_to("/")
    result = subprocess.run([target / "bin/python", "-I", "-c", program], capture_output=True, text=True, check=True)
    rows = (tuple(line.split("\t")) for line in result.stdout.splitlines())
    return sorted(((a, b, c) for a, b, c in rows), key=lambda row: row[0].lower())


def _run(*command: str) -> None:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    subprocess.run(command, env=environ, check=True)


def _version(target: Path) -> tuple[int, int]:
    program = "import sys; print(*sys.version_info[:2])"
    result = subprocess.run([target / "bin/python", "-c", program], capture_output=True, text=True, check=True)
    major, minor = map(int, result.stdout.split())
    return major, minor


def _site_packages(target: Path, version: tuple[int, int]) -> Path:
    return target / "lib/python{}.{}/site-packages".format(*version)


def _delete_unneeded_files(target: Path, version: tuple[int, int]) -> None:
    """Delete files that the package does not need, or that contain the path of the build."""
    kept = {*_KEPT, "python{}.{}".format(*version)}
    for script in (target / "bin").iterdir():
        if script.name not in kept:
            script.unlink()
    for place in (target / "include", target / "share"):
        shutil.rmtree(place, ignore_errors=True)
    for own in _site_packages(target, version).glob("mediatord-*.dist-info"):
        (own / "direct_url.json").unlink(missing_ok=True)


def _update_records(target: Path, version: tuple[int, int]) -> None:
    """Update the RECORD files of pip after files were deleted and first lines of scripts changed."""
    for record in _site_packages(target, version).glob("*.dist-info/RECORD"):
        lines = (_update_record_line(record.parents[1], line) for line in record.read_text("utf-8").splitlines())
        record.write_text("".join(f"{line}\n" for line in lines if line), "utf-8")


def _update_record_line(place: Path, line: str) -> str | None:
    name, _, rest = line.partition(",")
    path = place / name.strip('"')
    if not path.exists():
        return None
    if "/bin/" not in name or not rest.strip(","):
        return line
    content = path.read_bytes()
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def _replace_build_path(target: Path, root: Path) -> None:
    for path in _list_text_files(target):
        text = path.read_text("utf-8")
        path.write_text(text.replace(str(root), ""), "utf-8")


def _list_text_files(target: Path) -> Iterator[Path]:
    yield target / "pyvenv.cfg"
    for script in sorted((target / "bin").iterdir()):
        if not script.is_symlink():
            yield script


def _compile(target: Path, root: Path) -> None:
    """Compile all modules. Hashes are unchecked, because packages do not keep fractions of seconds."""
    modes = ("--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/")
    _run(str(target / "bin/python"), "-m", "compileall", "-q", "-j1", *modes, str(target / "lib"))


def _fill_plugin_cache(target: Path, version: tuple[int, int]) -> None:
    """Write the plugin cache, which `twist` may not write; it has to be newer than its sources."""
    program = "from twisted.plugin import IPlugin, getPlugins; list(getPlugins(IPlugin))"
    _run(str(target / "bin/python"), "-I", "-c", program)
    cache = _site_packages(target, version) / "twisted/plugins/dropin.cache"
    # nosemgrep: open-to-others  a file of a package, readable by all users
    cache.chmod(0o644)
    for path in (target, *target.rglob("*")):
        os.utime(path, (source_date() - 10,) * 2, follow_symlinks=False)
    os.utime(cache, (source_date(),) * 2)
