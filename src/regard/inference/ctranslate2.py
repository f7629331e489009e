"""The ctranslate2 engine: exported weights in CTranslate2's C++, and those searches that it does exactly as ours does.

It has no probabilities of its own: what it finds is what `Beam(stopping="ctranslate2")` finds over the same weights.
Each of its workers has one thread (`intra_threads=1`), and there are as many workers as are asked for: with two threads
a worker was 2.5 to 5 times slower where we measured.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, SpecialTokens
from regard.decoding.search import Search
from regard.errors import DataError, SpecError
from regard.inference.engine import Engine, Sources

NAME = "ctranslate2"
# What is stored, and what it is computed in: half precision is a smaller file, for a CPU does not compute in it.
COMPUTED = {"float32": "float32", "float16": "float32", "int8": "int8"}


def library() -> Any:
    """CTranslate2 itself, which is an extra."""
    try:
        import ctranslate2  # noqa: PLC0415
    except ImportError:
        raise DataError("the engine 'ctranslate2' is not installed here: pip install 'regard[export]'") from None
    return ctranslate2


def workers() -> int:
    """As many as there are processors for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def adapted(search: Search, warn: Callable[[str], None]) -> Search:
    """A search that nobody chose in detail, with this engine's stopping rule, which is the only one it has."""
    if not isinstance(search, Beam) or search.stopping == NAME:
        return search
    warn(f"the engine {NAME!r} stops by its own rule (stopping={NAME}), not by {search.stopping!r}")
    try:
        return replace(search, stopping=NAME)
    except SpecError as error:
        raise _refused(error.path, error.message.partition(";")[0]) from None


class CTranslate2(Engine):
    """A folder that was exported, loaded into CTranslate2."""

    name = NAME

    def __init__(
        self,
        folder: Path,
        words: tuple[Sequence[str], Sequence[str]],
        ends: SpecialTokens,
        room: int,
        stored: str = "float32",
        threads: int | None = None,
    ) -> None:
        """`words` are those of source and target by id; `room` is how many tokens either may have."""
        self.ends, self.room = ends, room
        self.source, self.target = words
        self.ids = {word: one for one, word in enumerate(self.target)}
        try:
            self.translator = library().Translator(
                str(folder),
                compute_type=COMPUTED[stored],
                inter_threads=threads or workers(),
                intra_threads=1,
            )
        except (RuntimeError, ValueError) as error:
            raise DataError(f"CTranslate2 cannot load {folder} ({error})") from None

    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        if not isinstance(search, Beam):
            raise _refused("search", f"{search.kind!r} draws from a generator that its seed does not reach")
        if search.stopping != NAME:
            raise _refused("stopping", f"it stops by its own rule, {NAME!r}, not by {search.stopping!r}")
        if limits.min_len:
            raise _refused("min_len", "it changes probabilities to keep an output from ending")
        if limits.max_len is not None and limits.max_len > self.room:
            raise _refused("max_len", f"the model was exported with room for {self.room} tokens, not {limits.max_len}")
        for name in rules.used():
            raise _refused(name, "its constraints change the probabilities of the output")

    def find(
        self,
        sources: Sources,
        search: Search,
        batch_size: int,
        limits: Limits,
        rules: TokenConstraints,
        rows: Sequence[int],  # noqa: ARG002
    ) -> list[list[Hypothesis]]:
        self.check(search, limits, rules)
        assert isinstance(search, Beam)
        long = next((source for source in sources if len(source) > self.room), None)
        if long is not None:
            raise DataError(f"a source of {len(long)} tokens is more than the {self.room} that were exported")
        most = [min(limits.most(len(source)), self.room) for source in sources]
        found: dict[int, list[Hypothesis]] = {}
        for limit, places in self._together(most, search):
            found |= self._found([(place, sources[place]) for place in places], search, batch_size, limit)
        # One call has one limit. Where a search came as far as its own, it is made again with that.
        again = [place for place in found if most[place] < max(most) and _farthest(found[place]) + 1 >= most[place]]
        for limit in sorted({most[place] for place in again}):
            places = [place for place in again if most[place] == limit]
            found |= self._found([(place, sources[place]) for place in places], search, batch_size, limit)
        return [found[place][: search.n_best] for place in range(len(sources))]

    def _together(self, most: Sequence[int], search: Beam) -> list[tuple[int, list[int]]]:
        """(a limit, the places of sources that are searched with it)."""
        if not most:
            return []
        if _waits_for_all(search):
            return [(max(most), list(range(len(most))))]
        return [(limit, [i for i, one in enumerate(most) if one == limit]) for limit in sorted(set(most))]

    def _found(
        self, sources: Sequence[tuple[int, Sequence[int]]], search: Beam, batch_size: int, limit: int
    ) -> dict[int, list[Hypothesis]]:
        """What is found with one limit for all; of a search that waits for all its beams, all that they found."""
        texts = [[self.source[one] for one in source] for _, source in sources]
        results = self._translate(texts, search, batch_size, limit)
        hypotheses = [self._hypotheses(result, search) for result in results]
        # Their log-probabilities are the model's own as long as nothing is suppressed, so nothing is, unless one of
        # the ids that are never said gets into a beam: not even a half-trained model says them.
        said = [i for i, each in enumerate(hypotheses) if any(set(one.ids) & {*self.ends.never} for one in each)]
        if said:
            never = [[self.target[one]] for one in self.ends.never]
            cleaned = self._translate([texts[i] for i in said], search, batch_size, limit, suppress_sequences=never)
            for i, result in zip(said, cleaned, strict=True):
                hypotheses[i] = self._hypotheses(result, search)
        return {place: each for (place, _), each in zip(sources, hypotheses, strict=True)}

    def _translate(self, texts: list[list[str]], search: Beam, batch_size: int, limit: int, **more: Any) -> list[Any]:
        several = len(texts) > batch_size
        results = self.translator.translate_batch(
            texts,
            max_batch_size=batch_size,
            asynchronous=several,
            beam_size=search.beam_size,
            num_hypotheses=search.beam_size if _waits_for_all(search) else search.n_best,
            length_penalty=search.scoring.alpha,
            patience=1,
            coverage_penalty=0,
            repetition_penalty=1,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=0,
            return_scores=True,
            return_end_token=True,
            **more,
        )
        if not several:
            return results
        while not results[-1].done():  # not in their code, where Ctrl-C is not heard
            time.sleep(0.002)
        return [result.result() for result in results]

    def _hypotheses(self, result: Any, search: Beam) -> list[Hypothesis]:
        found = []
        for words, score in zip(result.hypotheses, result.scores, strict=True):
            ids = [self.ids[word] for word in words]
            ended = bool(ids) and ids[-1] == self.ends.eos
            log_prob = score * max(len(ids), 1) ** search.scoring.alpha
            found.append(Hypothesis(tuple(ids[: len(ids) - ended]), score, log_prob, (), ended))
        return found


def _waits_for_all(search: Beam) -> bool:
    """Whether it goes on until as many have ended as there are beams: then all of them can be had for nothing."""
    return search.beam_size == 1 or search.scoring.alpha != 0.0


def _farthest(found: Sequence[Hypothesis]) -> int:
    """How many tokens the longest has. Where all beams have ended, it ended in the last step of the search."""
    return max((len(one.ids) for one in found), default=0)


def _refused(name: str, why: str) -> SpecError:
    return SpecError(name, f"the engine {NAME!r} cannot do it as asked: {why}; use --engine native")
