"""Every row of the table, compared with its formulas for a full model: one sentence pair at a time, without padding.

The formulas are those of the papers, in the form that Narang et al. 2021 ran. They do not use the package, except for
the weights of the tested model, which are read by name. tests/unit/nn has tests of single parts with more cases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import build
from regard.batch import Batch, pad
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.branches.synthesizer import Synthesizer
from regard.testing import tiny
from regard.tree import swap
from regard.variants import VARIANTS, apply

V, D, WIDTH, BUCKETS, FARTHEST, Z = tiny.VOCAB, 24, 4, 32, 128, 1e-4
Norm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain + bias


def rms_norm(x: Tensor, gain: Tensor, bias: Tensor | None, channels: int = D) -> Tensor:
    assert bias is None
    return x / (x[..., :channels].square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def partial_rms_norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    return rms_norm(x, gain, bias, channels=2)  # of 24, as 52 of 768: 6.75 %, rounded up


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x.clamp(max=0).exp() - 1)


PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x * (x > 0),
    "gelu": gelu,
    "swish": lambda x: x * sigmoid(x),
    "elu": elu,
    "selu": lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * elu(x)),
    "sigmoid": sigmoid,
    "softplus": lambda x: (1 + x.exp()).log(),
    "linear": lambda x: x,
}
relu = PHI["relu"]


@dataclass(frozen=True)
class Scene:
    """The state of one stack for one sentence."""

    row: "Row"
    weights: Mapping[str, Tensor]
    side: str
    memory: tuple[Tensor, ...] = ()  # of each layer of a decoder
    layer: int = 0

    @property
    def causal(self) -> bool:
        return self.side == "decoder"

    def has(self, name: str) -> bool:
        return name in self.weights

    def dense(self, name: str, x: Tensor) -> Tensor:
        """Return x W' + b, or x W' if there is no bias."""
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if self.has(f"{name}.bias") else y

    def norm(self, name: str, x: Tensor, kind: Norm | None = None) -> Tensor:
        kind = kind or self.row.norms[self.side]
        if kind is None:
            assert not self.has(f"{name}.weight")
            return x
        return kind(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


Branch = Callable[[Scene, str, Tensor], Tensor]


def bucket(distance: int, causal: bool) -> int:
    """Raffel et al. 2020: half of the buckets exact, the others of increasing width, by key minus query position."""
    buckets, first = (BUCKETS, 0) if causal else (BUCKETS // 2, BUCKETS // 2 if distance > 0 else 0)
    far, exact = max(0, -distance) if causal else abs(distance), buckets // 2
    if far < exact:
        return first + far
    coarse = int(math.log(far / exact) / math.log(FARTHEST / exact) * (buckets - exact))
    return first + min(buckets - 1, exact + coarse)


def mixed(v: Tensor, heads: int, score: Callable[[int], Tensor], causal: bool) -> list[Tensor]:
    """Return softmax(score) v for every head. With a causal mask, a query attends to no later key."""
    outputs = []
    for h, v_h in enumerate(v.chunk(heads, -1)):
        scores = score(h)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(scores.softmax(-1) @ v_h)
    return outputs


def biased(scene: Scene, table: str, h: int, T: int) -> Tensor:
    """Return the position bias of a head for T queries and T keys."""
    index = [[bucket(j - i, scene.causal) for j in range(T)] for i in range(T)]
    return scene.weights[f"{scene.side}.{table}.weight"][h][torch.tensor(index)]


def products(scene: Scene, q: Tensor, k: Tensor, heads: int) -> list[Tensor]:
    assert q.shape[-1] == heads * WIDTH
    scale = WIDTH**-0.5 if scene.row.rule in ("rezero", "fixup") else 1.0
    return [q_h @ k_h.T * scale for q_h, k_h in zip(q.chunk(heads, -1), k.chunk(heads, -1), strict=True)]


def self_heads(scene: Scene, name: str, y: Tensor, heads: int, table: str = "position") -> list[Tensor]:
    q, k, v = scene.dense(f"{name}.qkv", y).chunk(3, -1)
    product = products(scene, q, k, heads)
    return mixed(v, heads, lambda h: product[h] + biased(scene, table, h, len(y)), scene.causal)


def cross_heads(scene: Scene, name: str, y: Tensor, heads: int) -> list[Tensor]:
    q, (k, v) = scene.dense(f"{name}.query", y), scene.dense(f"{name}.kv", scene.memory[scene.layer]).chunk(2, -1)
    return mixed(v, heads, products(scene, q, k, heads).__getitem__, causal=False)


def self_attention(scene: Scene, name: str, y: Tensor) -> Tensor:
    return scene.dense(f"{name}.output", torch.cat(self_heads(scene, name, y, scene.row.heads), -1))


def cross_attention(scene: Scene, name: str, y: Tensor) -> Tensor:
    return scene.dense(f"{name}.output", torch.cat(cross_heads(scene, name, y, scene.row.heads), -1))


def feedforward(scene: Scene, name: str, y: Tensor, phi: str | None = None) -> Tensor:
    row = scene.row
    act = PHI[phi or row.phi]
    if row.gated:
        gate, up = scene.dense(f"{name}.gate_up", y).chunk(2, -1)
        hidden = act(gate) * up
    else:
        hidden = act(scene.dense(f"{name}.up", y))
    assert hidden.shape[-1] == row.hidden
    if row.rule == "fixup":
        assert not scene.has(f"{name}.up.bias")
        return scene.dense(f"{name}.down.dense", hidden + scene.weights[f"{name}.down.shift"])
    return scene.dense(f"{name}.down", hidden)


def windows(rows: Tensor, width: int, causal: bool) -> list[Tensor]:
    """Return the inputs of a centred or causal convolution at every position. There are zeros around the sentence."""
    before = width - 1 if causal else width // 2
    padded = torch.cat((rows.new_zeros(before, rows.shape[1]), rows, rows.new_zeros(width - 1 - before, rows.shape[1])))
    return [padded[t : t + width] for t in range(len(rows))]


def glu(scene: Scene, name: str, y: Tensor) -> Tensor:
    a, b = scene.dense(f"{name}.gated", y).chunk(2, -1)
    return a * sigmoid(b)


def convolution(scene: Scene, name: str, y: Tensor) -> Tensor:
    """3.11: filters of width 9 that sum to one in every channel, dynamic or not; two projections in sequence."""
    g = glu(scene, name, y)
    out = []
    for t, near in enumerate(windows(g, 9, scene.causal)):
        if scene.has(f"{name}.filters.predict.weight"):
            filters = scene.dense(f"{name}.filters.predict", g[t]).view(9, D)
        else:
            filters = scene.weights[f"{name}.filters.weight"].T
        out.append((filters.softmax(0) * near).sum(0) + scene.weights[f"{name}.output.bias"])
    return scene.dense(f"{name}.output.output", scene.dense(f"{name}.output.pointwise", torch.stack(out)))


def separable(scene: Scene, name: str, x: Tensor, width: int) -> Tensor:
    filters, bias = scene.weights[f"{name}.filters"], scene.weights[f"{name}.bias"]
    depthwise = [(filters.T * near).sum(0) + bias for near in windows(x, width, scene.causal)]
    return scene.dense(f"{name}.pointwise", torch.stack(depthwise))


def widened(x: Tensor, width: int) -> Tensor:
    return torch.cat((x, x.new_zeros(len(x), width - x.shape[1])), -1)


def evolved_encoder_conv(scene: Scene, name: str, y: Tensor) -> Tensor:
    assert not scene.has(f"{name}.left.bias")
    near = torch.stack([window.flatten() for window in windows(y, 3, causal=False)])
    hidden = relu(scene.dense(f"{name}.left", y)) + widened(relu(scene.dense(f"{name}.right", near)), 4 * D)
    return widened(separable(scene, f"{name}.output", scene.norm(f"{name}.norm", hidden), 9), D)


def evolved_decoder_conv(scene: Scene, name: str, y: Tensor) -> Tensor:
    left, right = (separable(scene, f"{name}.{part}", y, width) for part, width in (("left", 11), ("right", 7)))
    return separable(scene, f"{name}.output", scene.norm(f"{name}.norm", relu(left) + widened(right, 2 * D)), 7)


def evolved_attentions(scene: Scene, name: str, y: Tensor) -> Tensor:
    """Self-attention with twice the heads and its own position biases, in parallel with cross-attention."""
    heads = self_heads(scene, f"{name}.branches.0", y, 12, "positions.12")
    own = scene.dense(f"{name}.branches.0.output", torch.cat(heads, -1))
    return own + cross_attention(scene, f"{name}.branches.1", y)


def swish_feedforward(scene: Scene, name: str, y: Tensor) -> Tensor:
    return feedforward(scene, name, y, "swish")


def synthesizer(scores: str, mix: str) -> Branch:
    """3.14: two thirds of the heads, twice as wide; q.k has no scale, as in the base."""

    def branch(scene: Scene, name: str, y: Tensor) -> Tensor:
        w, heads, width = scene.weights, 4, 8
        if mix == "alone":
            *query, v = scene.dense(f"{name}.project", y).split(heads * width, -1)
            assert len(query) == (scores == "dense")
            q, k = query[0] if query else None, None
        else:
            q, k, v = scene.dense(f"{name}.qkv", y).chunk(3, -1)

        def score(h: int) -> Tensor:
            columns, T = slice(h * width, (h + 1) * width), len(y)
            if scores == "dense":
                assert q is not None
                synthetic = relu(q[:, columns]) @ w[f"{name}.scores.weight"][:T].T
            elif scores == "random":
                synthetic = w[f"{name}.scores.weight"][h, :T, :T]
            else:
                assert w[f"{name}.scores.keys"].shape == (heads, 16, 16)
                synthetic = w[f"{name}.scores.queries"][h, :T] @ w[f"{name}.scores.keys"][h, :T].T
            if k is not None and q is not None:
                share = sigmoid(w[f"{name}.alpha"]) if mix == "alpha" else None
                product = q[:, columns] @ k[:, columns].T
                synthetic = product + synthetic if share is None else (1 - share) * product + share * synthetic
            return synthetic + biased(scene, "positions.4", h, T)

        return scene.dense(f"{name}.output", torch.cat(mixed(v, heads, score, scene.causal), -1))

    return branch


def weighted(scene: Scene, name: str, y: Tensor) -> Tensor:
    """3.17: sum_i alpha_i FFN(kappa_i head_i W_i)."""
    if scene.has(f"{name}.attention.qkv.weight"):
        heads = self_heads(scene, f"{name}.attention", y, scene.row.heads)
    else:
        heads = cross_heads(scene, f"{name}.attention", y, scene.row.heads)
    kappa, alpha, projections = (scene.weights[f"{name}.{part}"] for part in ("kappa", "alpha", "output"))
    total = torch.zeros_like(y)
    for i, (head, projection) in enumerate(zip(heads, projections.split(WIDTH, -1), strict=True)):
        total = total + alpha[i] * feedforward(scene, f"{name}.feedforward", kappa[i] * (head @ projection.T))
    return total


def experts(used: int) -> Branch:
    """3.13, in evaluation: the best expert times its probability, or the two best weighted by their probabilities."""

    def branch(scene: Scene, name: str, y: Tensor) -> Tensor:
        router, up, down = (scene.weights[f"{name}.{part}"] for part in ("router", "up", "down"))
        assert up.shape == (32, D // used, D)
        out = []
        for token in y:
            p = (router @ token).softmax(0)
            best = sorted(range(32), key=p.tolist().__getitem__)[: -used - 1 : -1]
            total = p[best].sum() + 1e-9 if used == 2 else 1.0
            out.append(torch.stack([p[e] / total * (down[e] @ relu(up[e] @ token)) for e in best]).sum(0))
        return torch.stack(out)

    return branch


def product_keys(scene: Scene, name: str, y: Tensor) -> Tensor:
    """3.18: for each of 4 heads, a weighted sum of the values of the best 32 of all n^2 keys."""
    keys, memory = scene.weights[f"{name}.keys"], scene.weights[f"{name}.memory"]
    queries = scene.norm(f"{name}.norm", scene.dense(f"{name}.query", y).view(len(y), 4, 2, -1), layer_norm)
    out = []
    for token in queries:
        total = torch.zeros(D)
        for h in range(4):
            first, second = (keys[h, half] @ token[h, half] for half in range(2))
            best, at = (first[:, None] + second).flatten().sort(descending=True)
            total = total + best[:32].softmax(0) @ memory[at[:32]]
        out.append(total)
    return torch.stack(out)


def plain_head(scene: Scene, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log p of every id, (log Z)^2 for each label)."""
    scores = h @ table(scene, 2).T
    log_z = scores.exp().sum(-1, keepdim=True).log()
    return scores - log_z, (log_z**2).expand(-1, V)


