"""Recurrent encoder-decoders equal fairseq's LSTM with attention and input feeding, with the same weights."""

from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.lstm import LSTMDecoder, LSTMEncoder
from torch import Tensor

from regard.batch import Batch
from regard.models.baselines.attention_score import BilinearScore
from regard.models.baselines.rnn import EncoderState, Recurrent, RecurrentDecoder, RecurrentEncoder
from regard.models.build import build
from regard.nn.embedding import Tokens
from regard.nn.recurrent import LSTM
from regard.nn.trace import Trace
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Sharing

pytestmark = pytest.mark.oracle

D, DEPTH = 8, 2
SOURCE = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0], [6, 0, 0, 0, 0]])
TARGET = torch.tensor([[2, 5, 6, 7], [2, 9, 8, 7], [2, 4, 4, 5]])


def copy_cell(ours: Any, state: dict[str, Tensor], suffix: str) -> None:
    """Copy the weights of a cell. fairseq has two biases, whose sum is our bias."""
    ours.input.weight.copy_(state[f"weight_ih{suffix}"])
    ours.input.bias.copy_(state[f"bias_ih{suffix}"] + state[f"bias_hh{suffix}"])
    ours.hidden.weight.copy_(state[f"weight_hh{suffix}"])


@pytest.mark.parametrize("both", [False, True], ids=["forwards", "both directions"])
def test_a_model_equals_fairseq(both: bool) -> None:
    torch.manual_seed(0)
    words = Dictionary()
    for i in range(8):
        words.add_symbol(str(i))
    common = {"embed_dim": D, "hidden_size": D, "num_layers": DEPTH, "dropout_in": 0.0, "dropout_out": 0.0}
    encoder = LSTMEncoder(words, bidirectional=both, left_pad=False, **common).double().eval()
    decoder = LSTMDecoder(words, out_embed_dim=D, encoder_output_units=encoder.output_units, **common).double().eval()
    spec = Recurrent(
        vocab=len(words),
        d_model=D,
        dropout=0.0,
        sharing=Sharing(source_target=False, input_output=False),
        input=Tokens(scaled=False, position=None),
        encoder=RecurrentEncoder(LSTM(), DEPTH, direction="both" if both else "forwards"),
        decoder=RecurrentDecoder(
            LSTM(), DEPTH, initial_state=EncoderState("linear"), attention=BilinearScore(), input_feeding="output"
        ),
        head=Softmax(bias=True),
    )
    ours: Any = build(spec).double().eval()
    for parameter in (*encoder.parameters(), *decoder.parameters()):
        torch.nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        for use, table in {
            "source": encoder.embed_tokens,
            "target": decoder.embed_tokens,
            "output": decoder.fc_out,
        }.items():
            ours.tables.get(use).weight.copy_(table.weight)
        ours.head.bias.copy_(decoder.fc_out.bias)
        state = encoder.lstm.state_dict()
        for i, layer in enumerate(ours.encoder.layers):
            for cell, suffix in zip(layer.cells, ("", "_reverse"), strict=False):
                copy_cell(cell, state, f"_l{i}{suffix}")
        for i, cell in enumerate(ours.decoder.cells):
            copy_cell(cell, decoder.layers[i].state_dict(), "")
            for part, name in enumerate(("hidden", "cell")):
                mapped, their_map = ours.decoder.opening.maps[i][part], getattr(decoder, f"encoder_{name}_proj")
                mapped.weight.copy_(torch.eye(D) if their_map is None else their_map.weight)
                mapped.bias.copy_(torch.zeros(D) if their_map is None else their_map.bias)
        ours.decoder.cross.query.weight.copy_(decoder.attention.input_proj.weight)
        context_weight, h = decoder.attention.output_proj.weight.split((encoder.output_units, D), 1)
        ours.decoder.joint.weight.copy_(torch.cat((h, context_weight), 1))

    lengths = (SOURCE != 0).sum(1)
    padded = SOURCE.masked_fill(SOURCE == 0, words.pad())
    with torch.no_grad():
        encoded = encoder(padded, lengths)
        logits, their_weights = decoder(TARGET, encoded)
        trace = Trace()
        batch = Batch(TARGET, source=padded, source_seg=(SOURCE != 0).long())
        log_probs = ours.log_probs(batch, trace=trace)
        torch.testing.assert_close(log_probs, logits.log_softmax(-1), rtol=0, atol=1e-9)
        # fairseq returns attention weights as (B, T, S) here.
        weights = trace.weights["decoder.cross"][0].mean(1)
        torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-6)
        decoding = ours.start(batch, 5)
        steps: dict[str, Any] = {}
        for t in range(TARGET.shape[1]):
            theirs, _ = decoder(TARGET[:, : t + 1], encoded, incremental_state=steps)
            actual = ours.advance(TARGET[:, t : t + 1], decoding)
            torch.testing.assert_close(actual, theirs[:, -1].log_softmax(-1), rtol=0, atol=1e-9)
