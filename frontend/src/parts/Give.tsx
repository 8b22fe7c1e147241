import { useState } from "preact/hooks"
import type { ImageSize, RunView } from "../contract.ts"
import { usePane } from "../context.ts"
import { fitted, imageQuery } from "../image.ts"
import { toQuery } from "../moves.ts"
import { Draw } from "./Draw.tsx"
import { Failed } from "./Waiting.tsx"

/** A query of one's own: drawn or uploaded where samples are pictures, typed where they are text. */
export function Give({ accepts }: { accepts: NonNullable<RunView["accepts"]> }) {
  const { asked, ask } = usePane()
  const give = (query: string) => ask(toQuery(asked, query))
  return (
    <details class="give" data-testid="give">
      <summary>{accepts.kind === "image" ? "Draw or upload one" : "Type one"}</summary>
      {accepts.kind === "image" ? (
        <div class="own">
          <Draw size={accepts} onQuery={give} />
          <Upload size={accepts} onQuery={give} />
        </div>
      ) : (
        <Type onQuery={give} />
      )}
    </details>
  )
}

function Upload({ size, onQuery }: { size: ImageSize; onQuery(query: string): void }) {
  const [failed, setFailed] = useState<string | null>(null)
  const read = async (file: File | undefined) => {
    if (!file) return
    try {
      onQuery(imageQuery(await fitted(file, size), size.channels))
      setFailed(null)
    } catch {
      setFailed(`${file.name} is not a picture that this browser can read. Try a PNG or a JPEG.`)
    }
  }
  return (
    <div class="upload">
      <label>
        Upload a picture
        <input
          type="file"
          accept="image/*"
          onChange={(event) => read(event.currentTarget.files?.[0])}
          data-testid="upload"
        />
      </label>
      <p class="small">
        It is scaled to {size.height} × {size.width} pixels here in the browser.
      </p>
      {failed && <Failed message={failed} />}
    </div>
  )
}

function Type({ onQuery }: { onQuery(query: string): void }) {
  const [text, setText] = useState("")
  const submit = (event: SubmitEvent) => {
    event.preventDefault()
    if (text.trim()) onQuery(`text:${text}`)
  }
  return (
    <form class="type" onSubmit={submit}>
      <label>
        A text to ask about
        <textarea
          rows={3}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          data-testid="typed"
        />
      </label>
      <button class="primary" data-testid="ask-typed">
        Ask about this text
      </button>
    </form>
  )
}
