"""Hugging Face's Marian with regard's weights, in eager mode, with PyTorch's fused attention (SDPA)."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.batch import Batch, pad
from regard.bench.peers.base import DecodingModel, Ids, TrainingModel, columns, count, library, smoothed
from regard.bench.race import UnfairError
from regard.bench.shapes import BOS, EOS, PAD, Shape


def marian(shape: Shape, ours: nn.Module) -> Any:
    """Return a MarianMTModel with the weights of `ours`."""
    hub = library("transformers")
    sizes = {"layers": shape.depth, "ffn_dim": shape.d_hidden, "attention_heads": shape.heads}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    config = hub.MarianConfig(
        **sides,
        vocab_size=shape.vocab,
        d_model=shape.d_model,
        max_position_embeddings=256,
        dropout=shape.dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        attn_implementation="sdpa",
    )
    theirs = hub.MarianMTModel(config)
    # Not strict, because Marian also stores its sinusoids, a zero bias for the logits, and a copy of the tied table.
    _, unknown = theirs.load_state_dict(renamed(ours.state_dict(), shape.depth), strict=False)
    if unknown or count(theirs) != count(ours):
        raise UnfairError(f"transformers {hub.__version__} has a Marian with unexpected parameters")
    return theirs


def training_model(shape: Shape, smoothing: float, ours: nn.Module) -> TrainingModel:
    """Return Marian with torch's cross-entropy as its loss."""
    theirs = marian(shape, ours)

    def prepare(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        source, real, read, labels = columns(batch)
        # A causal decoder needs no mask for padding at the end.
        return {"input_ids": source, "attention_mask": real.long(), "decoder_input_ids": read}, labels

    def loss(inputs: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return smoothed(theirs(**inputs[0], use_cache=False).logits, inputs[1], smoothing)

    return TrainingModel("hf marian", theirs, prepare, loss, copied=True, pure_half=True)


def decoding_models(shape: Shape, ours: nn.Module, device: torch.device, dtype: torch.dtype) -> list[DecodingModel]:
    """Return Marian, with its method `generate` as the beam search."""
    theirs = marian(shape, ours).to(device, dtype).eval()
    parameters = count(theirs)

    def search(sources: Ids, beams: int, length: int) -> Ids:
        ids, seg = pad(sources)
        lengths = {"min_new_tokens": length, "max_new_tokens": length}
        outputs: Tensor = theirs.generate(
            ids.to(device), attention_mask=seg.to(device), num_beams=beams, do_sample=False, **lengths
        )
        return outputs[:, 1:].tolist()

    return [DecodingModel("hf generate", parameters, search)]


def renamed(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Return the weights `state` of a regard model, with the parameter names of Marian."""
    theirs = {"model.shared.weight": state["tables.tables.source.weight"]}

    def copy(our: str, *names: str) -> None:
        for kind in ("weight", "bias"):
            for name, part in zip(names, state[f"{our}.{kind}"].chunk(len(names)), strict=True):
                theirs[f"{name}.{kind}"] = part

    for side in ("encoder", "decoder"):
        for i in range(depth):
            our, their = f"{side}.blocks.{i}.branches", f"model.{side}.layers.{i}"
            copy(f"{our}.0.branch.qkv", *(f"{their}.self_attn.{x}_proj" for x in "qkv"))
            copy(f"{our}.0.branch.output", f"{their}.self_attn.out_proj")
            copy(f"{our}.0.norm", f"{their}.self_attn_layer_norm")
            if side == "decoder":
                copy(f"{our}.1.branch.query", f"{their}.encoder_attn.q_proj")
                copy(f"{our}.1.branch.kv", *(f"{their}.encoder_attn.{x}_proj" for x in "kv"))
                copy(f"{our}.1.branch.output", f"{their}.encoder_attn.out_proj")
                copy(f"{our}.1.norm", f"{their}.encoder_attn_layer_norm")
            last = 1 if side == "encoder" else 2
            copy(f"{our}.{last}.branch.up", f"{their}.fc1")
            copy(f"{our}.{last}.branch.down", f"{their}.fc2")
            copy(f"{our}.{last}.norm", f"{their}.final_layer_norm")
    return theirs
