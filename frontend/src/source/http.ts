// Answers of a server: lines of JSON, so that a long scan tells how far it is and can be cancelled.
import type { ViewName, Views } from "../contract.ts"
import {
  Lost,
  type Options,
  type Params,
  type Progress,
  Refusal,
  search,
  type Source,
} from "./source.ts"

type Line<T> = Partial<Progress> & { result?: T; error?: string }

export class HttpSource implements Source {
  readonly base: string

  constructor(base: string) {
    this.base = base
  }

  carries(): boolean {
    return true
  }

  link(path: string, params: Params): string {
    const query = search(params).toString()
    return `${this.base}/${path}${query ? `?${query}` : ""}`
  }

  async get<P extends ViewName>(path: P, params: Params, options: Options = {}): Promise<Views[P]> {
    const response = await this.fetch(this.link(path, params), options.signal)
    if (!response.ok) throw new Refusal(await complaint(response))
    for await (const line of lines<Views[P]>(response)) {
      if (line.error !== undefined) throw new Refusal(line.error)
      if (line.result !== undefined) return line.result
      options.onProgress?.({ progress: line.progress ?? 0, doing: line.doing ?? "" })
    }
    return broken()
  }

  private async fetch(url: string, signal: AbortSignal | undefined): Promise<Response> {
    try {
      return await fetch(url, {
        headers: { accept: "application/x-ndjson" },
        signal: signal ?? null,
      })
    } catch (error) {
      if (signal?.aborted) throw error
      throw new Lost("The server does not answer. Is `dualform view` still running?")
    }
  }
}

function broken(): never {
  throw new Lost("The server closed the connection before it had answered.")
}

async function complaint(response: Response): Promise<string> {
  const text = await response.text()
  try {
    const { error } = JSON.parse(text) as { error?: string }
    if (error) return error
  } catch {
    // Not JSON: something between the page and the server has answered.
  }
  return `The server answered with status ${response.status}.`
}

async function* lines<T>(response: Response): AsyncGenerator<Line<T>> {
  if (!response.body) return
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { done, value } = await reader.read().catch(broken)
    const whole = (rest + (value ?? "")).split("\n")
    rest = done ? "" : (whole.pop() ?? "")
    for (const line of whole) if (line.trim()) yield read<T>(line)
    if (done) return
  }
}

/** A line of the stream; plain JSON is what a server without streams answers. */
function read<T>(line: string): Line<T> {
  const value = JSON.parse(line) as Line<T>
  const streamed = "result" in value || "error" in value || "doing" in value
  return streamed ? value : { result: value as T }
}
