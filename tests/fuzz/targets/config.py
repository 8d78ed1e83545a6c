"""Configuration files as bytes, and environment variables."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mediatord.config.file import ConfigError, examine_config, load_config, render_config
from mediatord.config.settings import Config

# Parsing YAML is slow.
_PART = 1_000


class ConfigTarget:
    """Modes: `y` YAML, `e` lines of `NAME=value` that override an empty file."""

    words = (
        *(
            b"&a ",
            b"*a",
            b"<<: ",
            b"!!python/object:os.system",
            b"!!binary ",
            b"? ",
            b"---\n",
            b"\n  - ",
            b": ",
            b"!!int ",
        ),
        *(
            b"listen:",
            b"storage:",
            b"limits:",
            b"decentrl:",
            b"72h",
            b"tcp:8080",
            b"10.0.0.0/8",
            b"did:web:a",
            b"%YAML 9",
        ),
    )
    longest = 2_048
    # YAML is parsed in Python, with a few calls per character.
    most_calls = (60_000, 400)
    most_memory = (4_000_000, 3_000)

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp())
        self._path = self._directory / "mediator.yaml"

    def close(self) -> None:
        """Delete the file."""
        shutil.rmtree(self._directory)

    def run(self, data: bytes) -> None:
        """Both readers return the same configuration, or the same error positions."""
        way, rest = data[:1], data[1:]
        environ: dict[str, str] = {}
        if way == b"e":
            lines = (line.partition(b"=") for line in rest.split(b"\n"))
            environ = {"MEDIATORD_" + _text(name): _text(value) for name, _, value in lines}
            rest = b""
        self._path.write_bytes(rest)
        config: Config | None = None
        problems: list[str] = []
        try:
            config = load_config(self._path, environ)
        except ConfigError as error:
            problems = error.problems
            assert problems
        assert all("\n" not in line and line for line in problems), problems
        assert all(line.startswith((f"{self._path}:", "environment")) for line in problems), problems
        found: Any = None
        with contextlib.suppress(ConfigError):
            found = examine_config(self._path, environ)
        assert found is None or found.lines() == problems
        assert config is None or (found is not None and found.config == config)

    def seeds(self) -> Iterable[bytes]:
        """Parts of the template, and YAML of every kind."""
        text = render_config().encode()
        for start in range(0, len(text), _PART):
            yield b"y" + text[start : start + _PART]
        yield from (b"y", b"ylisten: [tcp:8080]\n", b"ylimits: {ip_per_minute: 1, ip_per_minute: 2}\n")
        yield b"ystorage:\n  backend: memory\nlimits: &a\n  max_message_bytes: 1000\ndecentrl: *a\n"
        yield from (b"y- a\n", b"yfoo: !!binary AA\nbar: !!timestamp 2001-01-01\n", b"y\xff\xfe", b"ya: &a [*a]\n")
        yield b"eLISTEN=tcp:8080\nLIMITS__IP_PER_MINUTE=ten\nSTORAGE__BACKEND=memory"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def make() -> ConfigTarget:
    """Create the target."""
    return ConfigTarget()
