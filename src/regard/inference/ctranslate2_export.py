"""Convert models to CTranslate2: fill CTranslate2's model specs with the weights of a model.

A block that several layers share is written once per layer, factorised embedding tables are multiplied out, and
sinusoidal positions are written as a table. A model part that CTranslate2's specs cannot express raises SpecError with
the path of the part.

In this file, "the library" is CTranslate2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.errors import SpecError
from regard.models.base import Model
from regard.models.decoder_only import DecoderOnly, DecoderOnlyModel
from regard.models.embedding import Inputs, Side, Tables
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.attention_heads import factor
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.bridge import Last
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.linear import Dense
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.position.additive import Learned
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.rms_norm import RMSNorm
from regard.nn.sandwich import Sandwich
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Factorised
from regard.tree import Spec

EPS = {LayerNorm: 1e-5, RMSNorm: 1e-6}  # the library's default values
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "swish": "SWISH",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token strings of the source or target vocabulary, ordered by id, and the ids of special tokens."""

    words: Sequence[str]
    bos: int
    eos: int
    unknown: int


def refusal(path: str, what: str) -> SpecError:
    """Return the error for a model part that the library's specs cannot express."""
    return SpecError(path, f"CTranslate2 cannot express {what}; use the native engine")


def require(path: str, part: Spec | None, *types: type) -> None:
    """Raise SpecError if the model part at `path` has none of the given types."""
    if part is not None and not isinstance(part, types):
        raise refusal(path, repr(part.kind))


def written(model: Model, source: Vocabulary, target: Vocabulary, positions: int) -> Any:
    """Return the library's spec of a model, filled with weights and validated.

    Computed position vectors are written as a table with `positions` rows.
    """
    if isinstance(model, EncoderDecoderModel):
        theirs = _Writer(model.spec, positions).encoder_decoder(model)
        theirs.register_source_vocabulary(list(source.words))
        theirs.register_target_vocabulary(list(target.words))
        theirs.config.add_source_bos = theirs.config.add_source_eos = False
        theirs.config.decoder_start_token = target.words[target.bos]
    elif isinstance(model, DecoderOnlyModel) and model.spec.kind == "decoder_only":
        theirs = _Writer(model.spec, positions).decoder_only(model)
        theirs.register_vocabulary(list(target.words))
    else:
        raise refusal("kind", f"a model of kind {model.spec.kind!r}")
    theirs.config.bos_token = target.words[target.bos]
    theirs.config.eos_token = target.words[target.eos]
    theirs.config.unk_token = target.words[target.unknown]
    theirs.validate()
    return theirs


@dataclass
class Facts:
    """Settings that all layers of a stack must share, because the library's spec stores one value per stack."""

    path: str
    values: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def same(self, name: str, value: Any, path: str) -> Any:
        """Return `value`; raise SpecError if an earlier layer has a different value."""
        first, before = self.values.setdefault(name, (path, value))
        if before != value:
            raise refusal(path, f"{_named(value)} beside {_named(before)} ({first}) in one stack")
        return value

    def get(self, name: str) -> Any:
        return self.values[name][1]


def _named(value: Any) -> str:
    return repr(value.kind) if isinstance(value, Spec) else repr(value)


