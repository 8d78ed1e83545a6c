"""The Decentrl half: what happens with a command (DCTRL-0004)."""
