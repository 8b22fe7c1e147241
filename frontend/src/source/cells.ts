// What a server computes from amounts per sample and bin, computed from a report's cells.
import type { GroupView, Id, SideName } from "../contract.ts"

/** Amounts of samples × bins, row by row. */
export interface Cells {
  values: Float32Array
  bins: number
}

export interface Ranked {
  index: number
  value: number
}

const CURVE = 120

/** Little-endian float32 from base64. */
export function decode(text: string, samples: number): Cells {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
  const view = new DataView(bytes.buffer)
  const values = new Float32Array(bytes.length / 4)
  for (let i = 0; i < values.length; i++) values[i] = view.getFloat32(4 * i, true)
  return { values, bins: samples ? values.length / samples : 0 }
}

/** One amount a sample: the sum over the bins of a span, all if none is given. */
export function amounts(cells: Cells, span: [number, number] | null): number[] {
  const samples = cells.bins ? cells.values.length / cells.bins : 0
  const [first, last] = span ?? [0, cells.bins - 1]
  return Array.from({ length: samples }, (_, i) => {
    let sum = 0
    for (let bin = first; bin <= last; bin++) sum += cells.values[i * cells.bins + bin] ?? 0
    return sum
  })
}

/** One sum a bin, over all samples, or those that are chosen. */
export function timeline(cells: Cells, chosen: (index: number) => boolean = () => true): number[] {
  const sums = new Array<number>(cells.bins).fill(0)
  cells.values.forEach((value, i) => {
    const bin = i % cells.bins
    if (chosen(Math.floor(i / cells.bins))) sums[bin] = (sums[bin] ?? 0) + value
  })
  return sums
}

/** The samples on one side, strongest first; what is zero is on neither. */
export function ranked(values: number[], side: SideName): Ranked[] {
  const sign = side === "for" ? 1 : -1
  return values
    .map((value, index) => ({ index, value }))
    .filter(({ value }) => sign * value > 0)
    .sort((a, b) => sign * (b.value - a.value) || a.index - b.index)
}

export function total(values: Iterable<number>): number {
  let sum = 0
  for (const value of values) sum += value
  return sum
}

/** Sums by label, in the order of the labels; samples without one come last. */
export function grouped(values: number[], labels: readonly (Id | null)[]): GroupView[] {
  return inOrder(labels).map((label) =>
    group(
      label,
      values.filter((_, i) => (labels[i] ?? null) === label),
    ),
  )
}

/** Each label once: numbers by size, texts by letter, none last; the order of the server. */
function inOrder(labels: readonly (Id | null)[]): (Id | null)[] {
  const known = [...new Set(labels)]
  const numbers = known.filter((label) => typeof label === "number").sort((a, b) => a - b)
  const texts = known.filter((label) => typeof label === "string").sort(byCodePoint)
  return [...numbers, ...texts, ...(known.includes(null) ? [null] : [])]
}

function byCodePoint(a: string, b: string): number {
  return a < b ? -1 : 1
}

function group(label: Id | null, values: number[]): GroupView {
  const sorted = values.slice().sort((a, b) => b - a)
  return {
    label,
    count: values.length,
    sum: total(values),
    for: total(values.filter((value) => value > 0)),
    against: total(values.filter((value) => value < 0)),
    curve: evenly(sorted, CURVE),
  }
}

/** At most `count` of the values, evenly taken, the first and the last among them. */
export function evenly(values: number[], count: number): number[] {
  if (values.length <= count) return values
  const step = (values.length - 1) / (count - 1)
  return Array.from({ length: count }, (_, i) => values[Math.round(i * step)] ?? 0)
}
