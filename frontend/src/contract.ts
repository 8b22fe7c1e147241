// Made from src/dualform/explore/contract.py by `make format`: change it there.

/** One head over training. */
export interface HeadCourse {
  head: number
  /** The size of what it adds, relative to what its layer gives, at each step. */
  share: (number | null)[]
  /** The head of the layer that attends most as it does, at the last step. */
  twin: number | null
  /** How much its attention overlaps with that of the head most like it: 1 where alike. */
  overlap: (number | null)[]
}

/** One block over training. */
export interface BlockCourse {
  name: string
  /** μ/‖X‖ after it, at each step: 0 where all tokens are one. */
  relative: (number | null)[]
  /** Dobrushin's coefficient of its attention. */
  contraction: (number | null)[]
  heads: HeadCourse[]
}

/** GET attention */
export interface AttentionView {
  /** Those that were looked at; the last is the one that is read. */
  steps: number[]
  /** On how many queries the model was called. */
  queries: number
  findings: string[]
  blocks: BlockCourse[]
}

export type Id = number | string

export type Label = number | string

export type Ask = "layer" | "network" | "removed" | "keys"

export type SideName = "for" | "against"

/** A picture. */
export interface ImagePreview {
  kind: "image"
  source: string
  crisp: boolean
  width: number
  height: number
}

/** A text, or the beginning of it. */
export interface TextPreview {
  kind: "text"
  text: string
}

/** A curve. */
export interface NumbersPreview {
  kind: "numbers"
  values: number[]
}

export type PreviewCard = ImagePreview | TextPreview | NumbersPreview

/** Pictures of this size may be drawn or uploaded. */
export interface ImageSize {
  kind: "image"
  height: number
  width: number
  channels: number
}

/** Texts may be typed. */
export interface AnyText {
  kind: "text"
}

/** Training in parts: bin i holds the steps edges[i] + 1 to edges[i + 1]. */
export interface TrainingBins {
  unit: "epoch" | "step"
  edges: number[]
}

/** A recorded layer. */
export interface LayerFacts {
  name: string
  inputs: number
  outputs: number
  rows: number
  /** Positions of a sample: tokens, patches; 1 where there are none. */
  places: number
  /** Height and width, where the positions lie in a plane. */
  grid: [number, number] | null
}

/** How many training samples have a label. */
export interface LabelCount {
  label: Label
  count: number
}

/** A question that can be asked. */
export interface QuestionCard {
  ask: Ask
  title: string
  meaning: string
  available: boolean
  /** How to make it available. */
  why: string
}

/** GET run */
export interface RunView {
  name: string
  runs: number
  /** A report: only what it carries can be asked. */
  carried: boolean
  /** Whether the model has attention to look at. */
  attention: boolean
  steps: number
  samples: number
  bytes: number
  bins: TrainingBins
  layers: LayerFacts[]
  /** What samples can be grouped by; "label" is the first. */
  columns: string[]
  labels: LabelCount[]
  /** Labels are numbers of outputs. */
  classes: boolean
  /** What the model's outputs, and so those of the last layer, are called; empty if not known. */
  names: string[]
  questions: QuestionCard[]
  queries: number
  /** What may be drawn, uploaded or typed. */
  accepts: ImageSize | AnyText | null
  facts: Record<string, string>
}

/** A query that can be asked about. */
export interface QueryCard {
  /** As the parameter `query` names it. */
  query: string
  title: string
  label: Label | null
  predicted: number | null
  right: boolean | null
  preview: PreviewCard | null
}

/** GET queries?search=&wrong=1&offset=0&limit=50 */
export interface QueriesView {
  total: number
  queries: QueryCard[]
}

/** One output, by its number. */
export interface OutputValue {
  output: number
  value: number
}

/** initial + evidence + by_step + remainder = total. */
export interface CheckParts {
  initial: number
  evidence: number
  /** What belongs to no sample: changes booked by step, and what smaller entries leave. */
  by_step: number
  remainder: number
  total: number
}

/** A training sample and its amount. */
export interface SampleCard {
  id: Id
  label: Label | null
  value: number
  /** In reports null: see `previews` there. */
  preview: PreviewCard | null
}

/** A training sample among the evidence; in reports also what the pieces of its text add. */
export interface EvidenceCard extends SampleCard {
  tokens?: string[]
  places?: number[]
}

/** The evidence on one side: its sum, and the first 12 samples. */
export interface SideView {
  sum: number
  count: number
  samples: EvidenceCard[]
}

export interface SideSums {
  for: number
  against: number
}

/** The samples of one label, or of one value of another column. */
export interface GroupView extends SideSums {
  label: Label | null
  count: number
  sum: number
  /** Their amounts, the largest first, at most 120 points evenly taken. */
  curve: number[]
}

