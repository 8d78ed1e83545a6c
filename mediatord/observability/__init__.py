"""The event log: what is declared, how it is written, and the files it is in (contract section 6)."""
