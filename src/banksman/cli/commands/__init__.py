"""The verbs, a file each: `parser()` says what it takes, `main(words)` does it and returns the exit code."""
