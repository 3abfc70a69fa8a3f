"""The shell around the pure core: processes, commands, hosts."""
