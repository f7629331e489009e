"""Metrics of model outputs, and significance tests of their differences."""
