"""Hugging Face: Marian, T5, BERT, GPT-2 and Llama at a tiny size, with our presets edited to match."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from regard import Batch, Classifier, DecoderOnly, ModelSpec, Spec, build, count, preset
from regard.batch import pad
from regard.models.base import LanguageModel
from regard.models.decoder_only import DecoderOnlyModel
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.models.encoder_only import MaskedLM, MaskedLMModel, PooledModel, SentenceClassifier, TokenClassifier
from regard.models.loss import Loss
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.linear import Dense
from regard.nn.norm import LayerNorm
from regard.nn.position.bias import T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.tree import get_at
from regard.weights import Input, cat, computed, transpose

from . import copying
from .copying import close, copy_all, greedy, randomise, size

hub: Any = transformers  # pyright cannot follow its generated signatures
V, D, H, HIDDEN, STEPS = 53, 24, 4, 40, 9
EPS = 0.01  # of every norm with this setting: large, so that a wrong eps changes the result


@pytest.fixture(params=["float64", "float32"])
def tolerance(request: pytest.FixtureRequest) -> float:
    """The accepted difference: with Hugging Face in float64, and unmodified."""
    if request.param == "float32":
        return 1e-5
    request.getfixturevalue("exact")
    return 1e-9


def sentences(lengths: list[int], vocab: int = V, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return rows of random ids, and their segments."""
    generator = torch.Generator().manual_seed(seed)
    return pad([torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths])


