// Calls to the server. The API key, if it needs one, is in this variable and nowhere else.
let key = "";

export function useKey(value) {
  key = value;
}

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// The response, or a Refused with what the server said.
export async function call(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (!response.ok) {
    const said = await response.text();
    throw new Refused(response.status, messageOf(said) ?? `status ${response.status}`,
      response.headers.get("Retry-After"));
  }
  return response;
}

function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim() || null;
  }
}

// Server-sent events of a response: {comment} or {data} one by one.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (pending + value).split("\n\n");
      pending = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data: ")) yield { data: block.slice(6) };
        else if (block.startsWith(":")) yield { comment: block.slice(1).trim() };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of one that was aborted
  }
}
