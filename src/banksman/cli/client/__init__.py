"""HTTP client of the CLI: find the server, send requests, follow streams across reconnects."""
