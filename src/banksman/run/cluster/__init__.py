"""What a host does because it is one of many: see member.py."""

from banksman.run.cluster.member import Member

__all__ = ["Member"]
