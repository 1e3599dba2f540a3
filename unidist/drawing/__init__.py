"""Draws what unidist does, as SVG: shards, redistributions, plans, memory, traffic, times of steps.

Pure: they are made from layouts, plans and records; no framework is imported, and nothing is read but what is given.
"""

from unidist.drawing.canvas import Picture as Picture
from unidist.drawing.entry import draw as draw
