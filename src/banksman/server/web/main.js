// Where the page begins: the views are put up, the code is taken out of the address, the one stream is begun.
// @ts-check
import { keyIn, login } from "./net/api.js";
import { feed } from "./net/feed.js";
import { onTokenElsewhere } from "./net/page_token.js";
import { hosts } from "./model/hosts.js";
import { sessions } from "./model/sessions.js";
import { mountApp } from "./views/app.js";

// The address that the server printed may be pasted into a tab that has the page already. It is then no new page, but a
// change of the fragment, and no place to go to: so nobody else hears of it, and the old fragment is put back.
addEventListener("hashchange", async (event) => {
  if (!keyIn(location.hash)) return;
  event.stopImmediatePropagation();
  if (await login(event.oldURL)) feed.nudge();
});

onTokenElsewhere(() => feed.nudge());

// Begun before the views, so that what they show first is never an address with a code in it.
const letIn = login();
mountApp(document.body);
sessions.start();
hosts.start();
await letIn;
feed.start();
