"""A simulator of a fleet: measured stage costs, arrival traces and autoscaling policies.

`benchmarks.simulate` is its command line; docs/autoscaling.md says what it found.
"""
