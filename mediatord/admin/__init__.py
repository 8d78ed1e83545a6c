"""The status page for operators, on a listener of its own."""
