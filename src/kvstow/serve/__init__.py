"""The server: OpenAI's HTTP interface over mlx-lm's own engine, with packed caches.

A request goes through these in turn, and nothing is computed before the third has let it in:

* `app`: routes and Starlette; `security`: who may ask; `body`: how much
* `requests`: what may be asked, as pydantic models
* `gateway`: whether there is memory for it, now, later or never
* `engine`: mlx-lm's `ResponseGenerator`, in one thread; `job` is a request in there
* `answer`: from tokens to text, reasoning, tool calls and log-probabilities
* `responses`: OpenAI's JSON of those

What happens is counted in `tally`, and seen in the engine's thread by `watch`; `snapshot` puts both
together as one value of `stats`, which `observe` shows as JSON, as `metrics` and on a `page`.

`provider` loads the model, `budget` says how much memory there is, `server` runs all of it.
"""
