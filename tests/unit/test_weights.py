"""Copying weights into and out of a model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import DataError, build, preset
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.stacks.plain import Plain
from regard.presets import PRESETS
from regard.testing import tiny
from regard.weights import cat, computed, copy_from, gates, rows, total, transpose, unfused

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


class Layer(nn.Module):
    """A layer of another library, with a name for each projection."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        for name, d_in, d_out in (("q", 6, 6), ("k", 6, 6), ("v", 6, 6), ("o", 6, 6), ("up", 6, 8), ("down", 8, 6)):
            layer = nn.Linear(d_in, d_out)
            layer.weight = nn.Parameter(layer.weight.T.contiguous()) if transposed else layer.weight
            setattr(self, name, layer)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)


MAPPING: dict[str, Any] = {
    "branches.0.branch.qkv": cat("q", "k", "v"),
    "branches.0.branch.output": "o",
    "branches.0.norm": "norm1",
    "branches.1.branch.up": "up",
    "branches.1.branch.down": "down",
    "branches.1.norm": "norm2",
}


def block() -> nn.Module:
    layer = Block((SelfAttention(), FeedForward(8)))
    return build(EncoderDecoder(vocab=9, d_model=6, heads=2, encoder=Plain((layer,), 1))).get_submodule(
        "encoder.blocks.0"
    )


def without(name: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in MAPPING.items() if key != name} | changes


def test_a_module_stands_for_its_weight_and_bias() -> None:
    ours, theirs = block(), Layer()
    copy_from(ours, MAPPING, theirs)
    state = ours.state_dict()
    assert torch.equal(
        state["branches.0.branch.qkv.weight"], torch.cat([theirs.q.weight, theirs.k.weight, theirs.v.weight])
    )
    assert torch.equal(state["branches.0.branch.qkv.bias"], torch.cat([theirs.q.bias, theirs.k.bias, theirs.v.bias]))
    assert torch.equal(state["branches.1.branch.down.weight"], theirs.down.weight)


def test_import_regard_gives_the_module() -> None:
    assert regard.weights.copy_from is copy_from


def test_a_state_dict_is_a_source_as_a_module_is() -> None:
    ours, from_state_dict, theirs = block(), block(), Layer()
    copy_from(ours, MAPPING, theirs)
    copy_from(from_state_dict, MAPPING, theirs.state_dict())
    assert all(map(torch.equal, ours.parameters(), from_state_dict.parameters()))


def test_parts_of_a_fused_projection_can_be_mapped_one_by_one() -> None:
    ours, from_parts, theirs = block(), block(), Layer()
    copy_from(ours, MAPPING, theirs)
    parts = {f"branches.0.branch.{name}": name[0] for name in ("query", "key", "value")}
    copy_from(from_parts, without("branches.0.branch.qkv") | parts, theirs)
    assert all(map(torch.equal, ours.parameters(), from_parts.parameters()))


def test_transpose_turns_matrices_and_leaves_biases() -> None:
    ours, theirs = block(), Layer(transposed=True)
    mapping = {name: transpose(source) for name, source in MAPPING.items()}
    mapping["branches.0.branch.qkv"] = cat(transpose("q"), transpose("k"), transpose("v"))
    copy_from(ours, mapping, theirs)
    assert torch.equal(ours.get_parameter("branches.1.branch.up.weight"), theirs.up.weight.T)
    assert torch.equal(ours.get_parameter("branches.1.branch.up.bias"), theirs.up.bias)


def test_rows_split_a_fused_source_and_braces_stand_for_weight_and_bias() -> None:
    theirs = nn.MultiheadAttention(4, 2)
    ours = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q", "kv", "out")})
    ours["kv"] = nn.Linear(4, 8)
    copy_from(ours, {"q": rows("in_proj_{}", 0, 4), "kv": rows("in_proj_{}", 4), "out": "out_proj"}, theirs)
    assert torch.equal(ours.get_parameter("kv.weight"), theirs.in_proj_weight[4:])
    assert torch.equal(ours.get_parameter("q.bias"), theirs.in_proj_bias[:4])


def test_gates_are_reordered() -> None:
    """Keras and TensorFlow order the gates of an LSTM i, g, f, o or i, f, g, o."""
    ours, kernel = nn.Linear(1, 8, bias=False), torch.arange(8.0)[:, None]
    copy_from(ours, {"weight": gates("kernel", "igfo")}, {"kernel": kernel})
    assert ours.weight.flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    with pytest.raises(DataError, match=r"^gates: 'ifg' and 'ifgo' must hold the same letters"):
        gates("kernel", "ifg")
    with pytest.raises(DataError, match=r"^gates: 7 rows cannot be divided into 4 gates"):
        copy_from(nn.Linear(1, 7, bias=False), {"weight": gates("kernel", "igfo")}, {"kernel": kernel[:7]})


