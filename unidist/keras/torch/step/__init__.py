"""Steps on torch: batches, losses, metrics, gradients and optimizers, with the numbers of one device."""