def adaptive_head(scene: Scene, h: Tensor) -> tuple[Tensor, Tensor]:
    """3.8: a softmax over the first cluster and one entry per tail, then a softmax over the tail."""
    first, *tails = clusters(scene)
    scores = h @ torch.cat((first, scene.weights["head.tails"])).T
    outer_z = scores.exp().sum(-1, keepdim=True).log()
    outer = scores - outer_z
    log_probs, squares = [outer[:, : len(first)]], [(outer_z**2).expand(-1, len(first))]
    for c, matrix in enumerate(tails):
        inner = h @ matrix.T
        inner_z = inner.exp().sum(-1, keepdim=True).log()
        log_probs.append(outer[:, len(first) + c, None] + inner - inner_z)
        squares.append((outer_z**2 + inner_z**2).expand(-1, len(matrix)))
    return torch.cat(log_probs, -1), torch.cat(squares, -1)


def mixture_head(scene: Scene, h: Tensor) -> tuple[Tensor, Tensor]:
    """3.9: a sum of 15 softmaxes."""
    prior = (h @ scene.weights["head.prior.weight"].T).softmax(-1)
    p = torch.zeros(len(h), V)
    for k in range(15):
        context = (h @ scene.weights[f"head.contexts.{k}.weight"].T).tanh()
        p = p + prior[:, k, None] * (context @ table(scene, 2).T).softmax(-1)
    return p.log(), torch.zeros(len(h), V)


