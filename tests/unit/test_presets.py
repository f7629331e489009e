import time

import pytest

from regard.errors import SpecError
from regard.models.build import build, count
from regard.presets import PRESETS, preset

EXACT = {
    "bert_base": 109_482_240,
    "gpt2_small": 124_439_808,
    "narang_base": 223_043_328,
    "t5_base": 222_903_552,
}


def by_hand(depth: int, d: int, hidden: int, vocab: int) -> int:
    """Vaswani et al.: projections with biases, one shared table, post-norm (no norm at the end), sinusoids."""
    attention, norm = 4 * (d * d + d), 2 * d
    feedforward = d * hidden + hidden + hidden * d + d
    encoder = attention + feedforward + 2 * norm
    decoder = 2 * attention + feedforward + 3 * norm
    return vocab * d + depth * (encoder + decoder)


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_parameter_counts_of_published_models(name: str, parameters: int) -> None:
    assert count(preset(name)) == parameters


@pytest.mark.parametrize(
    ("name", "depth", "d", "hidden", "vocab"),
    [
        ("transformer_base", 6, 512, 2048, 37000),
        ("transformer_big", 6, 1024, 4096, 37000),
        ("transformer_small", 3, 256, 1024, 10000),
        ("transformer_tiny", 4, 128, 256, 10000),
        ("transformer_ed", 6, 512, 2048, 32768),
    ],
)
def test_parameter_counts_of_the_first_transformers(name: str, depth: int, d: int, hidden: int, vocab: int) -> None:
    assert count(preset(name)) == by_hand(depth, d, hidden, vocab)


def test_parameter_counts_of_the_decoders_for_long_sources() -> None:
    """Transformer-DMCA has the layers local, compressed, local, compressed, local, and a norm after the last."""
    vocab = 32768

    def layer(d: int, hidden: int) -> int:
        return 4 * (d * d + d) + 2 * d * hidden + hidden + d + 2 * 2 * d

    assert count(preset("transformer_d")) == vocab * 512 + 6 * layer(512, 2048)
    d, hidden = 1024, 2048
    compression = 2 * (3 * d * d + d)
    dmca = vocab * d + 5 * layer(d, hidden) + 2 * compression + 2 * d
    assert count(preset("transformer_dmca")) == dmca
    experts = 256 * (2 * d + 2 * d * hidden)  # gate, noise and experts, without biases
    assert count(preset("transformer_dmca_moe")) == dmca - (2 * d * hidden + hidden + d) + experts


def test_parameter_counts_of_the_lecture_preset() -> None:
    d, hidden, vocab = 256, 1024, 10000
    attention, feedforward, norm = 3 * d * d, d * hidden + hidden + hidden * d + d, d
    encoder, decoder = attention + norm + feedforward, 2 * attention + norm + feedforward
    assert count(preset("sahai")) == vocab * d + 3 * (encoder + decoder)


def test_parameter_counts_of_the_hybrid() -> None:
    """Nine layers with the gated delta rule and three with attention, all with SwiGLU and without biases."""
    d, heads, key, value, hidden = 768, 12, 64, 128, 2048
    qkv, gate = heads * (2 * key + value), heads * value
    delta = d * (qkv + gate + 2 * heads) + 4 * qkv + 2 * heads + value + gate * d
    attention, rest = 4 * d * d + 2 * key, 3 * d * hidden + 2 * d
    assert count(preset("hybrid")) == 32000 * d + 9 * (delta + rest) + 3 * (attention + rest) + d


def convolutional(layers: list[tuple[int, int]], d: int, attends: bool) -> int:
    """Weight-normalised: a projection of n to m has n m + 2 m numbers, with its lengths and biases."""

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + 2 * outputs

    total, before = linear(d, layers[0][0]), layers[0][0]
    for width, kernel in layers:
        total += linear(kernel * before, 2 * width) + (linear(before, width) if before != width else 0)
        total += linear(width, d) + linear(d, width) if attends else 0
        before = width
    return total


@pytest.mark.parametrize(
    ("name", "encoder", "decoder", "d", "out", "vocab"),
    [
        ("convs2s", [(256, 3)] * 4, [(256, 3)] * 3, 256, 256, 10000),
        *[
            ("convs2s_wmt", wide, wide, 768, 512, 40000)
            for wide in [[(512, 3)] * 9 + [(1024, 3)] * 4 + [(2048, 1)] * 2]
        ],
    ],
)
def test_parameter_counts_of_convs2s(
    name: str, encoder: list[tuple[int, int]], decoder: list[tuple[int, int]], d: int, out: int, vocab: int
) -> None:
    """As fairseq's: two tables and 1,024 positions each, and a weight-normalised last layer."""
    tables = 2 * (vocab + 1024) * d + vocab * out + 2 * vocab
    ends = (encoder[-1][0] + 2) * d + (decoder[-1][0] + 2) * out
    layers = convolutional(encoder, d, attends=False) + convolutional(decoder, d, attends=True)
    assert count(preset(name)) == tables + ends + layers


@pytest.mark.parametrize(("name", "blocks", "d"), [("bytenet", 30, 800), ("bytenet_small", 10, 256)])
def test_parameter_counts_of_bytenet(name: str, blocks: int, d: int) -> None:
    half, vocab = d // 2, 300
    block = d * half + half + 3 * half * half + half + half * d + d + 2 * d + 4 * half
    assert count(preset(name)) == vocab * d + d + 2 * blocks * block + 2 * d * d + d + 2 * d


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_on_the_meta_device_quickly(name: str) -> None:
    start = time.perf_counter()
    model = build(preset(name), device="meta")
    assert time.perf_counter() - start < 5.0
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.spec == preset(name)


def test_overrides_change_fields_by_path() -> None:
    spec = preset("t5_base", vocab=8000, **{"decoder.depth": 3, "encoder.position": "alibi"})
    assert (spec.vocab, spec.decoder.depth, spec.encoder.position.kind) == (8000, 3, "alibi")  # type: ignore[reportAttributeAccessIssue]
    with pytest.raises(SpecError, match=r"^decoder\.dept: unknown key 'dept' in 'plain'; did you mean 'depth'\?"):
        preset("t5_base", **{"decoder.dept": 3})


def test_an_unknown_preset_suggests_the_nearest_name() -> None:
    with pytest.raises(SpecError, match="unknown preset 't5_bas'; did you mean 't5_base'"):
        preset("t5_bas")