def test_total_adds_and_computed_applies_any_function() -> None:
    ours = nn.LayerNorm(3)
    theirs = {"a": torch.ones(3), "b": 2 * torch.ones(3), "g": torch.zeros(3)}
    copy_from(ours, {"bias": total("a", "b"), "weight": computed(lambda g: g + 1, "g")}, theirs)
    assert ours.bias.tolist() == [3, 3, 3]
    assert ours.weight.tolist() == [1, 1, 1]


def test_stars_stand_for_every_layer() -> None:
    model = build(preset("transformer_tiny", vocab=11), seed=1)
    norms = {name: tensor for name, tensor in unfused(model).items() if ".norm." in name}
    ours = build(preset("transformer_tiny", vocab=11), seed=2)
    other_weights = {name: tensor for name, tensor in unfused(model).items() if name not in norms}
    renamed = {name.replace("blocks", "layers"): tensor + 1 for name, tensor in norms.items()}
    mapping = {
        f"{side}.blocks.*.branches.*.norm": f"{side}.layers.*.branches.*.norm" for side in ("encoder", "decoder")
    }
    copy_from(ours, {**other_weights, **mapping}, renamed)
    assert all(torch.equal(ours.get_parameter(name), tensor + 1) for name, tensor in norms.items())


def test_copies_keep_the_dtype_of_the_model() -> None:
    ours, theirs = block().bfloat16(), Layer()
    copy_from(ours, MAPPING, theirs)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in ours.parameters())


BAD: list[tuple[dict[str, Any], str]] = [
    (
        without("branches.1.norm"),
        r"^branches\.1\.norm\.weight: nothing is mapped to this parameter of shape \(6,\), nor from 1",
    ),
    (
        MAPPING | {"branches.1.norm": "norm"},
        r"^branches\.1\.norm\.weight: the source has no tensor 'norm\.weight'; did you mean 'norm\d\.weight'\?",
    ),
    (
        MAPPING | {"branches.1.branch.up": "down"},
        r"^branches\.1\.branch\.up\.weight: the parameter has the shape \(8, 6\), the tensor .* \(6, 8\); transpose",
    ),
    (
        MAPPING | {"branches.1.branch.down.bias": "norm2.bias"},
        r"^branches\.1\.branch\.down\.bias: mapped twice, also as",
    ),
    (
        MAPPING | {"branches.0.branch.query": "q"},
        r"^branches\.0\.branch\.query\.weight: mapped twice, also as branches\.0\.branch\.qkv\.weight",
    ),
    (
        MAPPING | {"branches.1.end": "norm2"},
        r"^branches\.1\.end: this model has no such weight or module; ",
    ),
    (
        MAPPING | {"branches.1.norm": "norm1"},
        r"^norm2\.weight: the mapping leaves out this tensor of the source, of shape \(6,\), and 1 others; map it",
    ),
    (
        MAPPING | {"branches.1.branch.up": cat("up", "down")},
        r"^branches\.1\.branch\.up\.weight: cannot be computed from tensors of shape \(8, 6\), \(6, 8\): ",
    ),
]


@pytest.mark.parametrize(("mapping", "message"), BAD)
def test_a_wrong_mapping_is_one_sentence_and_copies_nothing(mapping: dict[str, Any], message: str) -> None:
    ours = block()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with pytest.raises(DataError, match=message) as raised:
        copy_from(ours, mapping, Layer())
    assert "\n" not in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_unused_patterns_allow_tensors_to_be_left_out() -> None:
    copy_from(block(), MAPPING, {**Layer().state_dict(), "norm3.weight": torch.ones(1)}, unused=["norm3.*"])


def test_a_tied_table_has_one_name() -> None:
    model = build(preset("transformer_tiny", vocab=11))
    tables = [name for name in unfused(model) if name.startswith("tables")]
    assert tables == ["tables.tables.source.weight"]
    with pytest.raises(DataError, match=r"^tables\.tables\.output: .*the table is tied, so map tables\.tables\.source"):
        copy_from(model, {"tables.tables.output": torch.ones(11, 128)})


