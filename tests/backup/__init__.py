"""Exports, imports, backups."""