class _Writer:
    """Converts one model."""

    def __init__(self, spec: Any, positions: int) -> None:
        from ctranslate2.specs import transformer_spec  # noqa: PLC0415  # an extra

        self.spec, self.positions, self.library = spec, positions, transformer_spec
        self.eps: dict[tuple[type[Norm], float], str] = {}
        require("linear", spec.linear, Dense)
        require("head", spec.head, Softmax)
        require("input", spec.input, Tokens)
        require("table", spec.table, Embeddings, Factorised)
        require("output_table", spec.output_table, Embeddings, Factorised)

    def encoder_decoder(self, model: EncoderDecoderModel) -> Any:
        spec = model.spec
        assert isinstance(spec, EncoderDecoder)
        require("bridge", spec.bridge, Last)
        encoder = self.stack(model.encoder, "encoder")
        decoder = self.stack(model.decoder, "decoder", cross=True)
        self.begin(encoder, encoder.embeddings[0], "source", model.tables, model.inputs)
        self.begin(decoder, decoder.embeddings, "target", model.tables, model.inputs)
        self.end(decoder, model)
        theirs: Any = self.library.TransformerSpec(encoder, decoder)
        theirs.config.layer_norm_epsilon = self.epsilon()
        return theirs

    def decoder_only(self, model: DecoderOnlyModel) -> Any:
        spec = model.spec
        assert isinstance(spec, DecoderOnly)
        if spec.input_attention != "causal":
            raise refusal("input_attention", f"{spec.input_attention!r} input attention")
        decoder = self.stack(model.decoder, "decoder")
        self.begin(decoder, decoder.embeddings, "target", model.tables, model.inputs)
        self.end(decoder, model)
        theirs: Any = self.library.TransformerDecoderModelSpec(decoder)
        theirs.config.layer_norm_epsilon = self.epsilon()
        return theirs

    # The layers before and after the stacks.

    def begin(self, stack: Any, embeddings: Any, use: Side, tables: Tables, inputs: Inputs) -> None:
        """Convert the token embeddings of a stack, with the scale, the position vectors and the norm."""
        tokens: Tokens = self.spec.input
        D, module = self.spec.d_model, inputs.get(use)
        words = matrix(tables.get(use))
        # An appended position is expressed as a sum: it is added to channels in which the words are zero.
        embeddings.weight = np.pad(words, ((0, 0), (0, D - words.shape[1])))
        stack.scale_embeddings = np.float32(D**0.5 if tokens.scaled else 1.0)
        if hasattr(stack, "layernorm_embedding"):
            self.norm(stack.layernorm_embedding, tokens.norm, module.get_submodule("norm"), D, "input.norm")
        if hasattr(stack, "position_encodings") and not hasattr(stack.layer[0].self_attention, "rotary_dim"):
            place = self.places(module, tokens)
            stack.position_encodings.encodings = np.pad(place, ((0, 0), (D - place.shape[1], 0)))

    def places(self, module: nn.Module, tokens: Tokens) -> np.ndarray:
        """Return the table of position vectors, which are 0 if the model adds no positions to the embeddings."""
        if tokens.position is None:
            return np.zeros((self.positions, self.spec.d_model), np.float32)
        width = tokens.position_width or self.spec.d_model
        if isinstance(tokens.position, Sinusoidal):
            return numbers(tokens.position.table(self.positions, width))
        if isinstance(tokens.position, Learned):
            return numbers(module.get_parameter("position.weight"))
        raise refusal("input.position", repr(tokens.position.kind))

    def end(self, decoder: Any, model: Any) -> None:
        decoder.projection.weight = matrix(model.tables.get("output"))
        if self.spec.head.scaled:
            decoder.scale_outputs = np.float32(self.spec.d_model**-0.5)
        if self.spec.head.bias:
            decoder.projection.bias = numbers(model.head.bias)

    # The stacks.

    def stack(self, module: nn.Module, side: str, cross: bool = False) -> Any:
        spec = getattr(self.spec, side)
        if type(spec) is not Plain:
            raise refusal(side, repr(spec.kind))
        require(f"{side}.attention_pattern", spec.attention_pattern)
        if spec.strict:
            raise refusal(f"{side}.strict", "tokens that do not attend to themselves")
        if spec.positions:
            raise refusal(f"{side}.positions", "positions for attentions of other numbers of heads")
        facts = Facts(side)
        layers = []
        for call in range(spec.depth):
            at = call % (spec.unique or spec.depth)
            path = f"{side}.pattern[{at % len(spec.pattern)}]"
            block = spec.block_of(call)
            self.check_block(block, path, facts, side, cross)
            layers.append((block, module.get_submodule(f"blocks.{at}"), path))
        theirs = self.empty(facts, side, spec.depth, cross)
        for layer, (block, built, path) in zip(theirs.layer, layers, strict=True):
            self.layer(layer, block, built, path, module)
        if hasattr(theirs, "layer_norm"):
            residual = facts.get("residual")
            self.norm(theirs.layer_norm, residual.norm, module.get_submodule("end"), self.spec.d_model, side)
        return theirs

    def check_block(self, block: Block, path: str, facts: Facts, side: str, cross: bool) -> None:
        """Record the settings that all layers must share; raise SpecError for a layer that cannot be converted."""
        expected = (SelfAttention, CrossAttention, FeedForward) if cross else (SelfAttention, FeedForward)
        for i, branch in enumerate(block.branches):
            if i >= len(expected) or type(branch) is not expected[i]:
                raise refusal(f"{path}.branches[{i}]", f"{branch.kind!r} at this place in a layer")
        if len(block.branches) < len(expected):
            raise refusal(f"{path}.branches", f"a layer without {expected[len(block.branches)].kind!r}")
        for i, rule in enumerate(block.rules()):
            where = f"{path}.residual[{i}]" if isinstance(block.residual, tuple) else f"{path}.residual"
            if not isinstance(rule, PreNorm | PostNorm | Sandwich):
                raise refusal(where, repr(rule.kind))
            require(f"{where}.norm", rule.norm, LayerNorm, RMSNorm)
            facts.same("residual", rule, where)
        for i, branch in enumerate(block.branches[:-1]):
            self.check_attention(branch, f"{path}.branches[{i}]", facts, side)
        feedforward = block.branches[-1]
        assert isinstance(feedforward, FeedForward)
        where = f"{path}.branches[{len(block.branches) - 1}]"
        if feedforward.activation not in ACTIVATIONS:
            raise refusal(f"{where}.activation", repr(feedforward.activation))
        facts.same("activation", feedforward.activation, f"{where}.activation")
        facts.same("gated", feedforward.gated, f"{where}.gated")

    def check_attention(self, branch: BranchSpec, path: str, facts: Facts, side: str) -> None:
        """Record the settings that all attention branches of a stack must share."""
        assert isinstance(branch, SelfAttention | CrossAttention)
        heads, _, d_head = self.sizes(branch)
        facts.same("heads", heads, f"{path}.heads")
        if branch.d_value is not None and branch.d_value != d_head:
            raise refusal(f"{path}.d_value", f"values of width {branch.d_value} beside keys of {d_head}")
        require(f"{path}.query_key_norm", branch.query_key_norm, NoNorm, LayerNorm, RMSNorm)
        if isinstance(branch, SelfAttention):
            require(f"{path}.attention_pattern", branch.attention_pattern)
            if branch.tied != "none":
                raise refusal(f"{path}.tied", f"{branch.tied!r}: a tied projection")
        if isinstance(branch, CrossAttention):
            # The library's specs have a field for this norm, but the library ignores the field.
            if not isinstance(branch.query_key_norm, NoNorm):
                raise refusal(f"{path}.query_key_norm", f"{branch.query_key_norm.kind!r} in cross-attention")
            return
        shared: Position | None = getattr(self.spec, side).position
        where = f"{side}.position" if branch.position is None else f"{path}.position"
        position = shared if branch.position is None else branch.position
        require(where, position, T5Bias, ALiBi, Rotary, Shaw)
        if isinstance(position, ALiBi) and side == "encoder":
            raise refusal(where, f"{position.kind!r} in an encoder")
        if isinstance(position, ALiBi) and position.slopes is not None:
            raise refusal(f"{where}.slopes", "slopes other than those of the paper")
        if isinstance(position, T5Bias) and branch.position is not None:
            raise refusal(where, f"{position.kind!r} of a layer's own")
        if position is not None and self.spec.input.position is not None:
            raise refusal("input.position", f"{self.spec.input.position.kind!r} beside {position.kind!r} ({where})")
        facts.same("position", position, where)

    def sizes(self, branch: Any) -> tuple[int, int, int]:
        """Return the number of heads, the number of key-value heads and the width of a head."""
        heads = branch.heads or self.spec.heads
        usual = self.spec.d_head or self.spec.d_model // self.spec.heads
        d_head = branch.d_head or (usual if branch.heads is None else self.spec.d_model // heads)
        return heads, branch.kv_heads or heads, d_head

    def empty(self, facts: Facts, side: str, depth: int, cross: bool) -> Any:
        from ctranslate2.specs.common_spec import Activation  # noqa: PLC0415

        residual, position = facts.get("residual"), facts.get("position")
        norm: Norm = self.spec.input.norm
        if not isinstance(norm, NoNorm) and type(norm) is not type(residual.norm):
            raise refusal("input.norm", f"{norm.kind!r} beside {residual.norm.kind!r}")
        options: dict[str, Any] = {
            "pre_norm": not isinstance(residual, PostNorm),
            "pre_post_layer_norm": isinstance(residual, Sandwich),
            "activation": Activation[ACTIVATIONS[facts.get("activation")]],
            "layernorm_embedding": not isinstance(norm, NoNorm),
            "ffn_glu": facts.get("gated"),
            "rms_norm": isinstance(residual.norm, RMSNorm),
            "relative_position": isinstance(position, Shaw),
            "relative_attention_bias": isinstance(position, T5Bias),
            # Defaults for every attention branch; `attention` sets the values of each branch.
            "num_heads_kv": facts.get("heads"),
            "head_dim": 1,
            "qk_norm": True,
        }
        if isinstance(position, Rotary):
            options |= {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": position.base}
        if side == "encoder":
            return self.library.TransformerEncoderSpec(depth, facts.get("heads"), **options)
        return self.library.TransformerDecoderSpec(
            depth,
            facts.get("heads"),
            with_encoder_attention=cross,
            external_pre_post_encoder_layers=cross and isinstance(residual, Sandwich),
            alibi=isinstance(position, ALiBi),
            **options,
        )

    def layer(self, to: Any, block: Block, built: nn.Module, path: str, stack: nn.Module) -> None:
        for i, (branch, rule) in enumerate(zip(block.branches, block.rules(), strict=True)):
            where, joined = f"{path}.branches[{i}]", built.get_submodule(f"branches.{i}")
            inner, rule_norm = joined.get_submodule("branch"), getattr(rule, "norm", NoNorm())
            if isinstance(branch, FeedForward):
                self.feedforward(to.ffn, branch, inner)
            else:
                own = to.self_attention if isinstance(branch, SelfAttention) else to.attention
                self.attention(own, branch, inner, stack, where)
            for name, norm in zip(NORMS[type(rule)][type(branch)], ("norm", "after"), strict=False):
                holder = to
                *parents, last = name.split(".")
                for parent in parents:
                    holder = getattr(holder, parent)
                self.norm(getattr(holder, last), rule_norm, joined.get_submodule(norm), self.spec.d_model, where)

    def attention(self, to: Any, branch: Any, built: nn.Module, stack: nn.Module, path: str) -> None:
        """Convert an attention branch: the projections, the norms of queries and keys, and the position scheme."""
        heads, groups, d_head = self.sizes(branch)
        to.num_heads_kv, to.head_dim = np.int32(groups), np.int32(d_head)
        to.queries_scale = np.float32(factor(branch.scale, d_head))
        names = ("qkv",) if isinstance(branch, SelfAttention) else ("query", "kv")
        for linear, name in zip(to.linear, names, strict=False):
            self.linear(linear, built.get_submodule(name))
        if branch.output:
            self.linear(to.linear[-1], built.get_submodule("output"))
        else:
            to.linear[-1].weight = np.eye(heads * d_head, dtype=np.float32)
        self.query_key_norm(to, branch.query_key_norm, built, d_head, path)
        if isinstance(branch, SelfAttention):
            shared = getattr(self.spec, path.split(".", maxsplit=1)[0]).position
            position, own = (shared, stack) if branch.position is None else (branch.position, built)
            if isinstance(position, T5Bias):
                to.relative_attention_bias = numbers(own.get_parameter("position.weight").T)
                to.relative_attention_max_distance = np.int32(position.max_distance)
            elif isinstance(position, Shaw):
                keys = numbers(own.get_parameter("position.keys"))
                to.relative_position_keys = keys
                values = own.get_parameter("position.values") if position.values else None
                to.relative_position_values = np.zeros_like(keys) if values is None else numbers(values)

    def query_key_norm(self, to: Any, norm: Norm, built: nn.Module, width: int, path: str) -> None:
        from ctranslate2.specs.common_spec import LayerNormSpec  # noqa: PLC0415

        for name, ours in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            if isinstance(norm, NoNorm):
                delattr(to, name)
            else:
                setattr(to, name, LayerNormSpec(rms_norm=isinstance(norm, RMSNorm)))
                self.norm(getattr(to, name), norm, built.get_submodule(ours), width, f"{path}.query_key_norm")

    def feedforward(self, to: Any, branch: FeedForward, built: nn.Module) -> None:
        self.linear(to.linear_1, built.get_submodule("down"))
        if not branch.gated:
            self.linear(to.linear_0, built.get_submodule("up"))
            return
        both = built.get_submodule("gate_up")
        gate_up = numbers(both.get_parameter("weight"))
        to.linear_0.weight, to.linear_0_noact.weight = np.split(gate_up, 2)
        if both.bias is not None:
            to.linear_0.bias, to.linear_0_noact.bias = np.split(numbers(both.get_parameter("bias")), 2)

    def linear(self, to: Any, built: nn.Module) -> None:
        to.weight = numbers(built.get_parameter("weight"))
        if built.bias is not None:
            to.bias = numbers(built.get_parameter("bias"))

    def norm(self, to: Any, norm: Norm, built: nn.Module, width: int, path: str) -> None:
        """Convert a layer norm or an RMS norm; raise SpecError if eps is outside the square root."""
        assert isinstance(norm, LayerNorm | RMSNorm)
        if isinstance(norm, LayerNorm) and norm.root == "outside":
            raise refusal(f"{path}.root", "a layer norm with eps outside the square root")
        self.eps.setdefault((type(norm), norm.eps), path)
        given: Mapping[str, Any] = dict(built.named_parameters(recurse=False))
        to.gamma = _spread(given.get("weight"), 1.0, width)
        if isinstance(norm, LayerNorm):
            to.beta = _spread(given.get("bias"), 0.0, width)

    def epsilon(self) -> float | None:
        """Return the eps of all norms, or None if every norm has the library's default for its type."""
        values = {eps for _, eps in self.eps}
        if all(EPS[kind] == eps for kind, eps in self.eps):
            return None
        if len(values) > 1:
            (_, first), (_, other) = list(self.eps)[:2]
            raise refusal(list(self.eps.values())[1], f"norms of eps {other} beside others of eps {first}")
        return values.pop()


# The library's names for the norms of each residual rule. The first norm comes before the branch (in PostNorm, after
# the sum), the second after the branch.
NORMS: dict[type[Residual], dict[type[BranchSpec], tuple[str, ...]]] = {
    PreNorm: {
        SelfAttention: ("self_attention.layer_norm",),
        CrossAttention: ("attention.layer_norm",),
        FeedForward: ("ffn.layer_norm",),
    },
    Sandwich: {
        SelfAttention: ("input_layer_norm", "post_attention_layer_norm"),
        CrossAttention: ("external_pre_encoder_attention_layer_norm", "external_post_encoder_attention_layer_norm"),
        FeedForward: ("pre_feedforward_layer_norm", "post_feedforward_layer_norm"),
    },
}
NORMS[PostNorm] = NORMS[PreNorm]


def matrix(table: Any) -> np.ndarray:
    """Return an embedding table as one matrix. The factors of a factorised table are multiplied."""
    weight = table.weight.detach().double()
    projection = getattr(table, "projection", None)
    return numbers(weight if projection is None else weight @ projection.detach().double().T)


def numbers(weight: torch.Tensor) -> np.ndarray:
    """Return a float32 copy of a weight. The copy is needed because the library quantises in place."""
    return np.array(weight.detach().to("cpu", torch.float32).numpy(), order="C")


def _spread(weight: torch.Tensor | None, usual: float, width: int) -> np.ndarray:
    """Return a gain or bias with `width` channels. Without a weight, every channel has the value `usual`."""
    filled = np.full(width, usual, np.float32) if weight is None else numbers(weight)
    return np.broadcast_to(filled, (width,)).copy()
