"""Inspect texts with one trained model for the lens page, without a trace in the model that other code uses."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.batch import Batch, pad
from regard.inspection import record
from regard.lens.decode import NEW, Decoded, beam_search, decode
from regard.lens.payload import hypotheses_json, number, packed, positions_json, tokens_json, tree_json
from regard.lens.request import LensRequest
from regard.models.build import build
from regard.runs.trained_model import held_out

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel


class Lens:
    def __init__(self, run: "TrainedModel", name: str) -> None:
        self.run, self.name = run, name
        self.lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        run = self.run
        return {"name": self.name, "task": run.command, "kind": run.recipe.model.kind, "parameters": run.parameters,
                "beam": beam_search(run, None).beam_size if run.command != "classify" else 1, "max_len": NEW,
                "heads": {}, "example": "seventy-two thousand, nine hundred and fifty-nine"}

    def inspect(self, request: LensRequest) -> dict[str, Any]:
        warnings = []
        run = self.run
        with self.lock:
            d = decode(run, request.text, request.beam, request.forced, request.max_len, warnings.append)
            best = d.hypotheses[0]
            src = run.tokenizers["source"]
            sids = [*src.encode(request.text), src.eos]
            tids = [run.tokenizer.bos, *best.ids]
            s, sseg = pad([sids]); t, tseg = pad([tids])
            batch = Batch(t, source=s, source_seg=sseg, target_seg=tseg)
            att = record.attention(run.model, batch)
            hs = record.hidden_states(run.model, batch)
            with torch.no_grad():
                lp = run.model.log_probs(batch)[0]
                out = [*best.ids, run.tokenizer.eos]
                preds = []
                for i, tok in enumerate(out):
                    top = lp[i].topk(8)
                    preds.append({"id": tok, "text": run.tokenizer.tokens([tok])[0], "probability": float(lp[i, tok].exp()),
                      "alternatives": [{"id": int(j), "special": int(j) < 3, "text": run.tokenizer.tokens([int(j)])[0], "probability": math.exp(v)} for v, j in zip(top.values.tolist(), top.indices.tolist())]})
                ll = []
                for x in hs["decoder"]:
                    l = run.model.head.log_probs(run.model.decoder.final(x) if hasattr(run.model.decoder,'final') else x, run.model.tables.get("output"))[0]
                    row=[]
                    for i in range(len(out)):
                        top=l[i].topk(3)
                        row.append({"top": [{"id": int(j), "text": run.tokenizer.tokens([int(j)])[0], "special": int(j) < 3, "probability": math.exp(v)} for v, j in zip(top.values.tolist(), top.indices.tolist())], "written": float(l[i,out[i]].exp())})
                    ll.append(row)
        return {"model": self.name, "task": run.command, "text": request.text, "output": run.tokenizer.decode(list(best.ids)),
            "score": best.score, "log_prob": best.log_prob, "ended": best.ended, "forced": list(request.forced),
            "tokens": {"encoder": tokens_json(sids, src), "decoder": tokens_json(tids, run.tokenizer), "output": tokens_json(out, run.tokenizer)},
            "first": 0, "beam": d.search.beam_size,
            "predictions": preds, "attention": {k: [packed(x[0]) for x in v] for k, v in att.items()},
            "logit_lens": ll, "norms": {k: [packed(x[0].norm(dim=-1)) for x in v] for k, v in hs.items()},
            "states": {k: [packed(x[0]) for x in v] for k, v in hs.items()},
            "tree": tree_json(d, run.tokenizer), "hypotheses": hypotheses_json(d, run.tokenizer),
            "positions": positions_json(run, 32), "classes": [], "routing": {}, "warnings": warnings}
