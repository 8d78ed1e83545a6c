"""Faults without number, chosen by a seed, and books that are closed after each."""
