"""What a server is to those who run it: numbers, lines, stacks, the service manager, where clients find it."""
