"""Decode attention over stored rows."""
