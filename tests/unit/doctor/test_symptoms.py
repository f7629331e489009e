"""The checks of training runs, on logs and outputs that are made for them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.data.batching import Buckets
from regard.data.prepare import DataSpec
from regard.data.text import ParallelFiles
from regard.decoding.beam import Beam
from regard.doctor.finding import Finding
from regard.doctor.run_record import Event, Outputs, RunRecord, read_log
from regard.doctor.symptoms.checkpoints import damaged_checkpoints
from regard.doctor.symptoms.divergence import divergence, gradients
from regard.doctor.symptoms.fitting import fitting
from regard.doctor.symptoms.learning_rate import learning_rate
from regard.doctor.symptoms.memory import split_batches
from regard.doctor.symptoms.outputs import collapse, copying, endings, source_use
from regard.doctor.symptoms.scores import ending
from regard.doctor.tables import SYMPTOMS
from regard.errors import DataError
from regard.planner import suggested_rate
from regard.presets import preset
from regard.recipe.recipe import Recipe
from regard.training.checkpoint import RunFolder
from regard.training.optim import AdamW
from regard.training.schedule import Cosine
from regard.training.spec import TrainSpec

MODEL = preset("transformer_tiny", vocab=100)
Make = Callable[..., RunRecord]


@pytest.fixture
def run(tmp_path: Path) -> Make:
    def make(
        train: Sequence[float] = (),
        valid: Sequence[float] = (),
        rate: float = 1e-3,
        finished: bool = True,
        **facts: Any,
    ) -> RunRecord:
        """A run with a training loss at every 50th step, and validations spread over these steps."""
        spec = TrainSpec(steps=50 * max(1, len(train)), optimizer=AdamW(rate), schedule=Cosine(100))
        recipe = Recipe(MODEL, DataSpec((ParallelFiles("a", "b"),)), spec, Beam())
        norms = facts.pop("gradient", [1.0] * len(train))
        events: list[Event] = [
            {"event": "step", "step": 50 * i, "nll": loss, "loss": loss, "gradient": norm, "steps": spec.steps}
            for i, (loss, norm) in enumerate(zip(train, norms, strict=True), 1)
        ]
        each = 50 * len(train) // max(1, len(valid))
        events += [{"event": "valid", "step": each * i, "loss": loss} for i, loss in enumerate(valid, 1)]
        events += facts.pop("events", [])
        if finished:
            events.append({"event": "end", "step": 50 * len(train), "finished": True})
        record = RunRecord(RunFolder(tmp_path), recipe, events, "cpu", 0)
        record.__dict__.update({"data": None, "unigram_entropy": 5.0, "outputs": None} | facts)
        return record

    return make


def one(findings: Any) -> Finding:
    (finding,) = findings
    return finding


def falling(count: int, to: float = 1.0) -> list[float]:
    return [to + 5.0 / (i + 1) for i in range(count)]


def test_a_healthy_run_has_only_notes(run: Make) -> None:
    record = run(falling(20), falling(8, 1.4))
    checks = (divergence, gradients, learning_rate, collapse, copying, source_use, endings, fitting, ending)
    assert {finding.level for check in checks for finding in check(record)} <= {"note"}


def test_a_loss_that_is_not_finite_is_named_with_its_step(run: Make) -> None:
    bad = {"event": "step", "step": 1050, "loss": None, "nll": None, "gradient": None}
    found = one(divergence(run(falling(20), events=[bad], finished=False)))
    assert found.level == "error"
    assert "step 1,050" in found.message
    assert "1.250 before" in found.evidence[-1]


@pytest.mark.parametrize(("count", "level"), [(2, "warning"), (40, "error")])
def test_skipped_steps_are_counted(run: Make, count: int, level: str) -> None:
    events = [{"event": "skipped", "step": i, "loss": None, "file": f"skipped-{i}.json"} for i in range(count)]
    found = one(divergence(run(falling(20), events=events)))
    assert found.level == level
    assert "skipped-0.json" in found.evidence[0]


def test_a_skipped_step_that_was_logged_alone_is_no_divergence(run: Make) -> None:
    events: list[Event] = [
        {"event": "step", "step": 500, "loss": None, "nll": None, "skipped": 1},
        {"event": "skipped", "step": 500, "problem": "the loss is nan", "loss": None, "gradient": None, "file": None},
    ]
    found = one(divergence(run(falling(20), events=events)))
    assert found.level == "warning"
    assert found.evidence == ("step 500, the loss is nan",)


def test_batches_that_were_computed_in_parts_are_named_with_smaller_ones(run: Make) -> None:
    first: Event = {"event": "split", "step": 40, "rows": 64, "parts": 2, "shape": "64x50/64x48", "why": "CUDA"}
    events: list[Event] = [first, first | {"step": 70, "parts": 4}, first | {"step": 90, "shape": "64x60/64x58"}]
    record = run(falling(20), events=events)
    record.recipe = replace(record.recipe, data=replace(record.recipe.data, batching=Buckets(tokens=4000)))
    found = one(split_batches(record))
    assert (found.check, found.level) == ("memory", "warning")
    assert "batches of 2 shapes are computed in parts" in found.message
    assert found.evidence == (
        "step 70: batches of 64 rows (64x50/64x48) in 4 parts",
        "step 90: batches of 64 rows (64x60/64x58) in 2 parts",
    )
    assert "--set data.batching.tokens=1000 and --set train.accumulate=4" in found.advice
    assert list(split_batches(run(falling(20)))) == []


def test_the_advice_on_parts_needs_no_batch_size(run: Make) -> None:
    found = one(split_batches(run(falling(20), events=[{"event": "split", "step": 40}])))
    assert "choose smaller batches" in found.advice


def test_damaged_checkpoints_are_counted_and_quoted(run: Make) -> None:
    problem = "weights-40.safetensors has changed since it was saved; training resumes from the checkpoint of step 20"
    found = one(damaged_checkpoints(run(falling(20), events=[{"event": "damaged", "step": 20, "problem": problem}])))
    assert (found.check, found.level) == ("checkpoints", "warning")
    assert found.message == "1 damaged checkpoint was skipped"
    assert found.evidence == (f"step 20: {problem}",)
    assert "disk" in found.advice
    assert list(damaged_checkpoints(run(falling(20)))) == []


def test_the_events_of_training_are_examined() -> None:
    assert {split_batches, damaged_checkpoints} <= {symptom.find for symptom in SYMPTOMS}


def test_a_gradient_that_grows_is_an_error_and_one_spike_a_note(run: Make) -> None:
    growing = [1.0] * 14 + [30.0, 60.0, 100.0, 200.0, 300.0, 500.0]
    assert one(gradients(run(falling(20), gradient=growing))).level == "error"
    assert one(gradients(run(falling(20), gradient=[1.0] * 10 + [90.0] + [1.0] * 9))).level == "note"
    assert list(gradients(run(falling(20), gradient=[1.0 + 0.2 * i for i in range(20)]))) == []


def test_a_plateau_at_the_unigram_entropy_with_a_high_rate_names_the_rate(run: Make) -> None:
    found = one(learning_rate(run([6.0] + [4.95] * 19, rate=0.1)))
    assert (found.level, "too high" in found.message) == ("error", True)
    assert "learning_rate=" in found.advice


def test_a_plateau_with_the_suggested_rate_does_not_blame_the_rate(run: Make) -> None:
    found = one(learning_rate(run([6.0] + [4.95] * 19, rate=1e-3)))
    assert found.level == "warning"
    assert "too high" not in found.message


def test_a_loss_that_rises_after_the_warm_up_is_an_error(run: Make) -> None:
    found = one(learning_rate(run([*falling(6, 2.0), *[3.5] * 14])))
    assert found.level == "error"
    assert "risen" in found.message
    assert "step 300" in found.evidence[0]


def test_a_run_inside_the_warm_up_is_not_judged(run: Make) -> None:
    assert list(learning_rate(run([6.0, 5.5], finished=False))) == []
    assert list(learning_rate(run([6.0, 5.5, 5.2, 5.0], finished=False))) == []


def test_suggested_rates_fall_with_the_width() -> None:
    objective = DataSpec((ParallelFiles("a", "b"),)).objective
    narrow, wide = (
        suggested_rate(objective, preset(name, vocab=100), AdamW()) for name in ("transformer_tiny", "transformer_big")
    )
    assert wide < narrow


def test_overfitting_advises_to_stop_at_the_best_step(run: Make) -> None:
    found = one(fitting(run(falling(20, 0.1), [3.0, 2.5, 2.4, 2.6, 3.0])))
    assert found.level == "warning"
    assert "overfits" in found.message
    assert "step 600" in found.advice


def test_a_validation_loss_that_rises_with_the_training_loss_is_no_overfitting(run: Make) -> None:
    train = [*falling(10, 2.0), *[3.5] * 10]
    assert all("overfits" not in finding.message for finding in fitting(run(train, [3.0, 2.5, 3.6, 3.7])))


def test_a_run_in_progress_is_told_to_go_on_while_the_loss_falls(run: Make) -> None:
    assert "go on" in one(fitting(run(falling(20), [4.0, 3.0, 2.5, 2.2], finished=False))).message
    assert "has not fallen" in one(fitting(run(falling(20), [4.0, 2.5, 2.5, 2.52, 2.51], finished=False))).message


def texts(count: int) -> list[str]:
    return [f"sentence number {i}" for i in range(count)]


def test_one_sentence_for_everything_is_a_collapse(run: Make) -> None:
    outputs = Outputs(texts(40), ["the same"] * 30 + texts(10), [f"Satz {i}" for i in range(40)])
    found = one(collapse(run(outputs=outputs)))
    assert found.level == "error"
    assert "75 %" in found.message
    few = Outputs(texts(40), [f"only {i % 6}" for i in range(40)], [f"Satz {i}" for i in range(40)])
    assert "only 6 different" in one(collapse(run(outputs=few))).message


def test_equal_references_allow_equal_outputs(run: Make) -> None:
    assert list(collapse(run(outputs=Outputs(texts(40), ["yes"] * 22 + ["no"] * 18, ["yes"] * 20 + ["no"] * 20)))) == []


def test_copies_of_the_source_are_a_collapse_unless_the_references_are_copies(run: Make) -> None:
    source, reference = texts(20), [f"Satz {i}" for i in range(20)]
    found = one(copying(run(outputs=Outputs(source, [*source[:15], *reference[15:]], reference))))
    assert found.level == "error"
    assert "75 %" in found.message
    assert one(copying(run(outputs=Outputs(source, source, source)))).level == "warning"
    assert list(copying(run(outputs=Outputs(source, reference, reference)))) == []


def test_a_model_that_ignores_the_source_is_found(run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecord, "source_gain", lambda _: (2.0, 2.01))
    assert one(source_use(run(falling(20)))).level == "error"
    monkeypatch.setattr(RunRecord, "source_gain", lambda _: (2.0, 4.0))
    assert list(source_use(run(falling(20)))) == []


def test_endless_outputs_are_a_warning(run: Make) -> None:
    events = [{"event": "valid", "step": 1000, "loss": 1.0, "unfinished": 40.0, "repeating": 2.0}]
    assert one(endings(run(falling(20), events=events))).level == "warning"


def test_a_run_without_an_end_says_where_it_is_and_how_to_go_on(run: Make) -> None:
    found = one(ending(run(falling(20), finished=False)))
    assert "step 1,000" in found.message
    assert "regard resume" in found.advice


def test_a_finished_fine_tuning_has_ended_although_its_parent_was_compared_later(run: Make) -> None:
    record = run(falling(20))
    record.events.append({"event": "parent", "step": 1000, "before": {}, "after": {}})
    assert not list(ending(record))


def test_a_log_with_a_cut_last_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "start", "step": 0}\n[1]\n{"event": 3, "step": 1}\n{"event": "step", "st')
    assert [event["event"] for event in read_log(path)] == ["start"]
    path.write_text("")
    with pytest.raises(DataError, match="has no events"):
        read_log(path)
    with pytest.raises(DataError, match="is missing"):
        read_log(tmp_path / "none")
