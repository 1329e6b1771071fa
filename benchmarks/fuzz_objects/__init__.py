"""Objects as an enemy, or a broken disk, would write them: segments, snapshots and documents that readers must survive.

``python -m benchmarks.fuzz_objects [--objects N] [--seed S] [--quick] [--json FILE]``. Whole objects are made, bent in many
ways and read, in child processes with a bound on their memory. A reader may refuse an object by `FormatError`, or read it;
anything else is a failure: another exception, a child that dies, or one that takes more memory than the bound.
"""
