"""Wire formats shared by all dialects: lines, JSON-RPC, damaged JSON, marks for omitted text."""
