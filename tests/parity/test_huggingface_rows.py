"""Rows 2 to 12 and 18 to 31 of the table as Hugging Face's T5, row 24 also as Albert, the pooling of row 50.

What a T5 configuration cannot express is changed in the model: activations, blocks and tables are replaced there.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.funnel.modeling_funnel import FunnelAttentionStructure

from regard import Batch, ModelSpec, build, preset
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.models.encoder_only import PooledModel
from regard.nn.norm import NoNorm
from regard.nn.position.bias import T5Bias
from regard.nn.stacks.funnel import halved
from regard.testing import tiny
from regard.variants import VARIANTS, apply
from regard.weights import Input, cat, computed

from . import copying
from .copying import close, copy_all, randomise
from .test_huggingface import EPS, sentences, widths

hub: Any = transformers  # pyright cannot follow its generated signatures
V, D, HEADS, HIDDEN, NARROW = 53, 24, 6, 24, 4
STACKS = ("encoder", "decoder")

pytestmark = pytest.mark.usefixtures("exact")


@dataclass(frozen=True)
class Peer:
    """The T5 of a table row, as differences from a T5 with 2 layers, 6 heads and hidden width 24."""

    activation: str = "relu"
    hidden: int = HIDDEN
    depth: int = 2
    heads: int = HEADS
    shared: tuple[str, ...] = ()  # stacks that repeat one block
    tables: tuple[str, str, str] = ("source", "source", "source")  # of source, target and output
    narrow: bool = False  # the source's table is a product of two


OWN = ("source", "source", "output")
ROWS = {
    "gelu": Peer("gelu_new"),
    "swish": Peer("silu"),
    "elu": Peer("elu"),
    "glu": Peer("gated-sigmoid", 16),
    "geglu": Peer("gated-gelu_new", 16),
    "reglu": Peer("gated-relu", 16),
    "selu": Peer("selu"),
    "swiglu": Peer("gated-silu", 16),
    "liglu": Peer("gated-linear", 16),
    "sigmoid": Peer("sigmoid"),
    "softplus": Peer("softplus"),
    "layers_24": Peer(hidden=12, depth=12, heads=3),
    "layers_18": Peer(hidden=16, depth=9, heads=4),
    "layers_8": Peer(hidden=36, depth=4, heads=9),
    "layers_6": Peer(hidden=48, depth=3, heads=12),
    "block_sharing": Peer(shared=STACKS, tables=OWN),
    "block_sharing_factorised": Peer(shared=STACKS, tables=OWN, narrow=True),
    "block_sharing_factorised_shared": Peer(shared=STACKS, narrow=True),
    "block_sharing_encoder": Peer(shared=("encoder",), tables=OWN),
    "block_sharing_decoder": Peer(shared=("decoder",), tables=OWN),
    "factorised": Peer(tables=OWN, narrow=True),
    "factorised_shared": Peer(narrow=True),
    "tied_inputs": Peer(tables=OWN),
    "tied_decoder": Peer(tables=("source", "target", "target")),
    "untied": Peer(tables=("source", "target", "output")),
}


def t5(peer: Peer) -> Any:
    """Return their model, without unused parameters."""
    unknown = {"elu": nn.ELU, "selu": nn.SELU, "softplus": nn.Softplus}.get(peer.activation)
    theirs = hub.T5ForConditionalGeneration(
        hub.T5Config(
            vocab_size=V,
            d_model=D,
            d_kv=5,
            d_ff=peer.hidden,
            num_layers=peer.depth,
            num_heads=peer.heads,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=11,
            layer_norm_epsilon=EPS,
            feed_forward_proj="relu" if unknown else peer.activation,
            tie_word_embeddings=peer.tables[2] == peer.tables[1],  # since version 5 it only sets the scaling
        )
    ).eval()
    for module in theirs.modules():
        if unknown and hasattr(module, "wi"):
            module.act = unknown()
    for side in peer.shared:
        stack = getattr(theirs, side)
        stack.block = nn.ModuleList([stack.block[0]] * peer.depth)
    for owner in set(peer.tables[1:]) - {"source"}:
        table = nn.Embedding(V, D)
        if peer.tables[1] == owner:
            theirs.decoder.embed_tokens = table
        if peer.tables[2] == owner:
            theirs.lm_head.weight = table.weight
    randomise(theirs, 0.1)
    return theirs


def described(name: str) -> ModelSpec:
    base = preset(
        "t5_base",
        **widths(HIDDEN, True, *STACKS),
        **{f"{stack}.position": T5Bias(8, 11) for stack in STACKS},
        **{f"{stack}.depth": 6 if VARIANTS[name].group == "depth" else 2 for stack in STACKS},
        **{"vocab": V, "d_model": D, "heads": HEADS, "d_head": 5},
    )
    return apply(name, base)


def copied(ours: nn.Module, theirs: Any, peer: Peer) -> None:
    mapping = copying.t5(peer.activation.startswith("gated"))
    kept = {"source": "shared", "target": "decoder.embed_tokens", "output": "lm_head"}
    mapping |= {f"tables.tables.{owner}": kept[owner] for owner in set(peer.tables)}
    extra = 0
    if peer.narrow:  # theirs is the product of ours
        weight, projection = torch.randn(V, NARROW) * 0.5, torch.randn(D, NARROW) * 0.5
        theirs.shared.weight.data.copy_(weight @ projection.T)
        del mapping["tables.tables.source"]
        mapping["tables.tables.source.weight"] = computed(lambda _: weight, "shared.weight")
        mapping["tables.tables.source.projection"] = projection
        extra = V * D - (V + D) * NARROW
    copy_all(ours, theirs, mapping, extra)


def test_every_row_with_a_peer_is_here() -> None:
    numbers = {name: variant.row.number for name, variant in VARIANTS.items() if variant.row is not None}
    assert {name for name, n in numbers.items() if 2 <= n <= 12 or 18 <= n <= 31} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_t5(name: str) -> None:
    """log p, the loss, and the gradients of the source's table and of a block that may be shared."""
    peer, theirs, ours = ROWS[name], t5(ROWS[name]), build(described(name)).eval()
    assert isinstance(ours, EncoderDecoderModel)
    copied(ours, theirs, peer)
    source, source_seg = sentences([20, 14, 1])
    target, target_seg = sentences([11, 15, 3], seed=2)
    labels, _ = sentences([11, 15, 3], seed=3)
    decoder_inputs = {"decoder_input_ids": target, "decoder_attention_mask": target_seg}
    # A cache would take a shared block for one layer.
    expected = theirs(
        source, source_seg, **decoder_inputs, labels=labels.masked_fill(target_seg == 0, -100), use_cache=False
    )
    batch = Batch(target, labels, target_seg, source, source_seg)
    close(ours.log_probs(batch), expected.logits.log_softmax(-1), 1e-9, target_seg)
    loss = ours.loss(batch)
    mean = loss.total / loss.tokens
    close(mean, expected.loss)
    paths = ["tables.tables.source.weight", *(f"{side}.blocks.0.branches.0.branch.output.weight" for side in STACKS)]
    our_parameters = [ours.get_parameter(path) for path in paths]
    paths = ["shared.weight", *(f"{side}.block.0.layer.0.SelfAttention.o.weight" for side in STACKS)]
    their_gradients = list(torch.autograd.grad(expected.loss, [theirs.get_parameter(path) for path in paths]))
    if peer.narrow:
        their_gradients[0] = their_gradients[0] @ ours.get_parameter("tables.tables.source.projection")
    for our, their in zip(torch.autograd.grad(mean, our_parameters), their_gradients, strict=True):
        assert their.abs().max() > 1e-4
        close(our, their, 1e-8)


