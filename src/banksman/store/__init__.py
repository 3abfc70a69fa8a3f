"""Storage of session logs: one protocol, several engines (memory, SQLite), export and import."""
