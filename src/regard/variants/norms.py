"""RMS norm (row 13 of Narang et al. 2021), and variants that move the norms to other places in a block."""

from regard.nn.norm import LayerNorm
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.rms_norm import PartialRMSNorm, RMSNorm
from regard.nn.sandwich import Sandwich
from regard.tree import swap
from regard.variants.base import Variant

VARIANTS = {
    "rms_norm": Variant(
        lambda m: swap(m, LayerNorm, lambda norm: PartialRMSNorm(0.0675, norm.eps)),
        "norm",
        "partial RMS norm as in Narang et al.: the mean square of the first 6.75 % of the channels",
        "Zhang and Sennrich 2019",
    ),
    "rms_norm_full": Variant(
        lambda m: swap(m, LayerNorm, lambda norm: RMSNorm(norm.eps)),
        "norm",
        "RMS norm over all channels",
        "Zhang and Sennrich 2019",
    ),
    "post_norm": Variant(
        lambda m: swap(m, PreNorm, lambda r: PostNorm(r.norm)), "norm", "norm(x + f(x))", "Vaswani et al. 2017"
    ),
    "pre_norm": Variant(
        lambda m: swap(m, PostNorm, lambda r: PreNorm(r.norm)), "norm", "x + f(norm(x))", "Xiong et al. 2020"
    ),
    "sandwich": Variant(
        lambda m: swap(m, PreNorm, lambda r: Sandwich(r.norm)), "norm", "x + norm(f(norm(x)))", "Ding et al. 2021"
    ),
}
