"""What is said to a person or to the program at the other end of a pipe, and in which words."""
