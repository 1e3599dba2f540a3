"""One rule an operation: layouts in, layouts out. Pure: it knows no framework."""