@dataclass(frozen=True)
class Row:
    """The specification of a row, for a base of 6 heads of 4, hidden width 24 and usually 2 + 2 layers."""

    phi: str = "relu"
    gated: bool = False
    hidden: int = 24
    base: int = 2  # layers of each stack of the base
    depth: int = 2  # layers of each stack of the row
    heads: int = 6
    rule: str = "pre_norm"
    norms: Mapping[str, Norm | None] = field(default_factory=lambda: dict.fromkeys(("encoder", "decoder"), layer_norm))
    encoder: tuple[Branch, ...] = (self_attention, feedforward)
    decoder: tuple[Branch, ...] = (self_attention, cross_attention, feedforward)
    instead: Mapping[tuple[str, int], Branch] = field(default_factory=dict)  # of feed-forward layers
    shared: tuple[str, ...] = ()  # stacks of one block
    tables: tuple[str, str, str] = ("source", "source", "source")  # of source, target and output
    narrow: tuple[str, ...] = ()  # tables of width 4 with a projection
    widths: tuple[int, ...] = ()  # of the clusters of an adaptive table
    head: Callable[[Scene, Tensor], tuple[Tensor, Tensor]] = plain_head
    trained: bool = True  # False: compared in evaluation mode, because training is random


def gated(phi: str) -> Row:
    return Row(phi, gated=True, hidden=16)


