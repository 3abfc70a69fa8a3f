"""A session in a terminal: what the agent says as it says it, what it asks, and a line to talk to it.

One thread owns the screen (`loop`): events, keys, signals and answers come to it, and nobody else writes. What is to be
shown is told by `telling` to a `Screen`: `plain` only ever adds to what is there, and is what a pipe gets too; `live`
keeps a line to type in below it. `keys` and `editor` are what is typed, `asking` what the agent wants to know.
"""
