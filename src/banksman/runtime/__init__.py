"""The host and the module-level functions: the code that performs I/O around the pure core."""
