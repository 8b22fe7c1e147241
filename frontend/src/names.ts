import type { RunView } from "./contract.ts"

/** What an output is called: its name, if it is one of the model's and has one, or its number. */
export function nameOf(run: RunView, layer: string | null, output: number): string {
  const ofModel = layer === null || layer === run.layers.at(-1)?.name
  return (ofModel && run.names[output]) || String(output)
}
