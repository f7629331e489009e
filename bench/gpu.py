"""The speed interfaces on a GPU: a packed training step compiled as one graph, and a decode step as a CUDA graph.

Run from the repository root with a CUDA build of torch and transformers:  PYTHONPATH=src python bench/gpu.py
Competitors run interleaved in one process; figures are medians over rounds, in real (unpadded) target tokens a second.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

import regard
from regard.batch import Batch, pack, pad

PAD, BOS, EOS = 0, 1, 2
Pair = tuple[list[int], list[int]]
SHAPES = {
    "base": {"d_model": 512, "heads": 8, "vocab": 10000, "longest": 176},
    "big": {"d_model": 1024, "heads": 16, "vocab": 32000, "longest": 176},
}


def lengths(pairs: int, rng: torch.Generator) -> torch.Tensor:
    """Source and target lengths: log-normal, mean about 26, at most 150 and 175, correlated as translations are."""
    common = torch.randn(pairs, generator=rng)
    own = torch.randn(pairs, 2, generator=rng)
    logs = 3.05 + 0.62 * (0.9 * common[:, None] + 0.44 * own)
    return logs.exp().round().long().clamp(min=2).minimum(torch.tensor([150, 175]))


def corpus(pairs: int, vocab: int, seed: int) -> list[Pair]:
    """Random ids with realistic lengths; the target leaves room for its end."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for s, t in lengths(pairs, rng).tolist():
        source = torch.randint(3, vocab, (s,), generator=rng).tolist()
        made.append((source, torch.randint(3, vocab, (t - 1,), generator=rng).tolist()))
    return made


def packed_batches(pairs: list[Pair], rows: int, width: int, longest: int) -> list[Batch]:
    """Pairs laid into rows of `width` on both sides, `rows` to a batch: one shape for every batch.

    First-fit decreasing within pools of about eight batches, so that a shuffled corpus stays nearly shuffled.
    """
    segments = max(24, width // 20)
    size = sum(len(target) + 1 for _, target in pairs) / len(pairs)
    pool = int(8 * rows * width / size)
    held: list[list[Pair]] = []
    for at in range(0, len(pairs) - pool + 1, pool):
        longest_first = sorted(pairs[at : at + pool], key=lambda pair: -max(len(pair[0]), len(pair[1])))
        open_rows: list[tuple[list[Pair], list[int]]] = []
        for source, target in longest_first:
            for row, left in open_rows:
                if left[0] >= len(source) and left[1] > len(target) and len(row) < segments:
                    break
            else:
                row, left = [], [width, width]
                open_rows.append((row, left))
            row.append((source, target))
            left[0] -= len(source)
            left[1] -= len(target) + 1
        held += [row for row, left in open_rows if min(left) < 0.05 * width]
    batches = []
    for at in range(0, len(held) - rows + 1, rows):
        some = held[at : at + rows]
        source, source_seg, source_pos = pack([[s for s, _ in row] for row in some], width)
        target, target_seg, target_pos = pack([[[BOS, *t] for _, t in row] for row in some], width)
        labels = pack([[[*t, EOS] for _, t in row] for row in some], width)[0]
        places = {"target_pos": target_pos, "source_pos": source_pos}
        sizes = {"packed": True, "segments": segments, "longest": longest}
        batches.append(Batch(target, labels, target_seg, source, source_seg, **places, **sizes).to("cuda"))
    return batches


def padded_batches(pairs: list[Pair], tokens: int) -> list[dict[str, torch.Tensor]]:
    """Token-budget batches sorted by length, as a good user of Hugging Face makes them."""
    ordered = sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0])))
    batches, current, longest = [], [], 0
    for pair in ordered:
        longest_now = max(longest, len(pair[1]) + 1)
        if current and longest_now * (len(current) + 1) > tokens:
            batches.append(current)
            current, longest_now = [], len(pair[1]) + 1
        current.append(pair)
        longest = longest_now
    made = []
    for group in batches:
        source, source_seg = pad([s for s, _ in group])
        target, _ = pad([[BOS, *t] for _, t in group])
        labels, seg = pad([[*t, EOS] for _, t in group])
        batch = {
            "input_ids": source,
            "attention_mask": source_seg,
            "decoder_input_ids": target,
            "labels": labels.masked_fill(seg == 0, -100),
        }
        made.append({name: tensor.cuda() for name, tensor in batch.items()})
    return made


