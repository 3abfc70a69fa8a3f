"""The way to a server: where it is, one request and its answer, a stream that outlives its connections."""
