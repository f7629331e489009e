from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.batch import Batch
from regard.catalogue import edited
from regard.errors import SpecError
from regard.models.build import build, count
from regard.models.decoder_only import DecoderOnly, DecoderOnlyModel
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.mask import Context, Mask, View
from regard.nn.trace import Trace

Decoder = Callable[..., DecoderOnly]
Perturbed = Callable[[Any], DecoderOnlyModel]
CPU = torch.device("cpu")
IDS = torch.randint(3, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def test_log_probs_equal_embeddings_decoder_and_tied_softmax(decoder: Decoder, perturbed: Perturbed) -> None:
    model = perturbed(build(decoder()))
    table = model.tables.get("target")
    assert table is not None
    assert model.tables.get("output") is table
    x = table(IDS) * 8**0.5 + Sinusoidal().table(6, 8)
    h = model.decoder(x, Context(View(Mask(causal=True), 6, 6, CPU))).x
    torch.testing.assert_close(model.log_probs(Batch(IDS)), table.logits(h).log_softmax(-1))


def test_untied_model_has_one_more_table(decoder: Decoder) -> None:
    assert count(decoder(tied=False)) - count(decoder()) == 11 * 8


def attended_keys(model: DecoderOnlyModel, batch: Batch) -> list[list[list[int]]]:
    """Return, for each row, query and key, 1 if the first head of the first layer attends to the key, otherwise 0."""
    trace = Trace()
    model.log_probs(batch, trace)
    return (trace.weights["decoder.self"][0][:, 0] > 0).long().tolist()


def test_all_tokens_attend_to_the_prefix(decoder: Decoder) -> None:
    model = build(decoder(input_attention="full"))
    assert isinstance(model, DecoderOnlyModel)
    prefix = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    attended = attended_keys(model, Batch(IDS, prefix=prefix))
    for b in range(2):
        for i in range(6):
            assert attended[b][i] == [int(j <= i or bool(prefix[b, j])) for j in range(6)]


def test_the_first_advance_of_a_prefix_lm_reads_the_prefix(decoder: Decoder, perturbed: Perturbed) -> None:
    model = perturbed(build(decoder(input_attention="full")))
    lengths = [3, 1]
    prefix = torch.arange(6) < torch.tensor(lengths)[:, None]
    whole = model.log_probs(Batch(IDS, prefix=prefix))
    decoding = model.start(Batch(IDS[:, :1]), 6)
    prompt, seg = IDS[:, :3].clone(), torch.tensor([[1, 1, 1], [1, 0, 0]])
    log_probs = model.advance(prompt, decoding, seg)
    for more in range(3):
        torch.testing.assert_close(log_probs, torch.stack([whole[b, lengths[b] - 1 + more] for b in range(2)]))
        following = torch.stack([IDS[b, lengths[b] + more] for b in range(2)])
        log_probs = model.advance(following[:, None], decoding)


def test_reordered_beams_keep_the_prefix(decoder: Decoder, perturbed: Perturbed) -> None:
    """Two beams of one source with equally long prefixes: beam 1 continues beam 0."""
    model = perturbed(build(decoder(input_attention="full")))
    decoding = model.start(Batch(IDS[:1, :1]), 6, beams=2)
    model.advance(IDS[:, :2], decoding)
    decoding.reorder(torch.tensor([0, 0]))
    log_probs = model.advance(IDS[:, 2:3], decoding)
    ids = torch.stack((torch.cat((IDS[0, :2], IDS[0, 2:3])), torch.cat((IDS[0, :2], IDS[1, 2:3]))))
    whole = model.log_probs(Batch(ids, prefix=(torch.arange(3) < 2).expand(2, 3)))
    torch.testing.assert_close(log_probs, whole[:, 2])


def test_strict_decoder_does_not_attend_to_its_own_token(decoder: Decoder) -> None:
    """C45: the first query attends to nothing, and outputs and gradients stay finite."""
    model = build(edited(decoder(), {"decoder.strict": True}))
    assert isinstance(model, DecoderOnlyModel)
    attended = attended_keys(model, Batch(IDS))
    assert attended[0] == [[int(j < i) for j in range(6)] for i in range(6)]
    loss = model.loss(Batch(IDS, IDS)).total
    loss.backward()
    assert bool(loss.isfinite())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("static", [False, True])
def test_decoding_equals_a_forward_pass_over_all_tokens(static: bool, decoder: Decoder, perturbed: Perturbed) -> None:
    model = perturbed(build(decoder()))
    whole, decoding = model.log_probs(Batch(IDS)), model.start(Batch(IDS), 7, static=static)
    torch.testing.assert_close(model.advance(IDS[:, :3], decoding), whole[:, 2])
    for t in (3, 4, 5):
        torch.testing.assert_close(model.advance(IDS[:, t : t + 1], decoding), whole[:, t])


def test_several_token_types_are_refused(decoder: Decoder) -> None:
    with pytest.raises(SpecError, match=r"^input\.types: only an encoder reads several types"):
        decoder(input=Tokens(types=2))
