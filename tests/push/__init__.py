"""Tests of push notifications."""
