"""Planning: reads from a Keras model, on whichever backend and without its values, what the planner must know."""
