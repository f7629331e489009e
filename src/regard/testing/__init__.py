"""Test whether a part of a Transformer obeys the laws that every part must obey, such as causality.

The part can be one of the package or one of your own.

The tests are run by `check(MyNorm())` or by `regard check module:MyNorm`.
"""

from regard.testing.laws import LAWS, Law, LawBroken, NotApplicable
from regard.testing.run import Report, Verdict, check, examine, subject_of
from regard.testing.tiny import around

__all__ = ["LAWS", "Law", "LawBroken", "NotApplicable", "Report", "Verdict", "around", "check", "examine", "subject_of"]
