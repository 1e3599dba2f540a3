"""Planning: reads what the planner must know from a Keras model, on any backend, without its values."""
