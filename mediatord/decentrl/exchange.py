"""What passes between the transports and the use cases of the Decentrl half."""

from __future__ import annotations

from dataclasses import dataclass, field

from mediatord.errors import MediatorError


@dataclass(frozen=True, slots=True)
class Reply:
    """
    What goes back for a command or a query of a public channel.

    :param body: JSON.
    :param retry_after: seconds.
    :param fault: why it was refused, if it was.
    """

    status: int
    body: bytes = field(repr=False)
    retry_after: int | None = None
    fault: MediatorError | None = None
