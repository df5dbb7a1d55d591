"""The server: OpenAI's HTTP interface over mlx-lm's own engine, with packed caches.

A request goes through these in turn, and nothing is computed before the fourth has let it in:

* `connection`, `security`, `body`: who may ask, how slowly, and how much; `app`: the routes
* `requests`, `messages`: what may be asked, as pydantic models
* `service`: whether this model can answer it; `arguments`: the same in mlx-lm's words
* `gateway`: whether there is memory for it, now, later or never
* `engine`, `rounds`: mlx-lm's `ResponseGenerator`, in one thread; `job` is a request in there
* `answer`, `stops`, `logprobs`: from tokens to text, reasoning, tool calls and log-probabilities
* `responses`: OpenAI's JSON of those; `delivery`: whole, or as a stream

Where that ends early, the client gets a `refusal`. Prompts that were read stay in `prompt_cache`.

What happens is counted in `tally`, and seen in the engine's thread by `watch` and its `ledger`;
`collect` puts it together as one value of `stats`, which `observe` shows as JSON, as `metrics` and
on a `page`.

`options` says what is served and how, `provider` loads the model, `budget` says how much memory
there is, `server` runs all of it.
"""