def marian(shape: dict[str, Any]) -> Any:
    """Hugging Face's encoder-decoder at the same shape."""
    from transformers import MarianConfig, MarianMTModel  # noqa: PLC0415  # only this competitor needs it

    d, heads, vocab = shape["d_model"], shape["heads"], shape["vocab"]
    settings: dict[str, Any] = {
        **{f"{side}_layers": 6 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * d for side in ("encoder", "decoder")},
        "vocab_size": vocab,
        "d_model": d,
        "max_position_embeddings": 256,
        "dropout": 0.1,
        "activation_function": "relu",
        "scale_embedding": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    model: Any = MarianMTModel(MarianConfig(**settings))
    return model.cuda().train()


def hf_step(shape: dict[str, Any], pairs: list[Any], tokens: int, dtype: str) -> tuple[Callable[[int], int], str]:
    """A training step of Hugging Face Marian, eager, with fused AdamW."""
    model = marian(shape)
    if dtype == "bf16":
        model = model.bfloat16()
    batches = padded_batches(pairs, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0)).tolist()
    real = [int((batch["labels"] != -100).sum()) for batch in batches]

    def step(i: int) -> int:
        n = order[i % len(order)]
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "autocast"):
            loss = model(**batches[n]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return real[n]

    return step, f"hf marian, eager, {dtype}"


def our_step(shape: dict[str, Any], pairs: list[Pair], packing: str) -> tuple[Callable[[int], int], str]:
    """A training step of the composed stack: one packed shape, compiled as one graph, float32 weights in autocast.

    With "+graph" the whole step (forward, backward, optimizer) is also captured as one CUDA graph.
    """
    spec = regard.preset("transformer_base", vocab=shape["vocab"], d_model=shape["d_model"], heads=shape["heads"])
    model = regard.build(spec, device="cuda").train()
    sizes, _, captured = packing.partition("+")
    rows, width = (int(n) for n in sizes.split("x"))
    batches = packed_batches(pairs, rows, width, shape["longest"])
    real = [int((batch.target_seg != 0).sum()) for batch in batches if batch.target_seg is not None]
    print(f"  packed {sizes}: {len(batches)} batches, fill {sum(real) / len(real) / rows / width:.3f}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=bool(captured))

    def forward(batch: Batch) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            total, count, _, _ = model.loss(batch)
        return total / count

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)

    def once(batch: Batch) -> None:
        compiled(batch).backward()
        optimizer.step()

    title = f"regard, packed {sizes}, compiled{', CUDA graph' if captured else ''}"
    if not captured:

        def step(i: int) -> int:
            once(batches[i % len(batches)])
            optimizer.zero_grad()
            return real[i % len(batches)]

        return step, title

    start = time.time()
    still = replace(batches[0], **{name: getattr(batches[0], name).clone() for name in tensors(batches[0])})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            once(still)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once(still)
    print(f"  {title}: captured after {time.time() - start:.1f} s", flush=True)

    def replay(i: int) -> int:
        n = i % len(batches)
        for name in tensors(still):
            getattr(still, name).copy_(getattr(batches[n], name))
        graph.replay()
        return real[n]

    return replay, title


def tensors(batch: Batch) -> list[str]:
    """The fields of a batch that hold tensors."""
    return [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), torch.Tensor)]


