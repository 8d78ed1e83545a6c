"""Why something cannot be exported, imported, backed up or restored."""

from __future__ import annotations

_LONGEST = 40


class TransferError(Exception):
    """The text is one line for the operator."""


class ArchiveRefused(TransferError):
    """An archive is torn, altered or not one of ours; nothing of it was used."""


def shown(value: object) -> str:
    """Something that an archive says, short enough for a line."""
    text = str(value) if isinstance(value, int | str) else "of another kind"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
