import math

import pytest
import torch

from regard.batch import Batch, pad
from regard.decoding.beam import Beam, search
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.job import Job, prepare
from regard.inspection.beam_tree import BeamTree
from regard.models.build import build
from regard.testing import tiny

ENDS = SpecialTokens(1, 2, 0)


def job(rows: int = 1, max_len: int = 6) -> tuple[Job, torch.nn.Module]:
    model = build(tiny.encoder_decoder(), seed=3).eval()
    ids, seg = pad([[5, 6, 7 + row, 2] for row in range(rows)])
    batch = Batch(ids, source=ids, source_seg=seg)
    return prepare(model, batch, ENDS, Limits(max_len=max_len), TokenConstraints(), None), model  # type: ignore[arg-type]


@pytest.mark.parametrize("stopping", ["optimal", "first", "ctranslate2", "huggingface"])
@pytest.mark.parametrize("beams", [1, 3, 5])
def test_observed_search_returns_the_same_and_the_tree_contains_it(stopping: str, beams: int) -> None:
    spec = Beam(beams, n_best=beams, stopping=stopping)  # type: ignore[arg-type]
    tree = BeamTree(ENDS.eos, 6)
    found = search(job()[0], spec, tree)
    assert found == search(job()[0], spec)
    for hypothesis in found[0]:
        path = tree.path(hypothesis.ids, hypothesis.ended)
        assert path, hypothesis
        assert tree.nodes[path[-1]].total == pytest.approx(hypothesis.log_prob)
        log_probs = [tree.nodes[i].log_prob for i in path[1:]]
        assert log_probs == pytest.approx(list(hypothesis.token_log_probs))
        tokens = [*hypothesis.ids, ENDS.eos] if hypothesis.ended else list(hypothesis.ids)
        assert tree.tokens(path[-1]) == tokens


def test_nodes_have_the_probabilities_of_the_model() -> None:
    made, model = job()
    tree = BeamTree(ENDS.eos, 6)
    search(made, Beam(4), tree)
    assert len(tree.nodes) > 10
    for i, node in enumerate(tree.nodes[1:], start=1):
        ids = tree.tokens(i)
        batch = Batch(torch.tensor([[ENDS.bos, *ids[:-1]]]), source=made.batch.source)
        with torch.no_grad():
            log_probs = model.log_probs(batch)[0]  # type: ignore[operator]
        assert node.log_prob == pytest.approx(float(log_probs[-1, ids[-1]]), abs=1e-9)
        assert node.total == pytest.approx(math.fsum(float(log_probs[t, token]) for t, token in enumerate(ids)))
        assert node.ended == (node.token == ENDS.eos)
        assert node.length == len(ids) <= 7


def test_no_more_hypotheses_than_beams_are_live() -> None:
    tree = BeamTree(ENDS.eos, 6)
    search(job()[0], Beam(3), tree)
    lengths = [node.length for node in tree.nodes if not node.ended]
    assert all(lengths.count(length) <= 3 for length in set(lengths) - {0})


def test_one_row_of_a_batch_is_observed() -> None:
    alone, second = BeamTree(ENDS.eos, 6), BeamTree(ENDS.eos, 6, row=1)
    made, _ = job(rows=2)
    search(made.part([1]), Beam(3), alone)
    search(made, Beam(3), second)
    assert [(n.parent, n.token) for n in second.nodes] == [(n.parent, n.token) for n in alone.nodes]


def test_a_hypothesis_that_was_not_considered_has_no_path() -> None:
    assert BeamTree(ENDS.eos, 6).path((9, 9), True) == []
