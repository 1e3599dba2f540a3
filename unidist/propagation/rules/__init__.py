"""The rules, by family: each gives the options of one axis (choosing.py), pure, without a framework."""
