"""The gated delta rule equals that of Qwen3-Next in Hugging Face Transformers, with copied weights, in float64."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from regard import Batch, DecoderOnly, build, fast
from regard.fast.gated_delta import chunked_gated_delta_rule
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta, gated_delta_rule, unit
from regard.nn.embedding import Tokens
from regard.nn.linear import Dense
from regard.nn.residual import PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.weights import Input, computed, copy_from

from .copying import close, randomise

pytestmark = pytest.mark.usefixtures("doubled")

D, G, H, K, V, TAPS, VOCAB = 12, 2, 4, 6, 5, 3, 17  # G key heads, H heads


@pytest.fixture
def doubled(exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use float64 also where Qwen3-Next computes decays by `Tensor.float`."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("theirs", [qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("ours", [gated_delta_rule, chunked_gated_delta_rule])
def test_the_rule(ours: Any, theirs: Any) -> None:
    B, T = 2, 135
    q, k, v = torch.randn(B, H, T, K), torch.randn(B, H, T, K), torch.randn(B, H, T, V)
    log_decay, strength, state = -2 * torch.rand(B, H, T), torch.rand(B, H, T), torch.randn(B, H, K, V)
    by_token = [x.transpose(1, 2) for x in (q, k, v, log_decay, strength)]
    y, last = theirs(*by_token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    mine, mine_last = ours(unit(q) * K**-0.5, unit(k), v, log_decay, strength, state)
    close(mine, y.transpose(1, 2), 1e-12)
    close(mine_last, last, 1e-12)


def qwen_model() -> Any:
    """Return a Qwen3-Next with two gated delta layers and dense feed-forward layers.

    Its cache needs a layer of attention, so there is a third layer, whose output is zero.
    """
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=10,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mlp_only_layers=[0, 1, 2],
        linear_num_key_heads=G,
        linear_num_value_heads=H,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=TAPS,
        tie_word_embeddings=True,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.Qwen3NextForCausalLM(config).eval()
    randomise(model)
    last: Any = model.model.layers[2]
    torch.nn.init.zeros_(last.self_attn.o_proj.weight)
    torch.nn.init.zeros_(last.mlp.down_proj.weight)
    return model


def by_role(qkvz: Tensor, ba: Tensor) -> Tensor:
    """Return the rows of `input.weight`. In Qwen3-Next, the rows of all roles of one key head are neighbours."""
    per = H // G
    q, k, v, z = qkvz.unflatten(0, (G, -1)).split([K, K, per * V, per * V], 1)
    b, a = ba.unflatten(0, (G, -1)).split([per, per], 1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v, z, b, a)])


def mapping(ours: str, theirs: str) -> dict[str, Input]:
    return {
        f"{ours}input.weight": computed(by_role, f"{theirs}in_proj_qkvz.weight", f"{theirs}in_proj_ba.weight"),
        f"{ours}filters": computed(lambda weight: weight[:, 0], f"{theirs}conv1d.weight"),
        f"{ours}log_rate": f"{theirs}A_log",
        f"{ours}step_bias": f"{theirs}dt_bias",
        f"{ours}norm": f"{theirs}norm",
        f"{ours}output": f"{theirs}out_proj",
    }


@pytest.mark.parametrize("chunked", [False, True])
def test_a_language_model_and_its_cached_decoding(chunked: bool) -> None:
    theirs = qwen_model()
    block = Block((GatedDelta(H, G, K, V, TAPS), FeedForward(10, "swish", gated=True)), PreNorm(RMSNorm()))
    spec = DecoderOnly(
        vocab=VOCAB,
        d_model=D,
        heads=1,
        input=Tokens(scaled=False, position=None),
        decoder=Plain((block,), 2),
        linear=Dense(bias=False),
    )
    ours: Any = build(spec).eval()
    names: dict[str, Input] = {"tables.tables.target": "model.embed_tokens"}
    for layer in range(2):
        mine, its = f"decoder.blocks.{layer}.branches", f"model.layers.{layer}"
        names |= mapping(f"{mine}.0.branch.", f"{its}.linear_attn.")
        names |= {f"{mine}.1.branch.{part}": f"{its}.mlp.{part}_proj" for part in ("gate", "up", "down")}
        names[f"{mine}.0.norm.weight"] = computed(one_more, f"{its}.input_layernorm.weight")
        names[f"{mine}.1.norm.weight"] = computed(one_more, f"{its}.post_attention_layernorm.weight")
    names["decoder.end.weight"] = computed(one_more, "model.norm.weight")
    copy_from(ours, names, theirs, unused=["model.layers.2.*"])
    if chunked:
        fast.install(ours)
    ids = torch.randint(3, VOCAB, (2, 70))
    with torch.no_grad():
        close(ours.log_probs(Batch(ids)), theirs(ids).logits.log_softmax(-1))

    prompt = ids[:, :6]
    output = theirs.generate(
        prompt, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    decoding, read = ours.start(Batch(prompt), 14), prompt
    for step, logits in enumerate(output.logits):
        with torch.no_grad():
            close(ours.advance(read, decoding), logits.log_softmax(-1))
        read = output.sequences[:, 6 + step, None]


def one_more(gain: Tensor) -> Tensor:
    """Return the gain of a norm of Qwen3-Next, which stores gain - 1, except in the gated delta layer."""
    return gain + 1
