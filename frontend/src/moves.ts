// What else changes when one thing is chosen: an output of one layer means nothing in another.
import type { Ask } from "./api.ts"
import type { Asked } from "./state.ts"

const WIDE = { output: null, place: null, at: null }

export function toQuery(asked: Asked, query: string): Asked {
  return { ...asked, ...WIDE, query, ask: suits(query, asked.ask) ? asked.ask : "layer" }
}

/** Of a training sample is known what the layers saw, not what the model was called with. */
export function suits(query: string, ask: Ask): boolean {
  return !query.startsWith("sample:") || ask === "layer" || ask === "keys"
}

/** Questions about the last layer and about the model share their outputs. */
export function toAsk(asked: Asked, ask: Ask): Asked {
  const inside = ask === "layer" || ask === "keys"
  const layer = inside ? asked.layer : null
  const output = asked.layer === null || asked.layer === layer ? asked.output : null
  return {
    ...asked,
    ask,
    layer,
    output,
    place: inside ? asked.place : null,
    span: ask === "removed" ? null : asked.span,
    at: ask === "layer" ? asked.at : null,
  }
}

export function toLayer(asked: Asked, layer: string, ask: Ask = "layer"): Asked {
  return { ...asked, ...WIDE, ask, layer }
}

export function toRun(asked: Asked, run: number): Asked {
  return { ...asked, ...WIDE, run, layer: null, span: null, by: null, label: null }
}

export function tick(ticked: readonly string[], id: string): string[] {
  return ticked.includes(id) ? ticked.filter((one) => one !== id) : [...ticked, id]
}
