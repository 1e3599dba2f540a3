"""What is scattered along dims that do not divide on JAX."""

from __future__ import annotations

import numpy as np

from unidist.testing.processes import ProcessWorld

# As many as two devices cannot share evenly.
TO = [1, 1, 6]


def test_the_padding_of_uneven_parts_is_not_added(four: ProcessWorld) -> None:
    x, kernel, found = four.call("tests.keras.jax.scattering:added", TO)[0]
    features = x @ kernel
    wanted = features.copy()
    np.add.at(wanted[0], TO, features[0, : len(TO)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
