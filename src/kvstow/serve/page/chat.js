// A chat over /v1/chat/completions, streamed. All text is put in as text.
import { Refused, call, events } from "./server.js";

const $ = (id) => document.getElementById(id);
let turns = [];
let running = null;

export function start(refused) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(refused);
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("fresh").addEventListener("click", () => {
    running?.abort();
    turns = [];
    $("log").replaceChildren();
    $("question").focus();
  });
}

async function ask(refused) {
  const question = $("question").value.trim();
  if (running || !question) return;
  const mine = (running = new AbortController());
  const asked = turns;
  asked.push({ role: "user", content: question });
  $("hint")?.remove();
  const shown = turn("user");
  shown.text(question);
  $("question").value = "";
  busy(true);
  const answer = turn("assistant");
  answer.note("waiting");
  try {
    const text = await stream(asked, answer, mine.signal);
    asked.push({ role: "assistant", content: text });
  } catch (error) {
    if (mine.signal.aborted) {
      answer.note("stopped");
      if (answer.content) asked.push({ role: "assistant", content: answer.content });
      else asked.pop();
    } else {
      asked.pop();
      answer.fail(error instanceof Refused ? said(error) : `the server does not answer (${error.message})`);
      $("question").value ||= question;
      if (error instanceof Refused) refused(error);
    }
  } finally {
    running = null;
    busy(false);
  }
}

async function stream(messages, answer, signal) {
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  const response = await call("v1/chat/completions", { body, signal });
  let ended = false;
  let first = null;
  for await (const { data, comment } of events(response)) {
    if (comment !== undefined) {
      const progress = /^prompt (\d+)\/(\d+)$/.exec(comment);
      if (progress && first === null) answer.note(`reading the prompt: ${progress[1]} of ${progress[2]} tokens`);
      continue;
    }
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(200, chunk.error.message, null);
    const choice = chunk.choices[0];
    if (choice) {
      first ??= choice.delta.content || choice.delta.reasoning ? performance.now() : null;
      if (choice.delta.reasoning) answer.thought(choice.delta.reasoning);
      if (choice.delta.content) answer.text(choice.delta.content);
      if (choice.finish_reason) {
        ended = true;
        answer.note(choice.finish_reason === "length" ? "cut at the most tokens allowed" : "");
      }
    }
    if (chunk.usage) answer.usage(chunk.usage, first);
  }
  if (!ended) throw new Refused(200, "the answer broke off", null);
  return answer.content;
}

function said({ message, retryAfter }) {
  return retryAfter ? `${message} (try again in ${retryAfter} s)` : message;
}

function busy(is) {
  const from = document.activeElement; // a button that is hidden loses the focus
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("log").setAttribute("aria-busy", String(is));
  if (is && from === $("send")) $("stop").focus();
  if (!is && from === $("stop")) $("question").focus();
}

// One turn in the log: its thoughts, its text, and a line about it.
function turn(role) {
  const log = $("log");
  const element = log.appendChild(document.createElement("div"));
  element.className = `turn ${role}`;
  const thoughts = element.appendChild(document.createElement("div"));
  thoughts.className = "thought";
  const text = element.appendChild(document.createElement("div"));
  const note = element.appendChild(document.createElement("p"));
  note.className = "note";
  const add = (part, more) => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    part.append(more);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  log.scrollTop = log.scrollHeight;
  let ending = "";
  return {
    get content() {
      return text.textContent;
    },
    text(more) {
      note.textContent = "";
      add(text, more);
    },
    thought(more) {
      note.textContent = "";
      add(thoughts, more);
    },
    note(words) {
      ending = words;
      note.textContent = words;
    },
    usage({ prompt_tokens, completion_tokens, prompt_tokens_details }, first) {
      const cached = prompt_tokens_details?.cached_tokens ?? 0;
      const seconds = first === null ? 0 : (performance.now() - first) / 1000;
      const parts = [`${completion_tokens} tokens`];
      if (seconds > 0 && completion_tokens > 1) {
        parts.push(`${((completion_tokens - 1) / seconds).toFixed(1)} per second`);
      }
      parts.push(`prompt ${prompt_tokens} tokens, ${cached} of them found again`);
      if (ending) parts.push(ending);
      note.textContent = parts.join(" · ");
      log.scrollTop = log.scrollHeight;
    },
    fail(words) {
      note.textContent = "";
      const error = element.appendChild(document.createElement("p"));
      error.className = "turn error";
      error.setAttribute("role", "alert");
      error.textContent = words;
      log.scrollTop = log.scrollHeight;
    },
  };
}
