import { Scale } from "../numbers.ts"
import { placeName } from "../words.ts"
import { useUnique } from "../unique.ts"
import { spoken } from "./Amount.tsx"
import { isLoose } from "./Picture.tsx"
import { ALONE, heat, UNDER_TEXT } from "./heat.ts"

interface Props {
  amounts: number[]
  chosen: number | null
  onChoose(place: number): void
  /** Whether a position can be chosen; all can if nothing is said. */
  offers?(place: number): boolean
  label: string
  tokens?: readonly string[] | null
  grid?: readonly [number, number] | null
  testid?: string
}

/**
 * Positions to choose from, colored by their amounts: tokens in a line, patches on a grid, or a strip.
 * They are radio buttons, so that a thousand of them are one stop of the tab key.
 */
export function Places({ amounts, chosen, onChoose, offers, label, tokens, grid, testid }: Props) {
  const name = useUnique()
  const scale = new Scale(amounts)
  const kind = tokens ? "tokens" : grid ? "grid" : "strip"
  const loose = tokens ? isLoose(tokens) : false
  const columns = grid ? { gridTemplateColumns: `repeat(${grid[1]}, 1fr)` } : undefined
  return (
    <div
      class={`places ${kind}`}
      role="radiogroup"
      aria-label={label}
      style={columns}
      data-testid={testid}
    >
      {amounts.map((amount, place) => {
        const where = tokens?.[place]?.trim() || placeName(place, grid ?? null)
        return [
          <label
            class="place"
            style={heat(amount, scale.largest, tokens ? UNDER_TEXT : ALONE)}
            title={`${where}: ${scale.signed(amount)}`}
          >
            <input
              type="radio"
              name={name}
              checked={place === chosen}
              disabled={offers && !offers(place)}
              onChange={() => onChoose(place)}
              aria-label={`${where}: ${spoken(scale, amount)}`}
            />
            {tokens?.[place]}
          </label>,
          loose && " ",
        ]
      })}
    </div>
  )
}
