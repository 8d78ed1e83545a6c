"""The Decentrl use cases: authenticate and carry out commands (DCTRL-0004)."""
