"""Event streams: read the log once, and send it to each follower at its own pace."""
