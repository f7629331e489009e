"""Inspect texts with one trained model for the lens page."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from regard.errors import DataError, SpecError
from regard.inspection.interventions import head_counts, scaled_heads
from regard.inspection.recording import Recording, record
from regard.lens.decode import NEW, Read, beam_search, classified, decode, given, written
from regard.lens.payload import payload
from regard.lens.request import Heads, LensRequest
from regard.models.build import build
from regard.runs.trained_model import held_out
from regard.training.checkpoint import RunFolder

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

TOP = 8  # alternatives of a token
CLASSES = 20  # classes that are shown
RECORDED = 64 * 2**20  # bytes of attention weights and hidden states of one answer
LOOK = 0.05  # seconds between checks of whether the client of a waiting request has left
EXAMPLE = 90  # characters of the text that the page shows first


class Lens:
    """One trained model for the lens page.

    The lens computes with a copy of the model, without fused kernels, which is made for the first request. Switching a
    head off temporarily changes the modules of a model. The copy keeps this change from other users of the model, such
    as a server. Requests are computed one at a time.
    """

    def __init__(self, run: "TrainedModel", name: str) -> None:
        self.original, self.name = run, name
        self._lock = threading.Lock()

    @cached_property
    def run(self) -> "TrainedModel":
        """The trained model with a copy of its weights, in modules without the faster kernels of `regard.fast`."""
        model = build(self.original.recipe.model, init=False)
        model.load_state_dict(self.original.model.state_dict())
        return replace(self.original, model=model.to(self.original.device).eval())

    def describe(self) -> dict[str, Any]:
        """Return the description of the model that the page shows before the first request."""
        run = self.original
        decodes = run.command != "classify"
        return {
            "name": self.name,
            "task": run.command,
            "family": run.recipe.model.kind,
            "parameters": run.parameters,
            "beam": beam_search(run, None).beam_size if decodes else 1,
            "max_len": NEW,
            "example": example(run),
        }

    def inspect(self, request: LensRequest, left: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Return the JSON document for a request: the output of the model, and all recorded tensors.

        Requests are computed one at a time. `left()` returns whether the client has closed the connection. If it has, a
        request that still waits raises a DataError.
        """
        if self.original.command == "translate" and not request.text.strip():
            raise DataError("text: is empty; give at least one word")
        with self._turn(left):
            run, warnings = self.run, list[str]()
            with self._scaled(request.heads):
                read = self._read(request, warnings)
                recording = self._recorded(read)
            return {"model": self.name} | payload(run, request, read, recording, warnings)

    @contextmanager
    def _turn(self, left: Callable[[], bool]) -> Iterator[None]:
        """Context manager that waits until no other request is computed, and makes later requests wait."""
        while not self._lock.acquire(timeout=LOOK):
            if left():
                raise DataError("the client has closed the connection")
        try:
            yield
        finally:
            self._lock.release()

    def _read(self, request: LensRequest, warnings: list[str]) -> Read:
        """Return the input of the model: the text, and the output, which is generated or given."""
        run, text, warn = self.run, request.text, warnings.append
        if run.command == "classify":
            if request.forced or request.target is not None:
                raise SpecError("forced", "a classifier writes no tokens; leave it out")
            return classified(run, text)
        if request.target is not None:
            return given(run, text, request.target, warn)
        if request.forced and request.forced[-1] == run.tokenizer.eos:
            return written(run, text, request.forced[:-1], warn)
        return decode(run, text, request.beam, request.forced, request.max_len, warn)

    def _recorded(self, read: Read) -> Recording:
        run = self.run
        labels = run.objective.labels if run.objective.labelled else ()
        top = min(len(labels), CLASSES) if run.command == "classify" else TOP
        try:
            return record(
                run.model, read.batch, tokenizers=run.tokenizers, labels=labels, top=max(top, 1), limit=RECORDED
            )
        except DataError as error:
            raise DataError(f"{str(error).partition(';')[0]}; use a shorter text") from None

    @contextmanager
    def _scaled(self, heads: Heads) -> Iterator[None]:
        counts = head_counts(self.run.model)
        if heads and not counts:
            raise SpecError("heads", "this model has no attention heads; leave it out")
        with scaled_heads(self.run.model, heads):
            yield


def example(run: "TrainedModel") -> str:
    """Return a validation example of a run that is short enough for a first look, or an empty text."""
    texts = (" ".join(run.objective.pair(record)[0].split()) for record in held_out(RunFolder(run.path)))
    fitting = [text for text in texts if text]
    if not fitting:
        return ""
    if run.command == "generate":
        return " ".join(fitting[0].split()[:4])
    several = [text for text in fitting if len(text) <= EXAMPLE and len(text.split()) >= 3]
    return max(several, key=len) if several else fitting[0][:EXAMPLE]
