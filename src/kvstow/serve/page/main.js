// Starts the page, and asks for an API key where the server needs one.
import * as chat from "./chat.js";
import { useKey } from "./server.js";
import * as stats from "./stats.js";

const form = document.getElementById("key");
const field = document.getElementById("key-value");
let tried = false;

function refused(error) {
  if (error.status !== 401 || !form.hidden) return;
  document.getElementById("key-wrong").hidden = !tried;
  form.hidden = false;
  field.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(field.value);
  tried = true;
  field.value = "";
  form.hidden = true;
  stats.poll();
});

chat.start(refused);
stats.start(refused);
