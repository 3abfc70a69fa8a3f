"""Shell completion: scripts made from the argument parsers, and lists of names that the scripts ask for."""
