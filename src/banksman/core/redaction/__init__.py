"""Removal of configured secrets from log entries, texts and streams."""
