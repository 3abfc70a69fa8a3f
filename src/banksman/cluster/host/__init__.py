"""A host as a member of a cluster: see member.py."""

from banksman.cluster.host.member import Member

__all__ = ["Member"]
