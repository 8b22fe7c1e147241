// What else changes when one thing is chosen: an output of one layer means nothing in another.
import type { Ask } from "./contract.ts"
import type { Asked } from "./state.ts"

const WIDE = { output: null, place: null, at: null }

export function toQuery(asked: Asked, query: string): Asked {
  return { ...asked, ...WIDE, query, ask: suits(query, asked.ask) ? asked.ask : "layer" }
}

/** Of a training sample is known what the layers saw, not what the model was called with. */
export function suits(query: string, ask: Ask): boolean {
  return !query.startsWith("sample:") || ask === "layer" || ask === "keys"
}

/** The same question without restrictions, about the output that comes first. */
export function wholly(asked: Asked): Asked {
  return { ...asked, ...WIDE, span: null, by: null, label: null }
}

/**
 * Questions about the last layer and about the model share their outputs, and their positions where
 * `shared` says so.
 */
export function toAsk(asked: Asked, ask: Ask, shared: boolean): Asked {
  const inside = ask === "layer" || ask === "keys"
  const layer = inside ? asked.layer : null
  const output = asked.layer === null || asked.layer === layer ? asked.output : null
  return {
    ...asked,
    ask,
    layer,
    output,
    place: shared || (inside && layer === asked.layer) ? asked.place : null,
    span: ask === "removed" || ask === "keys" ? null : asked.span,
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