def normed(kind: Norm | None, rule: str = "pre_norm") -> Row:
    return Row(rule=rule, norms=dict.fromkeys(("encoder", "decoder"), kind))


def mixing(branch: Branch, **more: Any) -> Row:
    return Row(encoder=(branch, feedforward), decoder=(branch, cross_attention, feedforward), **more)


OWN, BOTH = ("source", "source", "output"), ("encoder", "decoder")
ROWS = {
    "vanilla": Row(),
    "gelu": Row("gelu"),
    "swish": Row("swish"),
    "elu": Row("elu"),
    "glu": gated("sigmoid"),
    "geglu": gated("gelu"),
    "reglu": gated("relu"),
    "selu": Row("selu"),
    "swiglu": gated("swish"),
    "liglu": gated("linear"),
    "sigmoid": Row("sigmoid"),
    "softplus": Row("softplus"),
    "rms_norm": normed(partial_rms_norm),
    "rezero": normed(None, "rezero"),
    "rezero_layer_norm": normed(layer_norm, "rezero"),
    "rezero_rms_norm": normed(rms_norm, "rezero"),
    "fixup": normed(None, "fixup"),
    "layers_24": Row(base=6, depth=12, heads=3, hidden=12),
    "layers_18": Row(base=6, depth=9, heads=4, hidden=16),
    "layers_8": Row(base=6, depth=4, heads=9, hidden=36),
    "layers_6": Row(base=6, depth=3, heads=12, hidden=48),
    "block_sharing": Row(shared=BOTH, tables=OWN),
    "block_sharing_factorised": Row(shared=BOTH, tables=OWN, narrow=("source",)),
    "block_sharing_factorised_shared": Row(shared=BOTH, narrow=("source",)),
    "block_sharing_encoder": Row(shared=("encoder",), tables=OWN),
    "block_sharing_decoder": Row(shared=("decoder",), tables=OWN),
    "factorised": Row(tables=OWN, narrow=("source",)),
    "factorised_shared": Row(narrow=("source",)),
    "tied_inputs": Row(tables=OWN),
    "tied_decoder": Row(tables=("source", "target", "target")),
    "untied": Row(tables=("source", "target", "output")),
    "adaptive_input": Row(widths=(24, 8, 2)),
    "adaptive_softmax": Row(widths=(24, 8, 2, 24), head=adaptive_head),
    "adaptive_softmax_no_projection": Row(widths=(24, 24, 24, 24), head=adaptive_head),
    "mixture_of_softmaxes": Row(head=mixture_head),
    "transparent": Row(base=3, depth=3),
    "dynamic_conv": mixing(convolution, hidden=4),
    "light_conv": mixing(convolution),
    "evolved": Row(
        base=4,
        encoder=(glu, evolved_encoder_conv, self_attention, feedforward),
        decoder=(evolved_attentions, evolved_decoder_conv, self_attention, cross_attention, swish_feedforward),
    ),
    "synth_dense": mixing(synthesizer("dense", "alone")),
    "synth_dense_plus": mixing(synthesizer("dense", "plus")),
    "synth_dense_plus_alpha": mixing(synthesizer("dense", "alpha")),
    "synth_factorised": mixing(synthesizer("factorised", "alone")),
    "synth_random": mixing(synthesizer("random", "alone")),
    "synth_random_plus": mixing(synthesizer("random", "plus")),
    "synth_random_plus_alpha": mixing(synthesizer("random", "alpha")),
    "universal": Row(rule="gated", depth=6, shared=BOTH, tables=OWN),
    "mixture_of_experts": Row(
        base=4, depth=4, instead=dict.fromkeys((("encoder", 3), ("decoder", 3)), experts(2)), trained=False
    ),
    "switch": Row(base=4, depth=4, instead=dict.fromkeys((("encoder", 3), ("decoder", 3)), experts(1)), trained=False),
    "funnel": Row(base=3, depth=3, norms={"encoder": rms_norm, "decoder": layer_norm}),
    "weighted": Row(encoder=(weighted,), decoder=(weighted, weighted)),
    "product_key_memory": Row(base=3, depth=3, instead={("decoder", 1): product_keys}),
}


