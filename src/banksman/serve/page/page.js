// Logs in with the token of the address's fragment, then lists the sessions and follows the one stream of all of them.
// The fragment is never sent to a server, and is taken out of the address as soon as it was used.
const SHOWN_MAX = 500;
const state = document.getElementById("state");
const list = document.getElementById("sessions");
const events = document.getElementById("events");

async function login() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("v1/login", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ token }),
  });
  if (!answer.ok) state.textContent = (await answer.json()).detail;
}

function line(parent, ...parts) {
  const item = document.createElement("li");
  for (const [text, name] of parts) {
    const span = document.createElement("span");
    span.textContent = text;
    if (name) span.className = name;
    item.append(span);
  }
  parent.append(item);
  return item;
}

async function showSessions() {
  const answer = await fetch("v1/sessions");
  if (!answer.ok) {
    const problem = await answer.json();
    state.textContent = `${problem.detail}: ${problem.hint}`;
    return false;
  }
  const { sessions } = await answer.json();
  list.replaceChildren();
  for (const session of sessions) line(list, [session.name ?? session.id], [session.phase, "kind"], [session.agent]);
  return true;
}

function follow() {
  const source = new EventSource("v1/events");
  let refresh = 0;
  source.onopen = () => { state.textContent = "Reading what there is…"; };
  source.onerror = () => { state.textContent = "The connection is lost; it is tried again."; };
  source.addEventListener("stream.live", () => { state.textContent = "Live."; });
  source.onmessage = ({ data }) => {
    const event = JSON.parse(data);
    const text = (event.body.updates ?? []).map((update) => update.content?.text ?? update.title ?? "").join("");
    const item = line(events, [event.cursor], [event.kind, "kind"], [text || (event.turn ?? "")]);
    while (events.children.length > SHOWN_MAX) events.firstChild.remove();
    item.scrollIntoView({ block: "nearest" });
    clearTimeout(refresh);
    refresh = setTimeout(showSessions, 200);
  };
}

await login();
if (await showSessions()) follow();
