// Answers of a notebook's kernel, by anywidget's custom messages.
import type { ViewName, Views } from "../contract.ts"
import { type Options, type Params, Refusal, search, type Source } from "./source.ts"

/** What we use of anywidget's model. */
export interface Model {
  get(name: string): unknown
  set(name: string, value: unknown): void
  save_changes(): void
  send(content: unknown): void
  on(event: string, callback: (content: unknown) => void): void
  off(event: string, callback: (content: unknown) => void): void
}

interface Message {
  id: number
  progress?: number
  doing?: string
  result?: unknown
  error?: string
}

export class KernelSource implements Source {
  private readonly model: Model
  private readonly run: number
  private readonly waiting = new Map<number, (message: Message) => void>()
  private static last = 0

  constructor(model: Model, run = 0) {
    this.model = model
    this.run = run
    this.listen = this.listen.bind(this)
    model.on("msg:custom", this.listen)
  }

  carries(): boolean {
    return true
  }

  link(): null {
    return null
  }

  close(): void {
    this.model.off("msg:custom", this.listen)
  }

  get<P extends ViewName>(path: P, params: Params, options: Options = {}): Promise<Views[P]> {
    const id = ++KernelSource.last
    return new Promise<Views[P]>((resolve, reject) => {
      this.waiting.set(id, (message) => {
        if (message.result === undefined && message.error === undefined) {
          options.onProgress?.({ progress: message.progress ?? 0, doing: message.doing ?? "" })
          return
        }
        this.waiting.delete(id)
        if (message.error === undefined) resolve(message.result as Views[P])
        else reject(new Refusal(message.error))
      })
      options.signal?.addEventListener("abort", () => {
        if (!this.waiting.delete(id)) return
        this.model.send({ id, cancel: true })
        reject(new DOMException("Cancelled", "AbortError"))
      })
      this.model.send({ id, run: this.run, path, params: plain(params) })
    })
  }

  private listen(content: unknown): void {
    const message = content as Message
    this.waiting.get(message.id)?.(message)
  }
}

/** Words, or lists of words, as a URL would hold them: the kernel reads both alike. */
function plain(params: Params): Record<string, string[]> {
  const given = search(params)
  return Object.fromEntries([...new Set(given.keys())].map((name) => [name, given.getAll(name)]))
}
