"""The simulator: virtual devices in this process."""
