"""Public test tools: scripted agents, virtual time, fault injection, NATS servers, checks."""
