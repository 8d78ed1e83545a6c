"""
What the daemon sends to itself, to see whether it is well: by what such requests are known, and who counts as their
client. They are charged to nobody, and stand in no counter and no event.
"""

from __future__ import annotations

# Holds a secret of this daemon's processes, in lower case as HTTP heads are read.
HEADER = "x-mediatord-readiness"
# In the place of an address, and never one.
ITSELF = "itself"
