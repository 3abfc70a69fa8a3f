"""Tools for tests, public: a scripted agent that misbehaves, virtual time and every schedule, a faulty world, checks."""
