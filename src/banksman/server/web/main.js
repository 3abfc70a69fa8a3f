// Entry point of the page: create the views, take the login code out of the URL, start the stream.
// @ts-check
import { keyIn, login } from "./net/api.js";
import { feed } from "./net/feed.js";
import { onTokenElsewhere } from "./net/page_token.js";
import { caller } from "./model/caller.js";
import { hosts } from "./model/hosts.js";
import { sessions } from "./model/sessions.js";
import { effect } from "./model/signal.js";
import { mountApp } from "./views/app.js";

// The user may paste the URL that the server printed into a tab that already shows the page. The
// browser then only changes the fragment. This fragment is not a route, so no other listener gets
// the event, and the old fragment is restored.
addEventListener("hashchange", async (event) => {
  if (!keyIn(location.hash)) return;
  event.stopImmediatePropagation();
  if (await login(event.oldURL)) loggedIn();
});

onTokenElsewhere(loggedIn, () => location.reload());

/** A stream of the caller before may be open still: then it does not start again. */
function loggedIn() {
  feed.nudge();
  void caller.refresh();
}

// Login starts before the views, so that the views never see a URL with a code in it.
const letIn = login();
mountApp(document.body);
sessions.start();
caller.start();
// Only operators may read the hosts.
effect([caller.me], (me) => {
  hosts.stop();
  if (!me || !caller.may("operate")) return;
  hosts.start();
  void hosts.refresh();
});
await letIn;
feed.start();
