"""The reply subject of a delivery, in the forms that servers send."""

from __future__ import annotations

import pytest

from banksman.cluster.log.placement_queues import delivery


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param("$JS.ACK.banksman-work.key.3.17.5.1700000000000000000.0", id="short"),
        pytest.param("$JS.ACK._.hash.banksman-work.key.3.17.5.1700000000000000000.0", id="long"),
        pytest.param("$JS.ACK.hub.hash.banksman-work.key.3.17.5.1700000000000000000.0.random", id="long and a token"),
    ],
)
def test_delivery_names_the_consumer_and_counts_deliveries(reply: str) -> None:
    assert delivery(reply) == ("key", 3)


@pytest.mark.parametrize(
    "reply", ["", "_INBOX.abc", "$JS.ACK.banksman-work.key.3", "$JS.API.banksman-work.key.3.17.5.17.0"]
)
def test_delivery_refuses_another_subject(reply: str) -> None:
    with pytest.raises(ValueError, match="not the reply subject"):
        delivery(reply)
