"""Tests of export, import, backup and restore."""
