import base64
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from regard.decoding.beam import Beam
from regard.errors import DataError, RegardError, SpecError
from regard.inspection.interventions import scaled_heads
from regard.lens.request import LensRequest
from regard.lens.session import Lens
from regard.runs.trained_model import TrainedModel
from tests.unit.lens.conftest import TASKS, Make

TEXT = "one two five"


def unpacked(tensor: dict[str, Any]) -> torch.Tensor:
    values = np.frombuffer(base64.b64decode(tensor["data"]), "<f4")
    return torch.tensor(values.reshape(tensor["shape"]), dtype=torch.float64)


def inspect(run: TrainedModel, text: str = TEXT, **options: Any) -> dict[str, Any]:
    answer = Lens(run, "it").inspect(LensRequest(text, **options))
    return json.loads(json.dumps(answer, allow_nan=False))


@pytest.mark.parametrize("name", ["translator", "recurrent"])
def test_translation_and_score_are_those_of_translate(make: Make, name: str) -> None:
    run = make(name)
    (best,) = run.translations(TEXT)
    answer = inspect(run)
    assert (answer["output"], answer["ids"], answer["ended"]) == (best.text, list(best.ids), best.ended)
    assert answer["score"] == pytest.approx(best.score)
    assert answer["log_prob"] == pytest.approx(best.log_prob)
    product = math.prod(each["probability"] for each in answer["predictions"] if each["id"] is not None)
    assert math.log(product) == pytest.approx(best.log_prob)


def test_attention_is_that_of_the_model(make: Make) -> None:
    run = make("translator")
    (best,) = run.translations(TEXT)
    answer = inspect(run)
    assert set(answer["attention"]) == {"encoder.self", "decoder.self", "decoder.cross"}
    T, S = len(best.ids) + 1, len(best.read)
    expected = run.attention(TEXT).weights["decoder.cross"]
    for shown, weights in zip(answer["attention"]["decoder.cross"], expected, strict=True):
        assert shown["shape"] == [4, T, S]
        torch.testing.assert_close(unpacked(shown), weights, atol=1e-6, rtol=0)


def test_positions_of_the_output_follow_the_prompt(make: Make) -> None:
    answer = inspect(make("language_model"), max_len=5)
    prompt = len(answer["tokens"]["decoder"]) - len(answer["ids"])
    assert answer["first"] == prompt - 1
    written = answer["tokens"]["output"][answer["first"] :]
    assert [each["id"] for each in written][:5] == answer["ids"]
    assert answer["source"] is None
    (best,) = make("language_model", decode=Beam(3)).generate(TEXT, beam=3, max_len=5)
    assert answer["ids"] == list(best.ids)


def test_beam_tree_contains_the_output_and_its_log_probability(make: Make) -> None:
    answer = inspect(make("translator"), beam=4)
    tree, ids = answer["tree"], answer["ids"]
    best = [node for node in tree if node["best"]]
    assert [node["id"] for node in best[1:]][: len(ids)] == ids
    assert best[-1]["log_prob"] == pytest.approx(answer["log_prob"])
    assert all(node["parent"] is None or node["parent"] < i for i, node in enumerate(tree))
    assert answer["hypotheses"][0]["text"] == answer["output"]
    assert answer["beam"] == 4


def test_forced_tokens_begin_the_output_and_the_search_continues(make: Make) -> None:
    run = make("translator")
    free = inspect(run)
    listed = [each["id"] for each in free["predictions"][0]["alternatives"]]
    other = next(token for token in listed if token not in (free["ids"][0], run.tokenizer.eos))
    forced = inspect(run, forced=(other,))
    assert forced["ids"][0] == other
    assert forced["predictions"][0]["id"] == other
    assert forced["log_prob"] != free["log_prob"]


def test_forced_end_ends_the_output(make: Make) -> None:
    run = make("translator")
    ids = tuple(inspect(run)["ids"][:2])
    answer = inspect(run, forced=(*ids, run.tokenizer.eos))
    assert (answer["ids"], answer["ended"], answer["tree"]) == (list(ids), True, [])
    expected = sum(math.log(each["probability"]) for each in answer["predictions"])
    assert answer["log_prob"] == pytest.approx(expected)
    assert answer["score"] == pytest.approx(expected / 3)


