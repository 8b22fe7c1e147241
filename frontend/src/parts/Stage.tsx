import type { PreviewCard } from "../contract.ts"
import { Picture } from "./Picture.tsx"
import { Places } from "./Places.tsx"

interface Props {
  preview: PreviewCard | null
  name: string
  /** One amount a position; fewer than two are nothing to choose from. */
  amounts: number[] | null
  chosen: number | null
  onChoose(place: number): void
  /** Whether a position can be chosen; all can if nothing is said. */
  offers?(place: number): boolean
  label: string
  tokens?: readonly string[] | null
  grid?: readonly [number, number] | null
  testid: string
}

/**
 * A sample at its largest, with its positions: in its text, or as a map beside its picture. Amounts
 * laid over the picture itself would hide it; so the map has only a shadow of it.
 */
export function Stage({ preview, name, amounts, tokens, grid, ...chosen }: Props) {
  const picture = <Picture preview={preview} name={name} />
  if (!amounts || amounts.length < 2) return <div class="stage">{picture}</div>
  const places = <Places amounts={amounts} tokens={tokens} grid={grid} {...chosen} />
  if (tokens) return <div class="stage">{places}</div>
  if (!grid || preview?.kind !== "image")
    return (
      <div class="stage">
        {picture}
        {places}
      </div>
    )
  return (
    <div class="stage mapped">
      {picture}
      <div class="map">
        <Picture preview={preview} />
        {places}
      </div>
    </div>
  )
}
