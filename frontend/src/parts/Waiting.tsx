import type { Loaded } from "../load.ts"
import { Words } from "./Words.tsx"

interface Props {
  of: Omit<Loaded<unknown>, "value">
  /** What is being made, as in "Reading …". */
  doing: string
}

/** What is shown instead of an answer, or above the last one while the next is made. */
export function Waiting({ of, doing }: Props) {
  if (of.failed !== null)
    return <Failed message={of.failed} again={of.lost ? of.again : undefined} />
  if (of.cancelled)
    return (
      <p class="notice" role="status" data-testid="cancelled">
        You cancelled this before it was done. <Again again={of.again} />
      </p>
    )
  if (!of.busy) return null
  const share = of.progress?.progress ?? 0
  const words = of.progress?.doing || doing
  return (
    <div class="waiting" data-testid="progress">
      <progress max={1} value={share || undefined} aria-label={words} />
      <span class="small">
        {capital(words)}
        {share ? `, ${Math.round(100 * share)} % done` : ""}…
      </span>
      <button type="button" class="quiet" onClick={of.cancel} data-testid="cancel">
        Cancel
      </button>
    </div>
  )
}

export function Failed({ message, again }: { message: string; again?: () => void }) {
  return (
    <p class="notice failed" role="alert" data-testid="error">
      <Words text={message} /> {again && <Again again={again} />}
    </p>
  )
}

function Again({ again }: { again: () => void }) {
  return (
    <button type="button" class="quiet" onClick={again}>
      Ask again
    </button>
  )
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1)
}