/** GET answer?query=&ask=&layer=&output=&place=&at=&span=&by=&label= */
export interface AnswerView {
  query: QueryCard
  ask: Ask
  layer: string | null
  output: number
  asked: string
  /** Of the model, or of the layer: the largest first, at most 12. */
  outputs: OutputValue[]
  /** Null for removed and keys, and where a span, a position or a label restricts the sums. */
  check: CheckParts | null
  /** The share of what training changed that samples have: |evidence| / (|evidence| + |by_step|). Null where there is no check. */
  attributed: number | null
  /** The share of what training changed that stays unexplained. */
  error: number | null
  /** What the numbers are, in a sentence. */
  note: string
  unit: string
  sides: Record<SideName, SideView>
  /** One sum a bin, never restricted by a span; null for removed and keys. */
  timeline: number[] | null
  /** By label, never restricted by one; a single group without a label if there are none. */
  groups: GroupView[]
  places: number
  place: number | null
  /** The positions are the model's own: the whole network can be asked at the same one. */
  shared: boolean
  /** The output that is asked about, at each position of the query. */
  marks: number[] | null
  /** The query's text in one piece a position, if it can be cut so. */
  tokens: string[] | null
}

/** GET evidence?(as answer)&side=for|against&offset=0&limit=50 */
export interface EvidenceView {
  total: number
  samples: EvidenceCard[]
}

/** What each piece of a text adds. */
export interface Highlight {
  tokens: string[]
  places: number[]
}

/** GET highlights?(as answer)&id=A&id=B… */
export interface HighlightsView {
  /** By the id of the sample, as a text; layers only. */
  samples: Record<string, Highlight>
}

/** What was added through one layer's parameters. */
export interface LayerShare {
  layer: string
  value: number
}

/** GET layers?query=&output=&place= */
export interface LayersView {
  output: number
  shares: LayerShare[]
  initial: number
  by_step: number
  remainder: number
  total: number
}

/** GET acts?(as answer)&id=A */
export interface ActsView extends SampleCard {
  timeline: number[] | null
  /** One sum a position of the training sample, where the layer has positions. */
  places: number[] | null
  tokens: string[] | null
  grid: [number, number] | null
}

/** The mean size of a sample's error at the last layer, in one part of training. */
export interface ErrorInBin {
  bin: number
  error: number
}

/** What a sample adds to a query's prediction. */
export interface EffectCard {
  query: QueryCard
  output: number
  value: number
}

/** GET sample?id=A */
export interface SampleView extends SampleCard {
  visits: number
  history: ErrorInBin[]
  suspicion: number
  rank: number
  helps: EffectCard[]
  hurts: EffectCard[]
  of: number
  query: string
}

/** GET suspects?offset=0&limit=50 */
export interface SuspectsView {
  total: number
  samples: EvidenceCard[]
}

/** The output that is asked about, without some samples. */
export interface SubtractedOutput {
  output: number
  before: number
  /** An account, as the note says: before, less the samples' amounts. */
  after: number
  /** An estimate: before, less their influence; null if it was not asked for or cannot be. */
  retrained: number | null
  estimate: string
}

/** GET subtract?query=&ask=&layer=&output=&place=&id=A&id=B…&estimate=1 */
export interface SubtractView {
  ids: Id[]
  note: string
  /** Of a layer all outputs, of the network the one that is asked about. */
  before: OutputValue[]
  after: OutputValue[]
  asked: SubtractedOutput
}

/** One parameter's book. */
export interface BookLine {
  name: string
  shape: number[]
  rows: number
  granularity: string
  reason: string
  remainder: number | null
  rounding: number | null
  /** The share of its change that entries leave, where they are less than the rows. */
  residual: number | null
  /** The share of its change that was booked by step. */
  by_step: number | null
  /** The share of its change that is attributed to samples: neither of the two. */
  attributed: number | null
  /** The size of the change. */
  change: number | null
  bytes: number
}

/** GET books */
export interface BooksView {
  step: number
  measured_at: number
  remainder: number | null
  coverage: number
  /** The share of the change of all parameters that is attributed to samples. */
  attributed: number | null
  /** Whether rounding can be all that is missing; empty where little is. */
  verdict: string
  bytes: number
  books: BookLine[]
}

/** What each view answers. */
export interface Views {
  run: RunView
  queries: QueriesView
  answer: AnswerView
  evidence: EvidenceView
  highlights: HighlightsView
  layers: LayersView
  acts: ActsView
  sample: SampleView
  suspects: SuspectsView
  subtract: SubtractView
  books: BooksView
  attention: AttentionView
}

/** An answer, and what further answers are made of. */
export interface CarriedAnswer extends AnswerView {
  /** (samples, bins) in the order of the ids: base64 of little-endian float32. */
  cells: string | null
}

/** What a report carries, as JSON in <script id="carried"> */
export interface ReportData {
  run: RunView
  books: BooksView
  attention: AttentionView | null
  ids: Id[]
  /** Of every sample, in the order of the ids: base64 of little-endian float32. */
  suspicion: string
  columns: Record<string, (Label | null)[]>
  previews: Record<string, PreviewCard>
  queries: QueryCard[]
  /** By `query|ask|layer|output`. */
  answers: Record<string, CarriedAnswer>
  /** By `query|output`. */
  layers: Record<string, LayersView>
  samples: Record<string, SampleView>
}

export type ViewName = keyof Views