def generated_by(model: Any, *read: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return their greedy continuation without repeated tokens, and log p of every token at each step."""
    out = model.generate(
        *read,
        do_sample=False,
        num_beams=1,
        no_repeat_ngram_size=1,
        max_new_tokens=STEPS,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences[:, -len(out.logits) :], torch.stack(out.logits, 1).log_softmax(-1)


def same_loss(ours: Loss, theirs: Tensor, tolerance: float, tables: tuple[Tensor, Tensor] | None = None) -> None:
    """Assert that mean losses agree, and gradients with respect to an embedding table of each model."""
    mean = ours.total / ours.tokens
    close(mean, theirs.to(mean.dtype), tolerance)
    close(ours.nll, ours.total.detach())  # nothing is smoothed in evaluation
    if tables is not None:
        (our,), (their,) = (torch.autograd.grad(y, x) for y, x in zip((mean, theirs), tables, strict=True))
        assert their.abs().max() > 1e-3
        close(our, their, 10 * tolerance)  # more operations, more rounding


def widths(hidden: int, norm: bool, *stacks: str) -> dict[str, Any]:
    """Return preset overrides for the sizes inside the stacks."""
    paths = {f"{stack}.pattern[0].branches[-1].d_hidden": hidden for stack in stacks}
    return paths | ({f"{stack}.pattern[0].residual.norm.eps": EPS for stack in stacks} if norm else {})


def marian(shared: bool = True, scaled: bool = True, activation: str = "relu") -> Any:
    config = hub.MarianConfig(
        vocab_size=V,
        decoder_vocab_size=V if shared else V - 4,
        share_encoder_decoder_embeddings=shared,
        max_position_embeddings=40,
        d_model=D,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=H,
        decoder_attention_heads=H,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        activation_function=activation,
        scale_embedding=scaled,
        pad_token_id=0,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        eos_token_id=None,
    )
    theirs = hub.MarianMTModel(config).eval()
    randomise(theirs)
    theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    return theirs


def marian_spec(shared: bool = True, scaled: bool = True, activation: str = "relu") -> ModelSpec:
    activation = {"gelu_new": "gelu_tanh"}.get(activation, activation)
    return preset(
        "transformer_tiny",
        **widths(HIDDEN, False, "encoder", "decoder"),
        **{f"{stack}.pattern[0].branches[-1].activation": activation for stack in ("encoder", "decoder")},
        **{"encoder.depth": 2, "decoder.depth": 3, "input.position.layout": "halves", "input.scaled": scaled},
        **{"vocab": V, "target_vocab": None if shared else V - 4, "sharing.source_target": shared},
        **{"d_model": D, "heads": H, "head.bias": True},
    )


def marian_model(theirs: Any, spec: ModelSpec, shared: bool = True) -> EncoderDecoderModel:
    ours = build(spec)
    assert isinstance(ours, EncoderDecoderModel)
    mapping: dict[str, Input] = {
        "tables.tables.source": "model.encoder.embed_tokens",
        "head.bias": computed(lambda bias: bias[0], "final_logits_bias"),
    }
    if not shared:
        mapping["tables.tables.target"] = "model.decoder.embed_tokens"
    for side, last in (("encoder", 1), ("decoder", 2)):
        our, their = f"{side}.blocks.*.branches", f"model.{side}.layers.*"
        mapping |= {
            f"{our}.0.branch.qkv": cat(*(f"{their}.self_attn.{x}_proj" for x in "qkv")),
            f"{our}.0.branch.output": f"{their}.self_attn.out_proj",
            f"{our}.0.norm": f"{their}.self_attn_layer_norm",
            f"{our}.{last}.branch.up": f"{their}.fc1",
            f"{our}.{last}.branch.down": f"{their}.fc2",
            f"{our}.{last}.norm": f"{their}.final_layer_norm",
        }
    cross = "model.decoder.layers.*.encoder_attn"
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    mapping |= {f"decoder.blocks.*.branches.1.branch.{name}": f"{cross}.{x}" for name, x in names.items()}
    mapping["decoder.blocks.*.branches.1.norm"] = f"{cross}_layer_norm"
    copy_all(ours, theirs, mapping, extra=-theirs.final_logits_bias.numel())  # a buffer there, a parameter here
    return ours.eval()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("scaled", "activation"), [(True, "relu"), (True, "swish"), (False, "gelu"), (False, "gelu_new")]
)
def test_marian(tolerance: float, shared: bool, scaled: bool, activation: str) -> None:
    theirs = marian(shared, scaled, activation)
    ours = marian_model(theirs, marian_spec(shared, scaled, activation), shared)
    source, source_seg = sentences([9, 4, 1])
    target, target_seg = sentences([5, 8, 3], V - 4, seed=2)
    labels, _ = sentences([5, 8, 3], V - 4, seed=3)
    expected = theirs(
        source,
        source_seg,
        decoder_input_ids=target,
        decoder_attention_mask=target_seg,
        labels=labels.masked_fill(target_seg == 0, -100),
    )
    batch = Batch(target, labels, target_seg, source, source_seg)
    close(ours.log_probs(batch), expected.logits.log_softmax(-1), tolerance, target_seg)
    same_loss(ours.loss(batch), expected.loss, tolerance)


@pytest.mark.usefixtures("exact")
def test_marian_generates() -> None:
    theirs = marian(activation="swish")
    ours = marian_model(theirs, marian_spec(activation="swish"))
    source, seg = sentences([9, 4, 1, 7])
    expected, scores = generated_by(theirs, source, attention_mask=seg)
    first = torch.zeros(4, 1, dtype=torch.int64)
    decoding = ours.start(Batch(first, source=source, source_seg=seg), STEPS)
    ids, log_probs = greedy(ours, decoding, first, STEPS)
    assert torch.equal(ids, expected)
    close(log_probs, scores)

    # Again with eos: a token that one row generates early and another row later or never.
    eos = int(expected[0, 2])
    ended, _ = generated_by(theirs, source, attention_mask=seg, eos_token_id=eos, pad_token_id=0)
    assert len({row.count(0) for row in ended.tolist()}) > 1
    decoding = ours.start(Batch(first, source=source, source_seg=seg), STEPS)
    ids, _ = greedy(ours, decoding, first, STEPS, eos=eos)
    assert torch.equal(ids[:, : ended.shape[1]], ended)


def t5(gated: bool = False) -> tuple[Any, EncoderDecoderModel]:
    config = hub.T5Config(
        vocab_size=V,
        d_model=D,
        d_kv=5,
        d_ff=HIDDEN,
        num_layers=3,  # their generate fails if the decoder is the deeper one
        num_decoder_layers=2,
        num_heads=H,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=11,
        layer_norm_epsilon=EPS,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,  # since version 5 this only sets whether the head is scaled
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    theirs = hub.T5ForConditionalGeneration(config).eval()
    randomise(theirs, 0.1)
    stacks = ("encoder", "decoder")
    spec = preset(
        "t5_base",
        **widths(HIDDEN, True, *stacks),
        **{f"{stack}.position": T5Bias(8, 11) for stack in stacks},
        **{f"{stack}.pattern[0].branches[-1].gated": gated for stack in stacks},
        **{f"{stack}.pattern[0].branches[-1].activation": "gelu_tanh" if gated else "relu" for stack in stacks},
        **{"encoder.depth": 3, "decoder.depth": 2, "vocab": V, "d_model": D, "heads": H, "d_head": 5},
        **{"head.scaled": not gated},
    )
    ours = build(spec)
    assert isinstance(ours, EncoderDecoderModel)
    copy_all(ours, theirs, {"tables.tables.source": "shared"} | copying.t5(gated))
    return theirs, ours.eval()


@pytest.mark.parametrize("gated", [False, True])
def test_t5(tolerance: float, gated: bool) -> None:
    theirs, ours = t5(gated)
    source, source_seg = sentences([30, 14, 1])
    target, target_seg = sentences([15, 18, 3], seed=2)
    labels, _ = sentences([15, 18, 3], seed=3)
    expected = theirs(
        source,
        source_seg,
        decoder_input_ids=target,
        decoder_attention_mask=target_seg,
        labels=labels.masked_fill(target_seg == 0, -100),
    )
    batch = Batch(target, labels, target_seg, source, source_seg)
    close(ours.log_probs(batch), expected.logits.log_softmax(-1), tolerance, target_seg)
    tables = ours.get_parameter("tables.tables.source.weight"), theirs.shared.weight
    same_loss(ours.loss(batch), expected.loss, tolerance, tables)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("gated", [False, True])
def test_t5_generates(gated: bool) -> None:
    theirs, ours = t5(gated)
    source, seg = sentences([19, 4, 1, 12])
    expected, scores = generated_by(theirs, source, attention_mask=seg)
    first = torch.zeros(4, 1, dtype=torch.int64)
    decoding = ours.start(Batch(first, source=source, source_seg=seg), STEPS)
    ids, log_probs = greedy(ours, decoding, first, STEPS)
    assert torch.equal(ids, expected)
    close(log_probs, scores)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(32, 128), (32, 256), (64, 128), (16, 40), (8, 11), (4, 5), (12, 50), (16, 9), (16, 121), (128, 100), (128, 1000)],
)
def test_t5_buckets(buckets: int, max_distance: int, causal: bool) -> None:
    distance = torch.arange(-3000, 3001)
    expected = T5Attention._relative_position_bucket(distance, not causal, buckets, max_distance)
    assert torch.equal(T5Bias(buckets, max_distance).bucket(distance, causal), expected)


def bert(kind: Any, task: Spec | None, **options: Any) -> tuple[Any, nn.Module]:
    config = hub.BertConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=3,
        num_attention_heads=H,
        intermediate_size=HIDDEN,
        max_position_embeddings=20,
        type_vocab_size=3,
        layer_norm_eps=EPS,
        **options,
    )
    theirs = kind(config).eval()
    randomise(theirs)
    spec = preset(
        "bert_base",
        **widths(HIDDEN, True, "encoder"),
        **{"encoder.depth": 3, "input.types": 3, "input.position.max_len": 20, "input.norm.eps": EPS},
        **{"vocab": V, "d_model": D, "heads": H},
        **({} if task is None else {"task": task}),
    )
    ours = build(spec)
    base = "" if kind is hub.BertModel else "bert."
    our, their = "encoder.stack.blocks.*.branches", f"{base}encoder.layer.*"
    mapping: dict[str, Input] = {
        "encoder.tables.tables.source": f"{base}embeddings.word_embeddings",
        "encoder.inputs.inputs.source.position": f"{base}embeddings.position_embeddings",
        "encoder.inputs.inputs.source.types": f"{base}embeddings.token_type_embeddings.weight",
        "encoder.inputs.inputs.source.norm": f"{base}embeddings.LayerNorm",
        f"{our}.0.branch.qkv": cat(*(f"{their}.attention.self.{x}" for x in ("query", "key", "value"))),
        f"{our}.0.branch.output": f"{their}.attention.output.dense",
        f"{our}.0.norm": f"{their}.attention.output.LayerNorm",
        f"{our}.1.branch.up": f"{their}.intermediate.dense",
        f"{our}.1.branch.down": f"{their}.output.dense",
        f"{our}.1.norm": f"{their}.output.LayerNorm",
    }
    heads: dict[str, Input] = {
        "pool.pooler": f"{base}pooler.dense",
        "classes": "classifier",
        "transform": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions",
    }
    modules = dict(ours.named_modules())
    copy_all(ours, theirs, mapping | {name: head for name, head in heads.items() if name in modules})
    return theirs, ours.eval()


def bert_input(typed: bool = True) -> tuple[Batch, dict[str, Tensor]]:
    ids, seg = sentences([12, 5, 1, 20])
    types = torch.randint(3, ids.shape, generator=torch.Generator().manual_seed(4)) if typed else None
    theirs = {"input_ids": ids, "attention_mask": seg}
    return Batch(ids, target_seg=seg, types=types), theirs | ({} if types is None else {"token_type_ids": types})


@pytest.mark.parametrize("typed", [True, False])
def test_bert(tolerance: float, typed: bool) -> None:
    theirs, ours = bert(hub.BertModel, None)
    assert isinstance(ours, PooledModel)
    batch, inputs = bert_input(typed)
    expected = theirs(**inputs)
    close(ours.encoder(batch).x, expected.last_hidden_state, tolerance, batch.target_seg)
    close(ours(batch), expected.pooler_output, tolerance)


def test_bert_for_masked_lm(tolerance: float) -> None:
    theirs, ours = bert(hub.BertForMaskedLM, MaskedLM(norm=LayerNorm(eps=EPS)))
    assert isinstance(ours, MaskedLMModel)
    batch, inputs = bert_input()
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(V, batch.target.shape, generator=generator)
    hidden = (torch.rand(labels.shape, generator=generator) < 0.4) & (inputs["attention_mask"] == 1)
    expected = theirs(**inputs, labels=labels.masked_fill(~hidden, -100))
    labelled = Batch(
        batch.target,
        labels,
        batch.target_seg,
        weights=hidden.to(torch.get_default_dtype()),
        types=batch.types,
    )
    close(ours.log_probs(labelled), expected.logits.log_softmax(-1), tolerance, batch.target_seg)
    loss = ours.loss(labelled)
    assert loss.tokens == hidden.sum()
    same_loss(loss, expected.loss, tolerance)


def test_bert_for_sequence_classification(tolerance: float) -> None:
    theirs, ours = bert(hub.BertForSequenceClassification, SentenceClassifier(5), num_labels=5)
    assert isinstance(ours, Classifier)
    batch, inputs = bert_input()
    labels = torch.tensor([3, 0, 4, 1])
    expected = theirs(**inputs, labels=labels)
    labelled = Batch(batch.target, labels, batch.target_seg, types=batch.types)
    close(ours.scores(labelled), expected.logits, tolerance)
    same_loss(ours.loss(labelled), expected.loss, tolerance)


def test_bert_for_token_classification(tolerance: float) -> None:
    theirs, ours = bert(hub.BertForTokenClassification, TokenClassifier(5), num_labels=5)
    assert isinstance(ours, Classifier)
    batch, inputs = bert_input()
    labels = torch.randint(5, batch.target.shape, generator=torch.Generator().manual_seed(5))
    expected = theirs(**inputs, labels=labels.masked_fill(inputs["attention_mask"] == 0, -100))
    labelled = Batch(batch.target, labels, batch.target_seg, types=batch.types)
    close(ours.scores(labelled), expected.logits, tolerance, batch.target_seg)
    same_loss(ours.loss(labelled), expected.loss, tolerance)


def gpt2() -> tuple[Any, DecoderOnlyModel]:
    config = hub.GPT2Config(
        vocab_size=V,
        n_positions=30,
        n_embd=D,
        n_layer=3,
        n_head=H,
        n_inner=HIDDEN,
        layer_norm_epsilon=EPS,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = hub.GPT2LMHeadModel(config).eval()
    randomise(theirs)
    spec = preset(
        "gpt2_small",
        **widths(HIDDEN, True, "decoder"),
        **{"vocab": V, "d_model": D, "heads": H, "decoder.depth": 3, "input.position.max_len": 30},
    )
    ours = build(spec)
    assert isinstance(ours, DecoderOnlyModel)
    our, their = "decoder.blocks.*.branches", "transformer.h.*"
    mapping = {
        "tables.tables.target": "transformer.wte",
        "inputs.inputs.target.position": "transformer.wpe",
        "decoder.end": "transformer.ln_f",
        f"{our}.0.norm": f"{their}.ln_1",
        f"{our}.0.branch.qkv": transpose(f"{their}.attn.c_attn"),
        f"{our}.0.branch.output": transpose(f"{their}.attn.c_proj"),
        f"{our}.1.norm": f"{their}.ln_2",
        f"{our}.1.branch.up": transpose(f"{their}.mlp.c_fc"),
        f"{our}.1.branch.down": transpose(f"{their}.mlp.c_proj"),
    }
    copy_all(ours, theirs, mapping)
    return theirs, ours.eval()


def llama() -> tuple[Any, DecoderOnlyModel]:
    config = hub.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=H,
        num_key_value_heads=2,
        head_dim=10,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = hub.LlamaForCausalLM(config).eval()
    randomise(theirs)
    branches = (SelfAttention(kv_heads=2), FeedForward(HIDDEN, "swish", gated=True))
    spec = DecoderOnly(
        vocab=V,
        d_model=D,
        heads=H,
        d_head=10,
        tied=False,
        input=Tokens(scaled=False, position=None),
        decoder=Plain((Block(branches, PreNorm(RMSNorm(EPS))),), 3, position=Rotary(500.0)),
        linear=Dense(bias=False),
    )
    ours = build(spec)
    assert isinstance(ours, DecoderOnlyModel)
    our, their = "decoder.blocks.*.branches", "model.layers.*"
    mapping = {
        "tables.tables.target": "model.embed_tokens",
        "tables.tables.output": "lm_head",
        "decoder.end": "model.norm",
        f"{our}.0.branch.query": f"{their}.self_attn.q_proj",
        f"{our}.0.branch.key": f"{their}.self_attn.k_proj",
        f"{our}.0.branch.value": f"{their}.self_attn.v_proj",
        f"{our}.0.branch.output": f"{their}.self_attn.o_proj",
        f"{our}.0.norm": f"{their}.input_layernorm",
        f"{our}.1.branch.gate_up": cat(f"{their}.mlp.gate_proj", f"{their}.mlp.up_proj"),
        f"{our}.1.branch.down": f"{their}.mlp.down_proj",
        f"{our}.1.norm": f"{their}.post_attention_layernorm",
    }
    copy_all(ours, theirs, mapping)
    return theirs, ours.eval()


DECODERS = pytest.mark.parametrize("make", [gpt2, llama])


@DECODERS
def test_decoder_only(tolerance: float, make: Any) -> None:
    theirs, ours = make()
    ids, seg = sentences([15, 8, 2])
    expected = theirs(ids, attention_mask=seg, labels=ids.masked_fill(seg == 0, -100))
    batch = Batch(ids[:, :-1], ids[:, 1:], seg[:, :-1], weights=seg[:, 1:].to(torch.get_default_dtype()))
    close(ours.log_probs(batch), expected.logits[:, :-1].log_softmax(-1), tolerance, seg[:, :-1])
    tables = ours.get_parameter("tables.tables.target.weight"), theirs.get_input_embeddings().weight
    same_loss(ours.loss(batch), expected.loss, max(tolerance, 1e-6), tables)  # their loss is made in float32


@DECODERS
@pytest.mark.usefixtures("exact")
def test_decoder_only_generates(make: Any) -> None:
    theirs, ours = make()
    assert isinstance(ours, LanguageModel)
    prompts, seg = sentences([15, 8, 1, 6])
    decoding = ours.start(Batch(prompts, target_seg=seg), prompts.shape[1] + STEPS)
    ids, log_probs = greedy(ours, decoding, prompts, STEPS, seg)
    for row, prompt in enumerate(prompts):  # each alone, so that nothing is padded there
        alone = prompt[None, : int(seg[row].sum())]
        expected, scores = generated_by(theirs, alone, attention_mask=torch.ones_like(alone))
        assert torch.equal(ids[row : row + 1], expected)
        close(log_probs[row : row + 1], scores)


def full_size(name: str) -> tuple[Any, Any]:
    t5_base = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    base = {"vocab_size": 37000, "d_model": 512, "pad_token_id": 0, "decoder_start_token_id": 0}
    for side in ("encoder", "decoder"):
        base |= {f"{side}_layers": 6, f"{side}_ffn_dim": 2048, f"{side}_attention_heads": 8}
    return {
        "bert_base": (hub.BertModel, hub.BertConfig()),
        "gpt2_small": (hub.GPT2LMHeadModel, hub.GPT2Config()),
        "t5_base": (hub.T5ForConditionalGeneration, hub.T5Config(**t5_base)),
        "transformer_base": (hub.MarianMTModel, hub.MarianConfig(**base)),
    }[name]


@pytest.mark.parametrize("name", ["bert_base", "gpt2_small", "t5_base", "transformer_base"])
def test_presets_have_as_many_parameters(name: str) -> None:
    kind, config = full_size(name)
    with torch.device("meta"):
        theirs = kind(config)
    assert count(preset(name)) == size(theirs)


@pytest.mark.parametrize(
    ("name", "path", "setting"),
    [
        ("bert_base", "encoder.pattern[0].residual.norm.eps", "layer_norm_eps"),
        ("bert_base", "input.norm.eps", "layer_norm_eps"),
        ("gpt2_small", "decoder.pattern[0].residual.norm.eps", "layer_norm_epsilon"),
        ("t5_base", "encoder.pattern[0].residual.norm.eps", "layer_norm_epsilon"),
        ("t5_base", "decoder.pattern[0].residual.norm.eps", "layer_norm_epsilon"),
        ("t5_base", "encoder.position.max_distance", "relative_attention_max_distance"),
        ("t5_base", "decoder.position.max_distance", "relative_attention_max_distance"),
    ],
)
def test_presets_have_the_settings_that_weights_do_not_show(name: str, path: str, setting: str) -> None:
    assert get_at(preset(name), path) == getattr(full_size(name)[1], setting)
