"""The public interface beside strategies: parallelize, describe, TensorParallelKeras, Telemetry."""
