"""The pure core: values in, values out. No clock, loop, file, thread, logger or random."""
