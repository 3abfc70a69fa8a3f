"""Terminal UI: streamed text, questions with keys, an input line, a live table of sessions.

One thread owns the screen (`event_loop`). Events, keys, signals and replies are posted to it, and
no other thread writes. `event_view` shows events on a `Screen` (`screen`). `PlainScreen` only
appends and also serves pipes; `LiveScreen` keeps an input line at the bottom. `keyboard` decodes
keys and edits the line. `question_view` shows the agent's questions. `attached`, `turn_view` and
`session_board` are the screens of `attach`, `ask`/`run` and `top`.
"""