def test_a_tensor_of_two_names_is_copied_once_and_used_once() -> None:
    theirs = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    theirs["head"].weight = theirs["table"].weight
    ours = nn.ModuleDict({"a": nn.Embedding(5, 3), "b": nn.Linear(3, 5, bias=False)})
    ours["b"].weight = ours["a"].weight
    copy_from(ours, {"b": "head"}, theirs)
    assert torch.equal(ours.get_parameter("a.weight"), theirs.get_parameter("table.weight"))
    with pytest.raises(DataError, match=r"^b\.weight: mapped twice, also as a\.weight"):
        copy_from(ours, {"a": "table", "b": "head"}, theirs)


def test_a_model_without_storage_is_refused() -> None:
    with pytest.raises(DataError, match=r"^weight: a model on the device 'meta' holds no weights"):
        copy_from(nn.Linear(2, 2, bias=False, device="meta"), {"weight": torch.ones(2, 2)})


@pytest.mark.parametrize("name", PRESETS)
def test_unfused_weights_are_all_weights(name: str) -> None:
    model = build(preset(name), device="meta")
    parts = unfused(model)
    assert sum(part.numel() for part in parts.values()) == sum(parameter.numel() for parameter in model.parameters())
    assert not [part for part in parts if re.search(r"\b(qkv|kv|gate_up)\b", part)]


def test_unfused_weights_can_be_copied_into_another_model() -> None:
    spec = regard.replace_at(tiny.narang(), "decoder.pattern[0].branches[2].gated", True)
    model, copy = build(spec, seed=1), build(spec, seed=2)
    copy_from(copy, unfused(model))
    assert all(map(torch.equal, model.parameters(), copy.parameters()))
    parts = unfused(model)
    queries = model.get_parameter("decoder.blocks.0.branches.0.branch.qkv.weight")[:16]
    assert torch.equal(parts["decoder.blocks.0.branches.0.branch.query.weight"], queries)
    gate: Tensor = parts["decoder.blocks.0.branches.2.branch.gate.weight"]
    assert torch.equal(gate, model.get_parameter("decoder.blocks.0.branches.2.branch.gate_up.weight")[: len(gate)])


def sections() -> dict[str, tuple[list[str], list[tuple[str, str]]]]:
    """Return the presets and the rows of every table of names in docs/weights.md, keyed by heading."""
    page = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tables = {}
    for heading, content in zip(page[1::2], page[2::2], strict=True):
        presets = re.search(r"^Presets: ([^.]*)\.", content, re.MULTILINE)
        if presets:
            table = re.findall(r"^\| `(.*?)` \| (.*) \|$", content, re.MULTILINE)
            tables[heading] = (re.findall(r"`(\w+)`", presets[1]), table)
    return tables


def pattern(name: str) -> re.Pattern[str]:
    """Convert a pattern of names to a regular expression: `{a,b}` is a choice, and `*` a number."""
    choice = re.sub(r"\{(.*?)\}", lambda match: f"({match[1].replace(',', '|')})", name)
    return re.compile(choice.replace(".", r"\.").replace("*", r"\d+"))


SECTIONS = sections()


def test_the_page_covers_every_preset() -> None:
    assert sorted(name for presets, _ in SECTIONS.values() for name in presets) == sorted(PRESETS)


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_lists_the_names_of_every_weight(heading: str) -> None:
    """Every weight has a row, every row a weight, and the parts of a fused weight are listed in their order."""
    presets, table = SECTIONS[heading]
    unused = dict(table)
    for preset_name in presets:
        model = build(preset(preset_name), device="meta")
        parts = unfused(model)
        for name in model.state_dict():
            matches = [row for row in table if pattern(row[0]).fullmatch(name)]
            assert matches, f"{name} of {preset_name} is not in {PAGE.name}"
            for row, _ in matches:
                unused.pop(row, None)
            if name not in parts:
                module = name.rpartition(".rows." if ".rows." in name else ".")[0]
                outer, suffix = module.rpartition(".")[0], name.removeprefix(module)
                pieces = [f"{outer}.{role}{suffix}" for role in re.findall(r"`(\w+)`", matches[0][1])]
                assert [part for part in parts if part in pieces] == pieces
                assert sum(len(parts[part]) for part in pieces) == len(model.state_dict()[name])
    assert not unused


def test_the_programs_of_the_page_run() -> None:
    torch.set_default_dtype(torch.float32)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert names["parts"]["encoder.blocks.0.branches.0.branch.query.weight"].shape == (128, 128)