@pytest.mark.parametrize("depth", [1, 4])
def test_albert(depth: int) -> None:
    """One block for all layers, and narrow inputs. Theirs have a norm before the projection, which is taken out."""
    config = hub.AlbertConfig(
        vocab_size=V,
        embedding_size=NARROW,
        hidden_size=D,
        num_hidden_layers=depth,
        num_hidden_groups=1,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=20,
        layer_norm_eps=EPS,
    )
    theirs = hub.AlbertModel(config).eval()
    theirs.embeddings.LayerNorm = nn.Identity()
    randomise(theirs)
    base = preset(
        "bert_base",
        **widths(HIDDEN, True, "encoder"),
        **{"encoder.depth": depth, "encoder.pattern[0].branches[1].activation": "gelu_tanh"},
        **{"input.types": 0, "input.position.max_len": 20, "input.norm": NoNorm()},
        **{"vocab": V, "d_model": D, "heads": HEADS},
    )
    ours = build(apply("block_sharing_factorised_shared", base)).eval()
    assert isinstance(ours, PooledModel)
    their, our = "encoder.albert_layer_groups.0.albert_layers.0", "encoder.stack.blocks.0.branches"
    mapping: dict[str, Input] = {
        "encoder.tables.tables.source.weight": "embeddings.word_embeddings.weight",
        "encoder.tables.tables.source.projection": "encoder.embedding_hidden_mapping_in.weight",
        # Narrow positions, the one type of token and the bias of the projection are wide positions.
        "encoder.inputs.inputs.source.position.weight": computed(
            lambda positions, types, weight, bias: (positions + types[0]) @ weight.T + bias,
            "embeddings.position_embeddings.weight",
            "embeddings.token_type_embeddings.weight",
            "encoder.embedding_hidden_mapping_in.weight",
            "encoder.embedding_hidden_mapping_in.bias",
        ),
        "pool.pooler": "pooler",
        f"{our}.0.branch.qkv": cat(*(f"{their}.attention.{x}" for x in ("query", "key", "value"))),
        f"{our}.0.branch.output": f"{their}.attention.dense",
        f"{our}.0.norm": f"{their}.attention.LayerNorm",
        f"{our}.1.branch.up": f"{their}.ffn",
        f"{our}.1.branch.down": f"{their}.ffn_output",
        f"{our}.1.norm": f"{their}.full_layer_layer_norm",
    }
    copy_all(ours, theirs, mapping, 20 * NARROW + 2 * NARROW + D - 20 * D)
    ids, seg = sentences([12, 5, 1, 20])
    expected = theirs(ids, attention_mask=seg)
    batch = Batch(ids, target_seg=seg)
    close(ours.encoder(batch).x, expected.last_hidden_state, 1e-9, seg)
    close(ours(batch), expected.pooler_output)


@pytest.mark.parametrize("length", [8, 12, 7, 5])
def test_funnel_pools_as_funnel_does(length: int) -> None:
    """The mean of pairs, twice. Their attention differs, so only lengths and pools can be compared."""
    config = hub.FunnelConfig(
        vocab_size=V,
        block_sizes=[1, 1, 1],
        d_model=D,
        n_head=2,
        d_head=4,
        d_inner=HIDDEN,
        pooling_type="mean",
        separate_cls=False,
        truncate_seq=False,
    )
    x = torch.randn(3, length, D)
    pool = FunnelAttentionStructure(config).pool_tensor
    once, seg = halved(x, None)
    assert seg is None
    close(once, pool(x))
    close(halved(once, None)[0], pool(pool(x)))
    ids = torch.randint(3, V, (3, length))
    ours = build(apply("funnel", tiny.narang(depth=3))).eval()
    assert isinstance(ours, EncoderDecoderModel)
    memory = ours.encode(Batch(ids[:, :1] % tiny.VOCAB, source=ids % tiny.VOCAB)).x[0]
    assert memory.shape[1] == hub.FunnelBaseModel(config).eval()(ids).last_hidden_state.shape[1]
