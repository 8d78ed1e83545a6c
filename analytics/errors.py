"""How a run ends: exit statuses, and the error that carries one."""

from __future__ import annotations

FINE = 0
FAILED = 1
WRONG_USAGE = 2
NO_INPUT = 3
BROKEN = 4


class AnalyticsError(Exception):
    """
    A run that cannot go on, told in a sentence for the operator.

    :param exit_status: that the process ends with; one of those above.
    """

    def __init__(self, message: str, exit_status: int = FAILED) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def reason(error: BaseException) -> str:
    """
    The innermost cause that an error names, in one line: those of Java come with their whole stack.

    To be asked while Java is there, since it has the text.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.partition("Caused by: ")[2] for line in lines if line.startswith("Caused by: ")]
    # The first line of py4j says what was called in its own terms; Java's begins with a colon.
    own = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return (causes[-1:] or own or lines or [type(error).__name__])[0]
