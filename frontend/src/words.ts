// Names that several parts share.
import type { Id, RunView } from "./contract.ts"
import { count } from "./numbers.ts"
import type { Span } from "./state.ts"

type Bins = RunView["bins"]

export function binName(bins: Bins, bin: number): string {
  if (bins.unit === "epoch") return `epoch ${bin + 1}`
  const first = (bins.edges[bin] ?? 0) + 1
  const last = bins.edges[bin + 1] ?? first
  return first === last ? `step ${count(first)}` : `steps ${count(first)}–${count(last)}`
}

export function spanName(bins: Bins, [first, last]: Span): string {
  if (first === last) return binName(bins, first)
  if (bins.unit === "epoch") return `epochs ${first + 1}–${last + 1}`
  return `steps ${count((bins.edges[first] ?? 0) + 1)}–${count(bins.edges[last + 1] ?? 0)}`
}

export function binCount(bins: Bins): number {
  return Math.max(0, bins.edges.length - 1)
}

export function placeName(place: number, grid: readonly [number, number] | null): string {
  if (!grid) return `position ${place + 1}`
  return `row ${Math.floor(place / grid[1]) + 1}, column ${(place % grid[1]) + 1}`
}

export function sampleName(id: Id, label: Id | null): string {
  return label === null ? `sample ${id}` : `sample ${id}, labeled ${label}`
}

/** A long id without its middle: of a path, the end tells files apart. */
export function brief(id: Id, most = 24): string {
  const text = String(id)
  return text.length > most ? `${text.slice(0, most / 3)}…${text.slice(1 - (2 * most) / 3)}` : text
}

export function plural(number: number, one: string, many = `${one}s`): string {
  return `${count(number)} ${number === 1 ? one : many}`
}
