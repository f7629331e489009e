"""Test a part against the laws, and report the results."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Literal

from regard.catalogue import PARTS
from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.testing.laws import LAWS, LawBroken, NotApplicable, Subject
from regard.testing.tiny import around, positioned
from regard.tree import Spec, walk


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of testing one law on one model."""

    model: str
    law: str
    outcome: Literal["kept", "broken", "bent", "not applicable", "refused"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The verdicts of all tested laws on a part."""

    part: str
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts with the outcome "broken"."""
        return tuple(verdict for verdict in self.verdicts if verdict.outcome == "broken")


def subject_of(spec: ModelSpec) -> Subject:
    """Return a `Subject` to test a model. Raise SpecError if another part of the same `kind` is built in."""
    extra = {type(part).kind: type(part) for part in walk(spec)}
    clash = [kind for kind, part in extra.items() if PARTS.get(kind, part) is not part]
    if clash:
        raise SpecError("kind", f"{clash[0]!r} is the kind of a part of regard; choose another kind")
    return Subject(spec, extra)


def examine(
    name: str, spec: ModelSpec | Subject, laws: Iterable[str] = tuple(LAWS), bends: Mapping[str, str] | None = None
) -> list[Verdict]:
    """Test laws on one model and return the verdicts. `bends` are the laws it is allowed to break: law -> reason."""
    bends, laws = bends or {}, tuple(laws)
    for law in laws:
        if law not in LAWS:
            raise SpecError("law", f"unknown law {law!r}; {nearest(law, LAWS)}")
    subject = spec if isinstance(spec, Subject) else subject_of(spec)
    try:
        subject.model()
    except SpecError as refusal:
        return [Verdict(name, law, "refused", str(refusal)) for law in laws]
    except Exception:  # every law raises the error again, and the verdict reports it
        pass
    verdicts = []
    for law in laws:
        try:
            LAWS[law].hold(subject)
        except NotApplicable as reason:
            verdicts.append(Verdict(name, law, "not applicable", str(reason)))
        except LawBroken as broken:
            bent = law in bends
            detail = f"{bends[law]} ({broken})" if bent else str(broken)
            verdicts.append(Verdict(name, law, "bent" if bent else "broken", detail))
        except Exception as error:  # any error in a user's part is a broken law
            verdicts.append(Verdict(name, law, "broken", f"{type(error).__name__}: {error}"))
        else:
            verdicts.append(Verdict(name, law, "kept"))
    return verdicts


def check(part: Spec | type[Spec], laws: Iterable[str] = tuple(LAWS), bends: Mapping[str, str] | None = None) -> Report:
    """Test laws on tiny models that contain `part`, and return a report.

    `part` is a spec, or a spec class whose fields all have defaults. `bends` is a dict of the laws that the part is
    allowed to break: law -> reason.
    """
    part, laws = _instance(part), tuple(laws)
    verdicts = [verdict for name, model in around(part).items() for verdict in examine(name, model, laws, bends)]
    if all(verdict.outcome == "refused" for verdict in verdicts):
        raise SpecError("", f"no model could be built around {type(part).__name__}: {verdicts[0].detail}")
    if "positions" in laws:  # also on models in which positions come only from the part or from one scheme
        for (scheme, family), model in positioned(part).items():
            verdict = examine(family, model, ["positions"], bends)[0]
            if verdict.outcome == "refused":
                verdict = replace(verdict, outcome="not applicable", detail=f"refused: {verdict.detail}")
            verdicts.append(replace(verdict, law=f"positions ({scheme})"))
    return Report(type(part).__name__, tuple(verdicts))


def _instance(part: Spec | type[Spec]) -> Spec:
    if isinstance(part, Spec):
        return part
    if not (inspect.isclass(part) and issubclass(part, Spec)):
        raise SpecError("", f"{part!r} is not a spec; derive its class from a base class such as regard.nn.norm.Norm")
    if not is_dataclass(part) or not hasattr(part, "kind"):
        raise SpecError("", f"{part.__name__} must be a @dataclass(frozen=True, slots=True) with a kind")
    needed = [f.name for f in fields(part) if f.default is MISSING and f.default_factory is MISSING]
    if needed:
        raise SpecError("", f"{part.__name__} needs {', '.join(needed)}; check an instance of it instead")
    return part()
