"""Settings that DTensor reads once, at its first program. They are made before TensorFlow has run."""

from __future__ import annotations

import os
import warnings

from tensorflow.python.eager import context

COMBINER = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"
# Of more than three dims it misorders what it moves; without it, what is cut anew is gathered first.
ALL_TO_ALL = "DTENSOR_USE_ALL_TO_ALL_RELAYOUT"
REPLICATED = "DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF."
# Ops without a rule of their own in DTensor: their inputs are gathered, and every device computes the whole.
WITHOUT_A_RULE = (
    *("ARGMIN", "AVGPOOL", "AVGPOOL3D", "AVGPOOL3DGRAD", "AVGPOOLGRAD", "BUCKETIZE", "CROSS", "CUMPROD"),
    *("DENSEBINCOUNT", "DEPTHWISECONV2DNATIVE", "DEPTHWISECONV2DNATIVEBACKPROPFILTER"),
    *("DEPTHWISECONV2DNATIVEBACKPROPINPUT", "HSVTORGB", "IMAGEPROJECTIVETRANSFORMV3", "LOGMATRIXDETERMINANT"),
    *("LOWERBOUND", "MATRIXBANDPART", "MATRIXDETERMINANT", "MATRIXDIAGPARTV3", "MATRIXDIAGV3", "MATRIXINVERSE"),
    *("MATRIXSETDIAGV3", "MATRIXSOLVE", "MATRIXTRIANGULARSOLVE", "MIRRORPAD", "MIRRORPADGRAD", "QR"),
    *("RESIZEBILINEAR", "RESIZEBILINEARGRAD", "RESIZENEARESTNEIGHBOR", "RESIZENEARESTNEIGHBORGRAD", "REVERSEV2"),
    *("RGBTOHSV", "ROLL", "SELFADJOINTEIGV2", "STATELESSMULTINOMIAL", "STATELESSRANDOMBINOMIAL"),
    *("STATELESSRANDOMGAMMAV3", "STATELESSRANDOMPOISSON", "STATELESSSHUFFLE", "SVD", "UNSORTEDSEGMENTMAX"),
    *("UNSORTEDSEGMENTMIN", "UNSORTEDSEGMENTPROD", "UPPERBOUND"),
)


def prepare() -> None:
    """Switches DTensor's combiner of all-reduces and its all_to_all off.

    Switches gathering on for ops without a rule.

    With the combiner some data-parallel steps apply the optimizer's slots of the step before; with its all_to_all
    (TensorFlow 2.21) a tensor of four dims that is cut along another one is another tensor. Neither is an error.

    Warns:
        UserWarning: TensorFlow has run already with the combiner on, so that DTensor may have read its setting.
    """
    late = context.context()._initialized and os.environ.get(COMBINER) != "0"
    os.environ[COMBINER] = os.environ[ALL_TO_ALL] = "0"
    for op in WITHOUT_A_RULE:
        os.environ.setdefault(REPLICATED + op, "1")
    if late:
        warnings.warn(
            "TensorFlow ran before unidist.use: if DTensor was used already, it still combines all-reduces, which can "
            f"make optimizers apply stale states. Call unidist.use first, or set {COMBINER}=0",
            UserWarning,
            stacklevel=4,
        )
