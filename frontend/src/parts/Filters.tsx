import { usePane } from "../context.ts"
import type { Asked } from "../state.ts"
import { placeName, spanName } from "../words.ts"

/** What the evidence is restricted to; each restriction can be lifted. */
export function Filters() {
  const { asked, ask, run } = usePane()
  const grid = run.layers.find((layer) => layer.name === asked.layer)?.grid ?? null
  const set: [keyof Asked, string][] = []
  if (asked.span) set.push(["span", `learned in ${spanName(run.bins, asked.span)}`])
  if (asked.label !== null) set.push(["label", `${asked.by ?? "labeled"} ${asked.label}`])
  if (asked.place !== null) set.push(["place", `query's ${placeName(asked.place, grid)}`])
  if (asked.at !== null) set.push(["at", `samples' ${placeName(asked.at, grid)}`])
  if (set.length === 0) return null
  return (
    <div class="filters" role="group" aria-label="Restrictions" data-testid="filters">
      <span class="small">Only</span>
      {set.map(([name, words]) => (
        <button
          type="button"
          class="chip"
          onClick={() => ask({ ...asked, [name]: null })}
          aria-label={`${words}: lift this restriction`}
          data-testid={`lift-${name}`}
        >
          {words} <span aria-hidden="true">×</span>
        </button>
      ))}
    </div>
  )
}
