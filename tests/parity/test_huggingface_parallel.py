"""Hugging Face's Falcon at a tiny size: branches side by side, one key and value for all heads, rotary positions."""

from dataclasses import replace
from typing import Any

import torch
import transformers

from regard import Batch, build, preset
from regard.models.decoder_only import DecoderOnlyModel
from regard.nn.linear import Dense
from regard.variants import apply

from .copying import close, copy_all, greedy, randomise

hub: Any = transformers  # pyright cannot follow its generated signatures
V, D, H = 53, 24, 4


def falcon() -> Any:
    config = hub.FalconConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=H,
        layer_norm_epsilon=0.01,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        parallel_attn=True,
        multi_query=True,
        new_decoder_architecture=False,
        alibi=False,
        bias=False,
        attn_implementation="eager",
    )
    theirs = hub.FalconForCausalLM(config).eval()
    randomise(theirs)
    return theirs


def model(theirs: Any) -> DecoderOnlyModel:
    overrides: dict[str, Any] = {"decoder.depth": 2, "decoder.pattern[0].branches[1].d_hidden": 4 * D}
    spec: Any = preset("gpt2_small", vocab=V, d_model=D, heads=H, **overrides)
    spec = replace(spec, linear=Dense(bias=False))
    for name in ("rotary", "multi_query", "parallel"):
        spec = apply(name, spec)
    block = spec.decoder.pattern[0]
    attention, feedforward = block.branches[0].branches
    block = replace(
        block,
        branches=(replace(block.branches[0], branches=(attention, replace(feedforward, activation="gelu"))),),
        residual=replace(block.residual, norm=replace(block.residual.norm, eps=0.01)),
    )
    ours = build(replace(spec, decoder=replace(spec.decoder, pattern=(block,))))
    assert isinstance(ours, DecoderOnlyModel)
    our, their = "decoder.blocks.*.branches.0", "transformer.h.*"
    mapping = {
        "tables.tables.target": "transformer.word_embeddings",
        f"{our}.norm": f"{their}.input_layernorm",
        f"{our}.branch.branches.0.qkv": f"{their}.self_attention.query_key_value",
        f"{our}.branch.branches.0.output": f"{their}.self_attention.dense",
        f"{our}.branch.branches.1.up": f"{their}.mlp.dense_h_to_4h",
        f"{our}.branch.branches.1.down": f"{their}.mlp.dense_4h_to_h",
        "decoder.end": "transformer.ln_f",
    }
    copy_all(ours, theirs, mapping)
    return ours.eval()


def test_falcon(exact: None) -> None:
    theirs = falcon()
    ours = model(theirs)
    ids = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(ours.log_probs(Batch(ids)), theirs(ids).logits.log_softmax(-1))
        batch = Batch(ids[:, :3])
        output, scores = greedy(ours, ours.start(batch, 12), ids[:, :3], 5)
        for row in range(2):
            whole = torch.cat((ids[row, :3], output[row]))[None]
            close(scores[row], theirs(whole).logits.log_softmax(-1)[0, 2:-1])
