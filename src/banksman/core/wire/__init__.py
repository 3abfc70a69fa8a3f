"""Bytes of an agent, before and after any dialect: lines, JSON-RPC messages, damaged JSON, secrets taken out."""
