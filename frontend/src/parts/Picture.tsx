import type { EvidenceCard, ImagePreview, PreviewCard } from "../contract.ts"
import { heat, UNDER_TEXT } from "./heat.ts"

interface Props {
  preview: PreviewCard | null
  /** What a screen reader says; nothing where the text beside it says enough. */
  name?: string
}

/** A sample as it can be seen: a picture, its text, or its numbers as a line. */
export function Picture({ preview, name = "" }: Props) {
  if (!preview) return <span class="picture none" aria-hidden="true" />
  if (preview.kind === "image") return <Image preview={preview} name={name} />
  if (preview.kind === "text") return <span class="picture text">{preview.text}</span>
  return <Series values={preview.values} name={name} />
}

function Image({ preview, name }: { preview: ImagePreview; name: string }) {
  return (
    <img
      class={`picture image ${preview.crisp ? "crisp" : ""}`}
      src={preview.source}
      alt={name}
      width={preview.width}
      height={preview.height}
      draggable={false}
    />
  )
}

function Series({ values, name }: { values: number[]; name: string }) {
  const low = Math.min(...values)
  const range = Math.max(...values) - low || 1
  const points = values.map((v, i) => `${(i + 0.5) / values.length},${1 - (v - low) / range}`)
  return (
    <svg
      class="picture series"
      viewBox="0 -0.05 1 1.1"
      preserveAspectRatio="none"
      role={name ? "img" : undefined}
      aria-label={name || undefined}
      aria-hidden={name ? undefined : "true"}
    >
      <polyline points={points.join(" ")} />
    </svg>
  )
}

/** The text of a piece of evidence, its tokens colored by what each of them adds. */
export function Highlighted({ evidence }: { evidence: EvidenceCard }) {
  const { tokens, places } = evidence
  if (!tokens || !places) return <Picture preview={evidence.preview} />
  const largest = Math.max(...places.map(Math.abs))
  const loose = isLoose(tokens)
  return (
    <span class="picture text">
      {tokens.map((token, i) => [
        <span class="token" style={heat(places[i] ?? 0, largest, UNDER_TEXT)}>
          {token}
        </span>,
        loose && " ",
      ])}
    </span>
  )
}

/** Pieces that are whole words have lost the spaces between them; letters and tokens have not. */
export function isLoose(tokens: readonly string[]): boolean {
  const longer = tokens.some((token) => token.length > 1)
  return longer && tokens.every((token) => token === token.trim())
}
