"""Dialects: pure translation between an agent's frames and Banksman's own terms.

A dialect reads lines as meanings for the state machine, writes frames, and shows frames to readers
as ACP session updates. Only the projectors and transcripts of a turn are mutable.
"""
