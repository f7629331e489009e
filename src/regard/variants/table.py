"""The rows of the table in Narang et al. 2021, by variant name."""

from typing import NamedTuple


class Row(NamedTuple):
    """A table row: its number and the exact parameter counts of the published runs."""

    number: int
    parameters: int  # with the base narang_base
    learned: int  # with learned positions instead of the bucketed bias


ROWS = {
    "vanilla": Row(1, 223_043_328, 223_435_776),
    "gelu": Row(2, 223_043_328, 223_435_776),
    "swish": Row(3, 223_043_328, 223_435_776),
    "elu": Row(4, 223_043_328, 223_435_776),
    "glu": Row(5, 223_067_904, 223_460_352),
    "geglu": Row(6, 223_067_904, 223_460_352),
    "reglu": Row(7, 223_067_904, 223_460_352),
    "selu": Row(8, 223_043_328, 223_435_776),
    "swiglu": Row(9, 223_067_904, 223_460_352),
    "liglu": Row(10, 223_067_904, 223_460_352),
    "sigmoid": Row(11, 223_043_328, 223_435_776),
    "softplus": Row(12, 223_043_328, 223_435_776),
    "rms_norm": Row(13, 222_995_712, 223_388_160),
    "rezero": Row(14, 222_948_156, 223_340_604),
    "rezero_layer_norm": Row(15, 223_043_388, 223_435_836),
    "rezero_rms_norm": Row(16, 222_995_772, 223_388_220),
    "fixup": Row(17, 222_856_083, 223_248_531),
    "layers_24": Row(18, 223_153_536, 223_546_368),
    "layers_18": Row(19, 223_098_368, 223_491_072),
    "layers_8": Row(20, 223_006_848, 223_398_912),
    "layers_6": Row(21, 222_988_800, 223_380_480),
    "block_sharing": Row(22, 65_882_880, 66_275_328),
    "block_sharing_factorised": Row(23, 45_419_264, 45_811_712),
    "block_sharing_factorised_shared": Row(24, 20_744_960, 21_137_408),
    "block_sharing_encoder": Row(25, 169_784_832, 170_177_280),
    "block_sharing_decoder": Row(26, 143_815_680, 144_208_128),
    "factorised": Row(27, 227_254_016, 227_646_464),
    "factorised_shared": Row(28, 202_579_712, 202_972_160),
    "tied_inputs": Row(29, 247_717_632, 248_110_080),
    "tied_decoder": Row(30, 247_717_632, 248_503_296),
    "untied": Row(31, 272_391_936, 273_177_600),
    "adaptive_input": Row(32, 203_582_976, 203_975_424),
    "adaptive_softmax": Row(33, 203_675_392, 204_067_840),
    "adaptive_softmax_no_projection": Row(34, 223_045_632, 223_438_080),
    "mixture_of_softmaxes": Row(35, 231_902_208, 232_294_656),
    "transparent": Row(36, 223_043_484, 223_435_932),
    "dynamic_conv": Row(37, 256_269_312, 256_662_528),
    "light_conv": Row(38, 223_300_608, 223_693_824),
    "evolved": Row(39, 216_344_064, 216_735_744),
    "synth_dense": Row(40, 224_615_936, 225_009_152),
    "synth_dense_plus": Row(41, 243_490_304, 243_883_520),
    "synth_dense_plus_alpha": Row(42, 243_490_328, 243_883_544),
    "synth_factorised": Row(43, 207_314_432, 207_707_648),
    "synth_random": Row(44, 254_500_352, 254_893_568),
    "synth_random_plus": Row(45, 292_249_088, 292_642_304),
    "synth_random_plus_alpha": Row(46, 292_249_112, 292_642_328),
    "universal": Row(47, 83_633_664, 84_026_112),
    "mixture_of_experts": Row(48, 647_841_024, 648_233_472),
    "switch": Row(49, 1_100_825_856, 1_101_218_304),
    "funnel": Row(50, 223_024_128, 223_416_576),
    "weighted": Row(51, 279_676_512, 280_068_960),
    "product_key_memory": Row(52, 420_303_488, 420_695_936),
}
