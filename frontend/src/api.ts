// The explorer's JSON, as docs/explorer-api.md writes it.

export type Id = number | string
export type Ask = "layer" | "network" | "removed" | "keys"
export type SideName = "for" | "against"

export interface Preview {
  kind: "image" | "text" | "numbers"
  source?: string
  crisp?: boolean
  text?: string
  values?: number[]
  width?: number
  height?: number
}

export interface Layer {
  name: string
  inputs: number
  outputs: number
  rows: number
  places: number
  grid: [number, number] | null
}

export interface Question {
  ask: Ask
  title: string
  meaning: string
  available: boolean
  why: string
}

export interface ImageSize {
  kind: "image"
  height: number
  width: number
  channels: number
}

export interface RunFacts {
  name: string
  runs?: number
  steps: number
  samples: number
  bytes: number
  bins: { unit: "epoch" | "step"; edges: number[] }
  layers: Layer[]
  /** What samples can be grouped by; "label" is the first. */
  columns: string[]
  labels: { label: Id; count: number }[]
  classes: boolean
  questions: Question[]
  queries: number
  accepts: ImageSize | { kind: "text" } | null
  facts: Record<string, string>
  carried?: boolean
}

export interface QueryCard {
  query: string
  title: string
  label: Id | null
  predicted: number | null
  right: boolean | null
  preview: Preview | null
}

export interface QueryList {
  total: number
  queries: QueryCard[]
}

export interface Output {
  output: number
  value: number
}

export interface Check {
  initial: number
  evidence: number
  by_step: number
  remainder: number
  total: number
}

export interface Evidence {
  id: Id
  label: Id | null
  value: number
  preview: Preview | null
  tokens?: string[]
  places?: number[]
}

export interface Side {
  sum: number
  count: number
  samples: Evidence[]
}

export interface Group {
  label: Id | null
  count: number
  sum: number
  for: number
  against: number
  curve: number[]
}

export interface Answer {
  query: QueryCard
  ask: Ask
  layer: string | null
  output: number
  asked: string
  outputs: Output[]
  check: Check | null
  error: number | null
  note: string
  unit: string
  sides: Record<SideName, Side>
  timeline: number[] | null
  groups: Group[]
  places: number
  place: number | null
  /** The positions are the model's own: the whole network can be asked at the same one. */
  shared: boolean
  marks: number[] | null
  tokens?: string[] | null
}

export interface EvidenceList {
  total: number
  samples: Evidence[]
}

/** What each piece of some samples' texts adds, by the id of the sample. */
export interface Highlights {
  samples: Record<string, { tokens: string[]; places: number[] }>
}

export interface LayerShares {
  output: number
  shares: { layer: string; value: number }[]
  initial: number
  by_step: number
  remainder: number
  total: number
}

export interface Acts {
  id: Id
  label: Id | null
  preview: Preview | null
  value: number
  timeline: number[] | null
  places: number[] | null
  tokens: string[] | null
  grid: [number, number] | null
}

export interface Effect {
  query: QueryCard
  output: number
  value: number
}

export interface SampleFacts {
  id: Id
  label: Id | null
  preview: Preview | null
  visits: number
  history: { bin: number; error: number }[]
  suspicion: number
  rank: number
  helps: Effect[]
  hurts: Effect[]
  of: number
  query: string
}

export interface Suspects {
  total: number
  samples: Evidence[]
}

export interface Subtraction {
  ids: Id[]
  note: string
  before: Output[]
  after: Output[]
  /** after: an account, as the note says; retrained: an estimate, if it was asked for. */
  asked: {
    output: number
    before: number
    after: number
    retrained: number | null
    estimate: string
  }
}

export interface Book {
  name: string
  shape: number[]
  rows: number
  granularity: string
  reason: string
  remainder: number | null
  bytes: number
}

export interface Books {
  remainder: number | null
  coverage: number
  /** Whether rounding can be all that is missing; empty where little is. */
  verdict: string
  bytes: number
  books: Book[]
}

/** What each path answers. */
export interface Answers {
  run: RunFacts
  queries: QueryList
  answer: Answer
  evidence: EvidenceList
  highlights: Highlights
  layers: LayerShares
  acts: Acts
  sample: SampleFacts
  suspects: Suspects
  subtract: Subtraction
  books: Books
}

export type Path = keyof Answers

/** A report's data: what its queries were answered, and the cells that further answers are made of. */
export interface Carried {
  run: RunFacts
  books: Books
  ids: Id[]
  /** Of every sample, in the order of the ids: base64 of little-endian float32. */
  suspicion: string
  /** One value a sample, in the order of the ids. */
  columns: Record<string, (Id | null)[]>
  previews: Record<string, Preview>
  queries: QueryCard[]
  answers: Record<string, Answer & { cells: string | null }>
  layers: Record<string, LayerShares>
  samples: Record<string, SampleFacts>
}
