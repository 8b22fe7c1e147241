import { usePane } from "../context.ts"

/** Which layers' training the whole network's evidence comes from: all, or one. */
export function Through() {
  const { asked, ask, run } = usePane()
  if (asked.ask !== "network" || run.carried || run.layers.length < 2) return null
  return (
    <label class="through">
      <span class="small">Learned in</span>
      <select
        value={asked.layer ?? ""}
        onChange={(event) => ask({ ...asked, layer: event.currentTarget.value || null })}
        data-testid="through"
      >
        <option value="">all layers</option>
        {run.layers.map(({ name }) => (
          <option value={name}>layer {name}</option>
        ))}
      </select>
    </label>
  )
}
