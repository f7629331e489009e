"""Running the laws on a part, and saying which it keeps."""

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
    """What one law says of one model."""

    model: str
    law: str
    outcome: Literal["kept", "broken", "bent", "not applicable", "refused"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All verdicts about a part."""

    part: str
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts that stand against it."""
        return tuple(verdict for verdict in self.verdicts if verdict.outcome == "broken")


def subject_of(spec: ModelSpec) -> Subject:
    """A model to be examined, with the kinds in it that are not in the catalogue."""
    extra = {type(part).kind: type(part) for part in walk(spec)}
    clash = [kind for kind, part in extra.items() if PARTS.get(kind, part) is not part]
    if clash:
        raise SpecError("kind", f"{clash[0]!r} is the kind of a part of regard; give yours another")
    return Subject(spec, extra)


def examine(
    name: str, spec: ModelSpec | Subject, laws: Iterable[str] = tuple(LAWS), bends: Mapping[str, str] | None = None
) -> list[Verdict]:
    """The verdicts of `laws` on one model. A law in `bends` may be broken, for the reason given there."""
    bends, laws = bends or {}, tuple(laws)
    for law in laws:
        if law not in LAWS:
            raise SpecError("law", f"unknown law {law!r}; {nearest(law, LAWS)}")
    subject = spec if isinstance(spec, Subject) else subject_of(spec)
    try:
        subject.model()
    except SpecError as refusal:
        return [Verdict(name, law, "refused", str(refusal)) for law in laws]
    except Exception:  # every law meets it again, and says so
        pass
    verdicts = []
    for law in laws:
        try:
            LAWS[law].hold(subject)
        except NotApplicable as reason:
            verdicts.append(Verdict(name, law, "not applicable", str(reason)))
        except LawBroken as broken:
            if law in bends:
                verdicts.append(Verdict(name, law, "bent", f"{bends[law]} ({broken})"))
            else:
                verdicts.append(Verdict(name, law, "broken", str(broken)))
        except Exception as error:  # a part of a stranger may fail in any way; that is a verdict, not a crash
            verdicts.append(Verdict(name, law, "broken", f"{type(error).__name__}: {error}"))
        else:
            verdicts.append(Verdict(name, law, "kept"))
    return verdicts


def check(part: Spec | type[Spec], laws: Iterable[str] = tuple(LAWS), bends: Mapping[str, str] | None = None) -> Report:
    """Build tiny models around `part` (a spec, or a spec class whose fields have defaults) and try the laws on each."""
    part = _instance(part)
    laws = tuple(laws)
    verdicts: list[Verdict] = []
    for name, model in around(part).items():
        verdicts += examine(name, model, laws, bends)
    if all(verdict.outcome == "refused" for verdict in verdicts):
        raise SpecError("", f"no model could be built around {type(part).__name__}: {verdicts[0].detail}")
    if "positions" in laws:
        verdicts += _alone(part, bends)
    return Report(type(part).__name__, tuple(verdicts))


def _alone(part: Spec, bends: Mapping[str, str] | None) -> list[Verdict]:
    """The law of positions where nothing else than `part` tells or heeds them: one verdict by scheme and family."""
    verdicts = []
    for (scheme, family), model in positioned(part).items():
        verdict = examine(family, model, ["positions"], bends)[0]
        if verdict.outcome == "refused":
            verdict = replace(verdict, outcome="not applicable", detail=f"refused: {verdict.detail}")
        verdicts.append(replace(verdict, law=f"positions ({scheme})"))
    return verdicts


def _instance(part: Spec | type[Spec]) -> Spec:
    if isinstance(part, Spec):
        return part
    if not (inspect.isclass(part) and issubclass(part, Spec)):
        raise SpecError("", f"{part!r} is no spec; a part derives from a slot such as regard.nn.norm.Norm")
    if not is_dataclass(part) or not hasattr(part, "kind"):
        raise SpecError("", f"{part.__name__} must be a @dataclass(frozen=True, slots=True) with a kind")
    needed = [f.name for f in fields(part) if f.default is MISSING and f.default_factory is MISSING]
    if needed:
        raise SpecError("", f"{part.__name__} needs {', '.join(needed)}; check an instance of it instead")
    return part()
