"""What dispatch saves: a block of experts of keras_hub, on one device, by plain Keras and with experts="dispatch".

Plain Keras computes each of 8 experts for each token, of which 2 have a weight: 2 / 8 of the work is needed. The two
take turns in one process, on torch in one thread; outputs are compared at the end, so that nothing fast is wrong.

    KERAS_BACKEND=jax python benchmarks/experts.py
    KERAS_BACKEND=torch python benchmarks/experts.py --tokens 1024 --width 256 --hidden 1024
"""

from __future__ import annotations

import argparse
from typing import Any

import unidist

EXPERTS, CHOSEN = 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("tokens", 1024), ("width", 256), ("hidden", 1024), ("repetitions", 15)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    unidist.use("sim", devices=1)
    import keras
    import numpy as np
    from keras_hub.src.models.mixtral.mixtral_decoder import MixtralSparseMoeBlock
    from paired import report, seconds

    if keras.config.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    x = np.random.default_rng(0).normal(size=(8, given.tokens // 8, given.width)).astype("float32")

    def made() -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input(x.shape[1:])
        block = MixtralSparseMoeBlock(given.width, given.hidden, EXPERTS, CHOSEN, router_aux_loss_coef=0.0)
        return keras.Model(inputs, block(inputs)[0])

    models = {"plain Keras": made()}
    models["dispatch"] = unidist.parallelize(made(), unidist.DataParallel(experts="dispatch"))
    forward = {name: (lambda model=model: model.predict_on_batch(x)) for name, model in models.items()}
    wanted = {("dispatch", "plain Keras"): 0.35}
    report("forward", seconds(forward, given.repetitions), 1, wanted)
    for model in models.values():
        model.compile("sgd", "mse")
    train = {name: (lambda model=model: model.train_on_batch(x, x)) for name, model in models.items()}
    report("a training step", seconds(train, given.repetitions), 1, wanted)
    difference = float(np.abs(forward["dispatch"]() - forward["plain Keras"]()).max())
    print(f"outputs differ by {difference:.1e} behind {given.repetitions + 1} steps of each")


if __name__ == "__main__":
    main()
