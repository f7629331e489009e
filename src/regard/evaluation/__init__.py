"""Metrics of model outputs, and tests of whether one output is better than another."""