def clusters(scene: Scene) -> list[Tensor]:
    """Return the vectors of each cluster of an adaptive table, most frequent ids first."""
    vectors = []
    for c, width in enumerate(scene.row.widths):
        name = f"tables.tables.source.clusters.{c}"
        matrix = scene.weights[f"{name}.weight"]
        assert matrix.shape[1] == width
        vectors.append(matrix if width == D else matrix @ scene.weights[f"{name}.projection"].T)
    return vectors


def table(scene: Scene, use: int) -> Tensor:
    """Return the full vocabulary matrix of the source (0), the target (1) or the output (2)."""
    owner = scene.row.tables[use]
    if scene.row.widths:
        return torch.cat(clusters(scene))
    matrix = scene.weights[f"tables.tables.{owner}.weight"]
    if owner not in scene.row.narrow:
        assert matrix.shape == (V, D)
        return matrix
    assert matrix.shape == (V, 4)
    return matrix @ scene.weights[f"tables.tables.{owner}.projection"].T


def joined(scene: Scene, name: str, branch: Branch, x: Tensor) -> Tensor:
    """Return the residual stream after a sublayer."""
    w, rule = scene.weights, scene.row.rule
    if rule == "fixup":
        return x + w[f"{name}.scale"] * branch(scene, f"{name}.branch", x + w[f"{name}.shift"])
    y = branch(scene, f"{name}.branch", scene.norm(f"{name}.norm", x))
    if rule == "rezero":
        return x + w[f"{name}.alpha"] * y
    if rule == "gated":  # 3.15, with the norm that is applied twice

        def n(x: Tensor) -> Tensor:
            return scene.norm(f"{name}.gate_norm", x)

        def gate(part: str, *inputs: Tensor) -> Tensor:
            return sigmoid(scene.dense(f"{name}.{part}", torch.cat(inputs, -1)))

        z, r = gate("update", n(x), n(y)), gate("reset", n(n(x)), n(n(y)))
        return x + (1 - z) * y + z * gate("candidate", n(r * x), n(y))
    return x + y


def halved(x: Tensor) -> Tensor:
    return torch.stack([x[i : i + 2].mean(0) for i in range(0, len(x), 2)])


