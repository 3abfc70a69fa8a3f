"""Trace contexts for the packages above: they do not import the core."""

from banksman.core.session.trace_context import NO_PARENT, TraceContext, parse, span_of

__all__ = ["NO_PARENT", "TraceContext", "parse", "span_of"]
