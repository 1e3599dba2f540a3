"""Pictures of what unidist does, as SVG: shards, redistributions, plans, memory, what was sent, how long steps took.

Pure: they are made from layouts, plans and records; no framework is imported, and nothing is read but what is given.
"""

from unidist.drawing.entry import draw as draw
from unidist.drawing.picture import Picture as Picture
