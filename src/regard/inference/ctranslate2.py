"""The `ctranslate2` engine, which runs exported models in CTranslate2.

The engine returns the same hypotheses as `Beam(stopping="ctranslate2")`, but without the log-probabilities of tokens. A
search that CTranslate2 cannot perform exactly raises an error. Each worker has one thread (`intra_threads=1`): in our
measurements, a worker with two threads was 2.5 to 5 times slower.
"""

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
from regard.processes import cores

NAME = "ctranslate2"
# Maps the stored type to the type of the computation. float16 only makes the file smaller: CPUs compute in float32.
COMPUTED = {"float32": "float32", "float16": "float32", "int8": "int8"}


def library() -> Any:
    """Return the module `ctranslate2`, which is an optional dependency."""
    try:
        import ctranslate2  # noqa: PLC0415
    except ImportError:
        raise DataError("the engine 'ctranslate2' is not installed here: pip install 'regard[export]'") from None
    return ctranslate2


class CTranslate2(Engine):
    """Engine for a translation model that was exported to a folder and is loaded into CTranslate2."""

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
        """Load the export in `folder`, with weights of the type `stored`.

        `words` are the token strings of the source and of the target vocabulary, ordered by id. `room` is the maximum
        length of a source or an output in tokens.
        """
        self.ends, self.room = ends, room
        self.source, self.target = words
        self.ids = {word: number for number, word in enumerate(self.target)}
        try:
            self.translator = library().Translator(
                str(folder), compute_type=COMPUTED[stored], inter_threads=threads or cores(), intra_threads=1
            )
        except (RuntimeError, ValueError) as error:
            raise DataError(f"CTranslate2 cannot load {folder} ({error})") from None

    def adapted(self, search: Search, warn: Callable[[str], None]) -> Search:
        """Return the search with the stopping rule of CTranslate2; warn if the search had another rule."""
        if not isinstance(search, Beam) or search.stopping == NAME:
            return search
        warn(f"the engine {NAME!r} uses its own stopping rule (stopping={NAME}), not {search.stopping!r}")
        try:
            return replace(search, stopping=NAME)
        except SpecError as error:
            raise _refused(error.path, error.message.partition(";")[0]) from None

    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        if not isinstance(search, Beam):
            raise _refused("search", f"{search.kind!r} would use a random number generator that cannot be seeded")
        if search.stopping != NAME:
            raise _refused("stopping", f"CTranslate2 has its own stopping rule, {NAME!r}, not {search.stopping!r}")
        if search.prefill_chunk is not None:
            raise _refused("prefill_chunk", "CTranslate2 reads the whole source at once")
        if limits.min_len:
            raise _refused("min_len", "CTranslate2 would change probabilities to keep an output from ending")
        if limits.max_len is not None and limits.max_len > self.room:
            raise _refused("max_len", f"the model was exported with room for {self.room} tokens, not {limits.max_len}")
        for name in rules.used():
            raise _refused(name, "the constraints of CTranslate2 change the probabilities of the output")

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
            raise DataError(f"a source has {len(long)} tokens, but the model was exported for at most {self.room}")
        most = [min(limits.most(len(source)), self.room) for source in sources]
        results: dict[int, list[Hypothesis]] = {}
        for limit, places in self._together(most, search):
            results |= self._search([(place, sources[place]) for place in places], search, batch_size, limit)
        # All sources of one call to the library share a length limit. The search is repeated for a source with a
        # smaller limit if its search reached that limit. If all beams ended, it reached the length of the longest beam.
        longest = {place: max((len(each.ids) for each in best), default=0) for place, best in results.items()}
        again = [place for place in results if most[place] < max(most) and longest[place] + 1 >= most[place]]
        for limit in sorted({most[place] for place in again}):
            places = [place for place in again if most[place] == limit]
            results |= self._search([(place, sources[place]) for place in places], search, batch_size, limit)
        return [results[place][: search.n_best] for place in range(len(sources))]

    def _together(self, most: Sequence[int], search: Beam) -> list[tuple[int, list[int]]]:
        """Group the sources to search together. Return the length limit and the source indices of every group."""
        if not most:
            return []
        if _waits_for_all(search):
            return [(max(most), list(range(len(most))))]
        return [(limit, [i for i, own in enumerate(most) if own == limit]) for limit in sorted(set(most))]

    def _search(
        self, sources: Sequence[tuple[int, Sequence[int]]], search: Beam, batch_size: int, limit: int
    ) -> dict[int, list[Hypothesis]]:
        """Return the hypotheses of every source, keyed by source index. All sources have the same length limit.

        If the search waits until all beams have ended, the result contains the hypotheses of all beams.
        """
        texts = [[self.source[token] for token in source] for _, source in sources]
        results = self._translate(texts, search, batch_size, limit)
        hypotheses = [self._hypotheses(result, search) for result in results]
        # Suppressing tokens changes the log-probabilities. So bos and padding are suppressed only for sources for which
        # a beam contains them, which is rare even for a half-trained model.
        special = [i for i, each in enumerate(hypotheses) if any({*h.ids} & {*self.ends.never} for h in each)]
        if special:
            never = [[self.target[token]] for token in self.ends.never]
            cleaned = self._translate([texts[i] for i in special], search, batch_size, limit, suppress_sequences=never)
            for i, result in zip(special, cleaned, strict=True):
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
        while not results[-1].done():  # waiting inside the library would block Ctrl-C
            time.sleep(0.002)
        return [result.result() for result in results]

    def _hypotheses(self, result: Any, search: Beam) -> list[Hypothesis]:
        hypotheses = []
        for words, score in zip(result.hypotheses, result.scores, strict=True):
            ids = [self.ids[word] for word in words]
            ended = bool(ids) and ids[-1] == self.ends.eos
            log_prob = score * max(len(ids), 1) ** search.scoring.alpha
            hypotheses.append(Hypothesis(tuple(ids[: len(ids) - ended]), score, log_prob, (), ended))
        return hypotheses


def _waits_for_all(search: Beam) -> bool:
    """Return whether CTranslate2 searches until all beams have ended. Returning all beams then costs no extra time."""
    return search.beam_size == 1 or search.scoring.alpha != 0.0


def _refused(name: str, why: str) -> SpecError:
    return SpecError(name, f"cannot be used as given with the engine {NAME!r}: {why}; use --engine native")