def train(name: str, packings: list[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Tokens a second of every competitor, interleaved."""
    shape = SHAPES[name]
    pairs = corpus(30000, shape["vocab"], seed=0)
    competitors = [hf_step(shape, pairs, 16384, dtype) for dtype in ("autocast", "bf16")]
    competitors += [our_step(shape, pairs, packing) for packing in packings]
    for step, title in competitors:
        start = time.time()
        for i in range(50):  # every shape of the padded batches at least once, so that no allocation is timed
            step(i)
        torch.cuda.synchronize()
        print(f"  {title}: warm after {time.time() - start:.1f} s", flush=True)
    speeds: dict[str, list[float]] = {title: [] for _, title in competitors}
    for r in range(rounds):
        for step, title in competitors:
            torch.cuda.synchronize()
            start, done = time.perf_counter(), 0
            for i in range(steps):
                done += step(r * steps + i)
            torch.cuda.synchronize()
            speeds[title].append(done / (time.perf_counter() - start))
    best = max(statistics.median(speeds[title]) for _, title in competitors[:2])
    rows = []
    for title, seen in speeds.items():
        median = statistics.median(seen)
        rows.append({"shape": name, "name": title, "tokens_per_second": round(median), "ratio": round(median / best, 2),
                     "lowest": round(min(seen)), "highest": round(max(seen))})  # fmt: skip
        print(f"{name:5} {title:44} {median:10.0f} tokens/s  {median / best:5.2f}x", flush=True)
    return rows


@torch.no_grad()
def decode(batch_size: int, beams: int, dtype: torch.dtype) -> dict[str, Any]:
    """One decode step captured as a CUDA graph, against the same step run eagerly: equal, and how much faster."""
    spec = regard.preset("transformer_base", vocab=10000)
    model: Any = regard.build(spec, device="cuda").eval().to(dtype)
    rows, length, steps = batch_size * beams, 64, 40
    rng = torch.Generator().manual_seed(1)
    source, seg = pad([torch.randint(3, 10000, (10 + i % 15,), generator=rng).tolist() for i in range(batch_size)])
    batch = Batch(target=source, source=source, source_seg=seg).to("cuda")
    first = torch.full((rows, 1), BOS, device="cuda")
    parents = torch.randint(0, beams, (steps, rows), generator=rng) + (torch.arange(rows) // beams * beams)
    parents = parents.cuda()

    def run(
        step: Callable[[], torch.Tensor], ids: torch.Tensor, parent: torch.Tensor, reorder: Callable[[], None]
    ) -> Any:
        ids.copy_(first)
        said, scores = [], []
        torch.cuda.synchronize()
        start = time.perf_counter()
        for n in range(steps):
            log_probs = step()
            scores.append(log_probs.clone())
            said.append(log_probs.argmax(-1))
            parent.copy_(parents[n])
            reorder()
            ids.copy_(said[-1][parents[n]][:, None])
        torch.cuda.synchronize()
        return torch.stack(said), torch.stack(scores), time.perf_counter() - start

    ids, parent = first.clone(), parents[0].clone()

    def eagerly() -> Any:
        decoding = model.start(batch, length, beams=beams, static=True)
        return run(lambda: model.advance(ids, decoding), ids, parent, lambda: decoding.reorder(parent))

    eagerly()  # warm
    plain = eagerly()

    captured = model.start(batch, length, beams=beams, static=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.advance(ids, captured)
            captured.reorder(parent)
    torch.cuda.current_stream().wait_stream(stream)
    step_graph, order_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(step_graph):
        out = model.advance(ids, captured)
    with torch.cuda.graph(order_graph):
        captured.reorder(parent)

    def replay() -> torch.Tensor:
        step_graph.replay()
        return out

    captured.rows.lengths.zero_()
    run(replay, ids, parent, order_graph.replay)
    captured.rows.lengths.zero_()
    graph = run(replay, ids, parent, order_graph.replay)
    row = {
        "decode": f"batch {batch_size} beam {beams} {str(dtype)[6:]}",
        "tokens_equal": bool(torch.equal(plain[0], graph[0])),
        "largest_difference": (plain[1] - graph[1]).abs().max().item(),
        "eager_ms_per_step": round(1000 * plain[2] / steps, 3),
        "graph_ms_per_step": round(1000 * graph[2] / steps, 3),
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Everything, as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="base")
    parser.add_argument(
        "--packings",
        default="1x16384,32x512+graph,64x512+graph",
        help="rows x width of a packed batch, comma-separated",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", help="write the rows here")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device; bench/overhead.py runs on a CPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    rows = [decode(size, 5, dtype) for size in (1, 64) for dtype in (torch.float32, torch.bfloat16)]
    for name in given.shapes.split(","):
        rows += train(name, given.packings.split(","), given.rounds, given.steps)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
