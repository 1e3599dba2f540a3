"""Strategies: for each variable its storage, compute and state layouts. Pure: no framework, no Keras."""

from unidist.strategies.strategy import Strategy as Strategy
from unidist.strategies.strategy import VariableLayouts as VariableLayouts
