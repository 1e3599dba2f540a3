"""Binds torch's functions to the rules, by family. Importing it fills the table of binding.py."""

from unidist.backends.torch.sharded.bindings import dims as dims
from unidist.backends.torch.sharded.bindings import drawing as drawing
from unidist.backends.torch.sharded.bindings import elementwise as elementwise
from unidist.backends.torch.sharded.bindings import indexing as indexing
from unidist.backends.torch.sharded.bindings import layers as layers
from unidist.backends.torch.sharded.bindings import norms as norms
from unidist.backends.torch.sharded.bindings import products as products
from unidist.backends.torch.sharded.bindings import reductions as reductions
from unidist.backends.torch.sharded.bindings import values as values
from unidist.backends.torch.sharded.bindings import views as views
