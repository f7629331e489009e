"""Branches: functions on the stream."""
