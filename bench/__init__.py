"""Benchmarks: ratios of Banksman to other libraries, both measured in the same run.

    python -m bench [name …]        from the root of the repository

A ratio of two numbers from one run is meaningful on any machine. The raw numbers are printed beside
it. Each benchmark is one module and runs in a separate process, so its memory and its fd limits do
not affect the next benchmark. A missed goal is printed as such.
"""
