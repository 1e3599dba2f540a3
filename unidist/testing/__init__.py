"""Ships what tests need: the conformance suite for adapters, and worlds of real processes.

- conformance.ConformanceSuite: the pytest class that an adapter's tests subclass.
- laws: the checks themselves, functions of a backend that run in any process.
- processes.ProcessWorld: n Python processes that find each other as under a launcher.
"""
