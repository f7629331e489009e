"""The doctor: examine training text before training, and training runs during and after it."""

from regard.doctor.examine import examine_run, examine_text
from regard.doctor.finding import Finding, Report

__all__ = ["Finding", "Report", "examine_run", "examine_text"]
