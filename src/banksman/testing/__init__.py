"""Tools for tests, public: a scripted agent, virtual time and every schedule, a faulty world, nodes of NATS, checks."""
