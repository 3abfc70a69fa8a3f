"""Operations: metrics, logs, stack dumps, service manager notifications, and the discovery file."""