def stack(scene: Scene, x: Tensor, shortens: bool) -> list[Tensor]:
    """Return the residual stream before the first layer and after each layer. The last one is the stack's output."""
    row, side, w = scene.row, scene.side, scene.weights
    streams = [x]
    for layer in range(row.depth):
        scene = replace(scene, layer=layer)
        if row.rule == "gated" and 0 < layer < row.depth - 1:  # one step before and one after
            x = x + math.sqrt(D) * w[f"{side}.steps.position"][layer - 1]
        for n, branch in enumerate(getattr(row, side)):
            name = f"{side}.blocks.{0 if side in row.shared else layer}.branches.{n}"
            x = joined(scene, name, row.instead.get((side, layer), branch) if branch is feedforward else branch, x)
            if shortens and layer and n == 0:
                x = halved(x)
        streams.append(x)
    if row.rule == "fixup":
        x = x + w[f"{side}.end.shift"]
        streams[-1] = x * w[f"{side}.end.scale"] if side == "encoder" else x
    else:
        streams[-1] = scene.norm(f"{side}.end", x)
    return streams


def predict(
    row: Row, name: str, weights: Mapping[str, Tensor], source: list[int], target: list[int]
) -> tuple[Tensor, Tensor]:
    """Return (log p of every id after each target token, (log Z)^2)."""
    scene = Scene(row, weights, "encoder")
    streams = stack(scene, table(scene, 0)[source], shortens=name == "funnel")
    memory = [streams[-1]] * row.depth
    if name == "transparent":
        shares = weights["bridge.weight"].softmax(0)
        assert shares.shape == (row.depth + 1, row.depth)
        memory = [
            torch.stack([s * h for s, h in zip(shares[:, j], streams, strict=True)]).sum(0) for j in range(row.depth)
        ]
    scene = Scene(row, weights, "decoder", tuple(memory))
    h = stack(scene, table(scene, 1)[target], shortens=False)[-1]
    tied = row.tables[2] == row.tables[1]
    return row.head(scene, h * D**-0.5 if tied else h)


def model(name: str) -> EncoderDecoderModel:
    """Return a model whose biases are not 0 and gains are not 1. The base of the table has no dropout."""
    base = tiny.narang(depth=ROWS[name].base, d_model=D, heads=6)
    spec = base if name == "vanilla" else apply(name, base)
    model: Any = build(swap(spec, Synthesizer, lambda part: replace(part, max_len=16)))  # scores for 512 take long
    generator = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        small = parameter.dim() < 2 or any(part in key for part in ("position", "scores", "bridge"))
        nn.init.normal_(parameter, std=0.5 if small else 0.7 * parameter.shape[-1] ** -0.5, generator=generator)
    return model.train(ROWS[name].trained)


def test_every_row_has_a_formula() -> None:
    assert {name for name, variant in VARIANTS.items() if variant.row is not None} == ROWS.keys()


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_equals_its_formula(name: str) -> None:
    """Compare log p, the loss with z-loss, and all gradients, for two pairs of sentences of different lengths."""
    row, tested_model = ROWS[name], model(name)
    sources, targets = [[5, 9, 14, 3, 28, 7, 7, 11, 20, 4], [8, 3, 1]], [[0, 6, 21], [0, 12, 4, 25]]
    labels = [[6, 21, 1], [12, 28, 25, 1]]
    (source, source_seg), (target, target_seg) = pad(sources), pad(targets)
    batch = Batch(target, pad(labels)[0], target_seg, source, source_seg)
    weights = dict(tested_model.named_parameters())
    log_probs, expected_loss = tested_model.log_probs(batch), torch.zeros(())
    for b in range(2):
        expected, squares = predict(row, name, weights, sources[b], targets[b])
        torch.testing.assert_close(log_probs[b, : len(targets[b])], expected, rtol=1e-9, atol=1e-9)
        at = range(len(labels[b])), labels[b]
        expected_loss = expected_loss + ((Z if row.trained else 0.0) * squares[at] - expected[at]).sum()
    loss = tested_model.loss(batch).total
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    gradient_pairs = zip(
        weights, gradients(loss, list(weights.values())), gradients(expected_loss, list(weights.values())), strict=True
    )
    for key, gradient, expected_gradient in gradient_pairs:
        assert expected_gradient.abs().max() > 1e-9, f"{key} has no effect"
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-9)