def test_given_target_is_read_by_the_decoder(make: Make) -> None:
    run = make("translator")
    answer = inspect(run, target="six seven")
    assert answer["output"] == "six seven"
    assert answer["log_prob"] == pytest.approx(run.score([(TEXT, "six seven")])[0].log_prob)


@pytest.mark.parametrize("name", ["translator", "recurrent", "language_model", "classifier"])
def test_switched_heads_change_the_answer_and_leave_the_model_as_it_was(make: Make, name: str) -> None:
    run = make(name)
    lens = Lens(run, "it")
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    on = lens.inspect(LensRequest(TEXT))
    kind = "encoder.self" if name == "classifier" else "decoder.self" if name == "language_model" else "decoder.cross"
    heads = {kind: dict.fromkeys([(0, 0), (0, 1)], 0.0)}
    off = lens.inspect(LensRequest(TEXT, heads=heads))
    assert (off["classes"], off["predictions"]) != (on["classes"], on["predictions"])
    assert lens.inspect(LensRequest(TEXT)) == on
    assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())
    assert lens.run.model is not run.model


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_family_gives_a_document_whose_parts_fit(make: Make, name: str) -> None:
    answer = inspect(make(name))
    written = answer.get("tokens", {}).get("output", [])
    for kind, layers in answer["attention"].items():
        side = kind.partition(".")[0]
        for layer in layers:
            assert layer["shape"][1] == len(answer["tokens"][side])
            if not kind.endswith(".mixtures"):
                keys = answer["tokens"]["encoder" if kind.endswith(".cross") else side]
                assert layer["shape"][2] == len(keys)
    if written:
        assert [each["id"] for each in written[answer["first"] :]][: len(answer["ids"])] == answer["ids"]
        assert len(answer["predictions"]) == len(answer["tokens"]["decoder"])
        assert len(written) in {len(answer["predictions"]) - 1, len(answer["predictions"])}
        assert answer["predictions"][answer["first"]] is not None
    for layers in answer["routing"].values():
        for layer in layers:
            assert layer["shape"] == [len(answer["tokens"]["encoder"]), 4] or layer["shape"][1] == 4


def test_switched_heads_are_those_of_the_intervention(make: Make) -> None:
    run = make("translator")
    heads = {"decoder.cross": {(1, 2): 0.25}}
    with scaled_heads(run.model, heads):
        (best,) = run.translations(TEXT)
    answer = inspect(run, heads=heads)
    assert answer["ids"] == list(best.ids)
    assert answer["log_prob"] == pytest.approx(best.log_prob)


def test_classes_are_those_of_classify(make: Make) -> None:
    run = make("classifier")
    expected = run.classify(TEXT)
    answer = inspect(run)
    assert {each["label"]: each["probability"] for each in answer["classes"]} == pytest.approx(expected.probabilities)
    assert answer["output"] == expected.label


@pytest.mark.parametrize("name", ["translator", "recurrent", "language_model", "classifier"])
def test_description_names_the_task(make: Make, name: str) -> None:
    described = Lens(make(name), "it").describe()
    tasks = {"language_model": "generate", "classifier": "classify"}
    assert (described["name"], described["task"]) == ("it", tasks.get(name, "translate"))
    assert described["example"] == ""  # no validation text is stored


@pytest.mark.parametrize(
    ("name", "request_", "error", "message"),
    [
        ("translator", LensRequest("  "), DataError, "text: is empty"),
        ("translator", LensRequest(TEXT, forced=(99999,)), SpecError, "not in the vocabulary"),
        ("translator", LensRequest(TEXT, forced=(2, 2)), SpecError, "only eos may be forced"),
        ("translator", LensRequest(TEXT, heads={"decoder.crss": {(0, 0): 0.0}}), SpecError, "decoder.cross"),
        ("translator", LensRequest(TEXT, heads={"decoder.cross": {(7, 0): 0.0}}), SpecError, "no head"),
        ("classifier", LensRequest(TEXT, forced=(5,)), SpecError, "writes no tokens"),
    ],
)
def test_wrong_request_is_one_sentence(
    make: Make, name: str, request_: LensRequest, error: type[RegardError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Lens(make(name), "it").inspect(request_)


def test_text_that_would_record_too_much_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.lens.session.RECORDED", 1000)
    with pytest.raises(DataError, match="use a shorter text"):
        Lens(make("translator"), "it").inspect(LensRequest(TEXT))
