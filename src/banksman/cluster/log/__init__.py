"""The store on NATS JetStream, for many hosts. `ClusterLog` is the log; what it is made of is in the files beside."""

from banksman.cluster.log.cluster_log import ClusterLog

__all__ = ["ClusterLog"]
