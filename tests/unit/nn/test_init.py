import math
from collections.abc import Callable

import pytest
import torch

from regard.nn.core import Role, Site
from regard.nn.init import DeepNormInit, FanIn, GPT2Init, Init, Normal, T5Init, Uninitialized, Xavier

MakeSite = Callable[..., Site]
OUT, IN = 120, 200  # a projection from 200 to 120; a table of 120 rows
ROLES: tuple[Role, ...] = (
    "query",
    "key",
    "value",
    "attend_out",
    "up",
    "gate",
    "down",
    "router",
    "head",
    "other",
    "embedding",
    "position",
)
GLOROT = math.sqrt(2 / (OUT + IN))
TABLE = IN**-0.5


def expected(init: Init, role: Role, site: Site) -> float:
    """Return the standard deviation of a weight of this role, from the paper of the init."""
    N, M = site.encoder_depth, site.decoder_depth
    if isinstance(init, Xavier):
        return TABLE if role in ("embedding", "position") else GLOROT
    if isinstance(init, Normal):
        return init.std
    if isinstance(init, GPT2Init):
        return {"attend_out": init.std / math.sqrt(2 * site.depth), "down": init.std / math.sqrt(2 * site.depth)}.get(
            role, init.std / 2 if role == "position" else init.std
        )
    if isinstance(init, FanIn):
        return {"embedding": 1.0, "position": site.d_model**-0.5}.get(role, IN**-0.5)
    if isinstance(init, T5Init):
        special = {"query": (IN * site.d_head) ** -0.5, "embedding": 1.0, "position": site.d_model**-0.5}
        return special.get(role, IN**-0.5)
    assert isinstance(init, DeepNormInit)
    if role in ("embedding", "position"):
        return TABLE
    single = (8 * (N or M)) ** -0.25
    double = 0.87 * (N**4 * M) ** (-1 / 16) if site.side == "encoder" and N and M else (12 * max(M, 1)) ** -0.25
    beta = double if N and M else single
    return GLOROT * (beta if role in ("value", "attend_out", "up", "gate", "down") else 1.0)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "init", [Xavier(), Normal(), Normal(0.3), GPT2Init(), GPT2Init(0.1), T5Init(), FanIn()], ids=repr
)
def test_standard_deviation_by_role(init: Init, role: Role, site: MakeSite) -> None:
    check(init, role, site())


@pytest.mark.parametrize("role", ["query", "key", "value", "attend_out", "up", "gate", "down", "embedding"])
@pytest.mark.parametrize(
    ("N", "M", "side"), [(3, 7, "encoder"), (3, 7, "decoder"), (9, 0, "encoder"), (0, 9, "decoder")]
)
def test_deep_norm_init(N: int, M: int, side: str, role: Role, site: MakeSite) -> None:
    check(DeepNormInit(), role, site(encoder_depth=N, decoder_depth=M, side=side))


def check(init: Init, role: Role, site: Site) -> None:
    weight = torch.full((OUT, IN), math.nan)
    init.draw(weight, role, site)
    std = expected(init, role, site)
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.02 * std)
    uniform = isinstance(init, Xavier) and role not in ("embedding", "position")
    # A uniform draw ends at sqrt(3) standard deviations; a normal one of this size goes beyond 3.5.
    assert (weight.abs().max().item() <= math.sqrt(3) * std * 1.001) is uniform
    assert weight.abs().max().item() > (1.72 if uniform else 3.5) * std


def test_gpt2_scales_by_the_depth_of_the_stack(site: MakeSite) -> None:
    shallow, deep = torch.empty(OUT, IN), torch.empty(OUT, IN)
    GPT2Init().draw(shallow, "down", site(depth=1))
    GPT2Init().draw(deep, "down", site(depth=16))
    assert (shallow.std() / deep.std()).item() == pytest.approx(4.0, rel=0.02)


def test_uninitialized_changes_no_weight(site: MakeSite) -> None:
    weight, rng_state = torch.arange(6.0).reshape(2, 3), torch.get_rng_state()
    Uninitialized().draw(weight, "query", site())
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(torch.get_rng_state(), rng_state)
