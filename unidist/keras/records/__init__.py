"""Keeps one record a variable and one a model, whatever the driver."""
