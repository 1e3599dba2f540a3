"""`unidist parity`: one training function on several backends, compared step by step with one device."""

from unidist.parity.command import main as main
