"""Against fairseq's LSTM encoder-decoder with attention and input feeding, with copied random weights."""

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
    """fairseq's two biases are one here."""
    ours.input.weight.copy_(state[f"weight_ih{suffix}"])
    ours.input.bias.copy_(state[f"bias_ih{suffix}"] + state[f"bias_hh{suffix}"])
    ours.hidden.weight.copy_(state[f"weight_hh{suffix}"])


@pytest.mark.parametrize("both", [False, True], ids=["forwards", "both ways"])
def test_a_model_equals_fairseq(both: bool) -> None:
    torch.manual_seed(0)
    words = Dictionary()
    for i in range(8):
        words.add_symbol(str(i))
    common = {"embed_dim": D, "hidden_size": D, "num_layers": DEPTH, "dropout_in": 0.0, "dropout_out": 0.0}
    reader = LSTMEncoder(words, bidirectional=both, left_pad=False, **common).double().eval()
    speaker = LSTMDecoder(words, out_embed_dim=D, encoder_output_units=reader.output_units, **common).double().eval()
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
    for parameter in (*reader.parameters(), *speaker.parameters()):
        torch.nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        for use, table in {
            "source": reader.embed_tokens,
            "target": speaker.embed_tokens,
            "output": speaker.fc_out,
        }.items():
            ours.tables.get(use).weight.copy_(table.weight)
        ours.head.bias.copy_(speaker.fc_out.bias)
        state = reader.lstm.state_dict()
        for i, layer in enumerate(ours.encoder.layers):
            for cell, way in zip(layer.cells, ("", "_reverse"), strict=False):
                copy_cell(cell, state, f"_l{i}{way}")
        for i, cell in enumerate(ours.decoder.cells):
            copy_cell(cell, speaker.layers[i].state_dict(), "")
            for part, name in enumerate(("hidden", "cell")):
                mapped, given = ours.decoder.opening.maps[i][part], getattr(speaker, f"encoder_{name}_proj")
                mapped.weight.copy_(torch.eye(D) if given is None else given.weight)
                mapped.bias.copy_(torch.zeros(D) if given is None else given.bias)
        ours.decoder.cross.query.weight.copy_(speaker.attention.input_proj.weight)
        found, h = speaker.attention.output_proj.weight.split((reader.output_units, D), 1)
        ours.decoder.joint.weight.copy_(torch.cat((h, found), 1))

    lengths = (SOURCE != 0).sum(1)
    padded = SOURCE.masked_fill(SOURCE == 0, words.pad())
    with torch.no_grad():
        encoded = reader(padded, lengths)
        logits, looked = speaker(TARGET, encoded)
        trace = Trace()
        batch = Batch(TARGET, source=padded, source_seg=(SOURCE != 0).long())
        said = ours.log_probs(batch, trace=trace)
        torch.testing.assert_close(said, logits.log_softmax(-1), rtol=0, atol=1e-9)
        # fairseq keeps attention as (T, B, S) here: it turns (S, T, B) around.
        weights = trace.weights["decoder.cross"][0].mean(1)
        torch.testing.assert_close(weights, looked, rtol=0, atol=1e-6)
        decoding = ours.start(batch, 5)
        steps: dict[str, Any] = {}
        for t in range(TARGET.shape[1]):
            theirs, _ = speaker(TARGET[:, : t + 1], encoded, incremental_state=steps)
            mine = ours.advance(TARGET[:, t : t + 1], decoding)
            torch.testing.assert_close(mine, theirs[:, -1].log_softmax(-1), rtol=0, atol=1e-9)
