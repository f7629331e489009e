"""Generate one very long sequence with tiny models whose decoding state is bounded, and print how much memory is used.

    python bench/endless.py --tokens 1000000

Two language models: attention to a window and to attention sinks, whose keys and values are in a ring, and the gated
delta rule, whose state is one matrix per head. The bytes of all live tensors must not grow with the number of tokens.
"""

import argparse
import gc
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from regard import fast
from regard.batch import Batch
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.sample import Sample
from regard.decoding.search import stream
from regard.models.base import ModelSpec
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.pattern import Sinks
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain

VOCAB = 32


def models(window: int) -> dict[str, ModelSpec]:
    """Return the two tiny language models by name."""
    attention = Block((SelfAttention(), FeedForward(32)), PreNorm())
    delta = Block((GatedDelta(), FeedForward(32)), PreNorm())
    stacks = {
        "ring": Plain((attention,), 1, position=Rotary(), attention_pattern=Sinks(window, 4)),
        "gated delta rule": Plain((delta,), 1),
    }
    spec = DecoderOnly(vocab=VOCAB, d_model=16, heads=2, dropout=0.0)
    bare = replace(spec.input, position=None)  # type: ignore[reportCallIssue]
    return {name: replace(spec, input=bare, decoder=stack) for name, stack in stacks.items()}


def measure(name: str, spec: ModelSpec, tokens: int) -> Iterator[dict[str, float | str]]:
    """Generate `tokens` tokens. Yield the memory in use after powers of ten."""
    torch.manual_seed(0)
    model = build(spec).eval()
    fast.install(model)  # without `fixed`: the bytes of prepacked weights cannot be counted
    prompt, ends = Batch(torch.tensor([[3, 4, 5]])), SpecialTokens(0, 1, 2)
    begin, limits = time.perf_counter(), Limits(max_len=tokens, min_len=tokens)
    for number, _ in enumerate(stream([model], prompt, Sample(), ends, limits), 1):  # type: ignore[reportArgumentType]
        if number in {10**power for power in range(2, 10)} or number == tokens:
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
            yield {
                "name": name,
                "tokens": number,
                "tensor_bytes": sum(storages.values()),
                "process_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "seconds": time.perf_counter() - begin,
            }


def main() -> None:
    """Print one line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="Number of tokens to generate with each model.")
    parser.add_argument("--window", type=int, default=64, help="Size of the attention window.")
    parser.add_argument("--only", help="Name of the only model to run.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, spec in models(options.window).items():
        if options.only in (None, name):
            for row in measure(name, spec, options.tokens):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
