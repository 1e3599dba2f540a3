"""A graph net: each node hears of its neighbours, twice, and the graph's number is the sum over its nodes.

Graphs are small molecules: atoms of three kinds, and the energy of their bonds is to be learnt. A batch is so many
graphs of at most 12 atoms, padded with atoms of no kind; each device takes its graphs.

    python examples/graph_net.py
    unidist run -n 4 examples/graph_net.py

It prints:

    mean error of the energy: by the mean 4..., by the net 0...
    the net knows its bonds: True
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np
from keras import ops

ATOMS, KINDS = 12, 3
ENERGY = np.array([[1.0, -0.5, 2.0], [-0.5, 0.5, -1.5], [2.0, -1.5, 0.0]])  # of a bond between two kinds


def molecules(count: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    there = np.arange(ATOMS) < rng.integers(6, ATOMS + 1, (count, 1))
    atoms = np.eye(KINDS)[rng.integers(0, KINDS, (count, ATOMS))] * there[:, :, None]
    bonds = np.triu(rng.uniform(size=(count, ATOMS, ATOMS)) < 0.25, 1) * there[:, :, None] * there[:, None, :]
    bonds = bonds + bonds.transpose(0, 2, 1)
    energy = np.einsum("bik,bij,bjl,kl->b", atoms, bonds, atoms, ENERGY) / 2
    return [atoms.astype("float32"), bonds.astype("float32")], energy[:, None].astype("float32")


class Messages(keras.layers.Layer):
    """A node's next state, from its own and the sum of what its neighbours say."""

    def __init__(self, width: int):
        super().__init__()
        self.say, self.keep = keras.layers.Dense(width, "relu"), keras.layers.Dense(width, "relu")

    def build(self, nodes_shape, bonds_shape):
        self.say.build(nodes_shape)
        self.keep.build((*nodes_shape[:-1], nodes_shape[-1] + self.say.units))

    def call(self, nodes, bonds):
        heard = ops.matmul(bonds, self.say(nodes))
        return self.keep(ops.concatenate([nodes, heard], axis=-1))


def graph_net() -> keras.Model:
    atoms, bonds = keras.Input((ATOMS, KINDS), name="atoms"), keras.Input((ATOMS, ATOMS), name="bonds")
    nodes = atoms
    for _ in range(2):
        nodes = Messages(32)(nodes, bonds)
    return keras.Model([atoms, bonds], ops.sum(keras.layers.Dense(1)(nodes), axis=1))


keras.utils.set_random_seed(0)
with unidist.DataParallel().scope():
    model = graph_net()
    model.compile(keras.optimizers.Adam(0.02), "mse")
model.fit(*molecules(1024, seed=0), batch_size=128, epochs=10, verbose=0)

graphs, energy = molecules(200, seed=1)
by_mean = float(np.abs(energy - energy.mean()).mean())
by_net = float(np.abs(energy - model.predict(graphs, verbose=0)).mean())
if unidist.process_index() == 0:
    print(f"mean error of the energy: by the mean {by_mean:.2f}, by the net {by_net:.2f}")
    print("the net knows its bonds:", by_net < by_mean / 4)
