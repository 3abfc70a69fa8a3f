"""What a host does because it is one of many: see member.py."""

from banksman.cluster.host.member import Member

__all__ = ["Member"]
