"""Child processes: start, stdio, process tree and end of one child. The layer above the kernel."""
