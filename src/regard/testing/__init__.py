"""Tests of the laws that every part must satisfy, including a part of yours.

Run them with `check(MyNorm())` or with `regard check module:MyNorm`.
"""

from regard.testing.laws import LAWS, Law, LawBroken, NotApplicable
from regard.testing.run import Report, Verdict, check, examine, subject_of
from regard.testing.tiny import around

__all__ = ["LAWS", "Law", "LawBroken", "NotApplicable", "Report", "Verdict", "around", "check", "examine", "subject_of"]
