"""The store on NATS JetStream, for many hosts. `ClusterLog` is the log; what it is made of is in the files beside."""

from banksman.store.cluster.engine import ClusterLog

__all__ = ["ClusterLog"]
