"""
The console script `mediatord` (contract section 2).

Exit status: 0 done, 1 failed, 2 wrong usage or a configuration that cannot be used. Every error is one line on
standard error.
"""

from mediatord.cli.commands import main

__all__ = ["main"]
