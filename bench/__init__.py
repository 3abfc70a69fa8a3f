"""What Banksman costs and gains, as ratios against others, both measured in the same run.

`python -m bench [name …]` from the repository's root. A ratio of two numbers from one run says something on any
machine; the raw numbers stand beside it. Each benchmark is a module of its own and runs in a process of its own, so
that neither memory nor fd limits of one are seen by the next. A goal that is missed is printed as missed.
"""
