"""The rules, by family. Each gives the options of one axis (choosing.py); all are pure and know no framework."""
