"""The log on NATS JetStream, for many hosts. `ClusterLog` is its entry point."""

from banksman.cluster.log.cluster_log import ClusterLog

__all__ = ["ClusterLog"]
