"""Whole requests: several continuations, drafts, snapshots, files."""
