"""One child: its start, its pipes, its tree, its end. Below here is the kernel."""
