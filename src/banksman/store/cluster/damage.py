"""What stands under a subject of ours and is not what was written there: whose it is to mend, and how.

Anybody whom the account lets in can publish there: an operator by mistake, another program by the same words. One such
message must cost the one session that it is about, and nobody else. So who parses raises `StoreDamaged`, which names
the subject; who reads many passes it by, and says so once.
"""

from __future__ import annotations

from banksman.errors import StoreDamaged


def event(subject: str, seq: int) -> StoreDamaged:
    """Of a session's events. What is behind the last good message is refused until it is taken out: nothing can follow
    what has no place."""
    stream = f"{subject.partition('.ev.')[0]}-events"
    return StoreDamaged(
        f"message {seq} of {stream}, under {subject}, was not written by Banksman, or not by a whole one",
        hint=f"`nats stream rmm {stream} {seq}` takes it out, and the session goes on; or delete the session",
        subject=subject,
        seq=seq,
    )


def record(subject: str, seq: int) -> StoreDamaged:
    prefix, _, key = subject.partition(".rec.")
    remove = f"`nats stream rmm {prefix}-records {seq}`"
    hints = {
        "session": f"put it back from a backup of {prefix}-records; {remove} forgets the session",
        "name": f"{remove} takes it out: then nobody has the name",
        "lease": f"{remove} takes it out: then nobody drives the conversation, so see that no process does",
        "meta": f"write a number there that is past the epoch of every deleted session: `nats pub {subject} 1000000`",
    }
    return StoreDamaged(
        f"the record under {subject} cannot be understood",
        hint=hints.get(key.partition(".")[0]) or f"{remove} takes it out",
        subject=subject,
        seq=seq,
    )
