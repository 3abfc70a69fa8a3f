"""What a shell may complete: verbs and flags from the parsers as they are, and names as they are at that moment."""
