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
Shaken = Callable[[Any], DecoderOnlyModel]
CPU = torch.device("cpu")
IDS = torch.randint(3, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def test_how_the_parts_are_wired(decoder: Decoder, shaken: Shaken) -> None:
    model = shaken(build(decoder()))
    table = model.tables.get("target")
    assert table is not None
    assert model.tables.get("output") is table
    x = table(IDS) * 8**0.5 + Sinusoidal().table(6, 8)
    h = model.decoder(x, Context(View(Mask(causal=True), 6, 6, CPU))).x
    torch.testing.assert_close(model.log_probs(Batch(IDS)), table.logits(h).log_softmax(-1))


def test_untied_has_one_table_more(decoder: Decoder) -> None:
    assert count(decoder(tied=False)) - count(decoder()) == 11 * 8


def seen(model: DecoderOnlyModel, batch: Batch) -> list[list[list[int]]]:
    """Which keys each query of each row gives weight to, in the first layer's first head."""
    trace = Trace()
    model.log_probs(batch, trace)
    return (trace.weights["decoder.self"][0][:, 0] > 0).long().tolist()


def test_a_prefix_is_seen_by_all(decoder: Decoder) -> None:
    model = build(decoder(visibility="prefix"))
    assert isinstance(model, DecoderOnlyModel)
    prefix = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    found = seen(model, Batch(IDS, prefix=prefix))
    for b in range(2):
        for i in range(6):
            assert found[b][i] == [int(j <= i or bool(prefix[b, j])) for j in range(6)]


def test_the_first_advance_of_a_prefix_lm_reads_the_prefix(decoder: Decoder, shaken: Shaken) -> None:
    model = shaken(build(decoder(visibility="prefix")))
    lengths = [3, 1]
    prefix = torch.arange(6) < torch.tensor(lengths)[:, None]
    whole = model.log_probs(Batch(IDS, prefix=prefix))
    decoding = model.start(Batch(IDS[:, :1]), 6)
    prompt, seg = IDS[:, :3].clone(), torch.tensor([[1, 1, 1], [1, 0, 0]])
    said = model.advance(prompt, decoding, seg)
    for more in range(3):
        torch.testing.assert_close(said, torch.stack([whole[b, lengths[b] - 1 + more] for b in range(2)]))
        following = torch.stack([IDS[b, lengths[b] + more] for b in range(2)])
        said = model.advance(following[:, None], decoding)


def test_reordering_carries_the_prefix(decoder: Decoder, shaken: Shaken) -> None:
    """Two beams of one source row whose prefixes are equally long: row 1 takes over row 0's text."""
    model = shaken(build(decoder(visibility="prefix")))
    decoding = model.start(Batch(IDS[:1, :1]), 6, beams=2)
    model.advance(IDS[:, :2], decoding)
    decoding.reorder(torch.tensor([0, 0]))
    said = model.advance(IDS[:, 2:3], decoding)
    text = torch.stack((torch.cat((IDS[0, :2], IDS[0, 2:3])), torch.cat((IDS[0, :2], IDS[1, 2:3]))))
    whole = model.log_probs(Batch(text, prefix=(torch.arange(3) < 2).expand(2, 3)))
    torch.testing.assert_close(said, whole[:, 2])


def test_a_strict_decoder_is_defined_and_does_not_read_its_own_token_by_attention(decoder: Decoder) -> None:
    """C45: the first row sees nothing; outputs and gradients stay finite."""
    model = build(edited(decoder(), {"decoder.strict": True}))
    assert isinstance(model, DecoderOnlyModel)
    found = seen(model, Batch(IDS))
    assert found[0] == [[int(j < i) for j in range(6)] for i in range(6)]
    loss = model.loss(Batch(IDS, IDS)).total
    loss.backward()
    assert bool(loss.isfinite())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("static", [False, True])
def test_decoding_says_what_training_says(static: bool, decoder: Decoder, shaken: Shaken) -> None:
    model = shaken(build(decoder()))
    whole, decoding = model.log_probs(Batch(IDS)), model.start(Batch(IDS), 7, static=static)
    torch.testing.assert_close(model.advance(IDS[:, :3], decoding), whole[:, 2])
    for t in (3, 4, 5):
        torch.testing.assert_close(model.advance(IDS[:, t : t + 1], decoding), whole[:, t])


def test_several_kinds_of_tokens_are_refused(decoder: Decoder) -> None:
    with pytest.raises(SpecError, match=r"^input\.types: only an encoder reads several types"):
        decoder(input=Tokens(types=2))
