"""Wire formats shared by all dialects: lines, JSON-RPC, damaged JSON, and redaction of secrets."""
