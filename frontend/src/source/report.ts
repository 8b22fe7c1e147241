// A report answers itself: what it carries as it is, the rest computed from its cells.
import type {
  ActsView,
  AnswerView,
  AttentionView,
  CarriedAnswer,
  EvidenceCard,
  EvidenceView,
  GroupView,
  HighlightsView,
  Id,
  LayersView,
  OutputValue,
  QueriesView,
  ReportData,
  SampleView,
  SideName,
  SideView,
  SubtractView,
  SuspectsView,
  ViewName,
  Views,
} from "../contract.ts"
import {
  amounts,
  type Cells,
  decode,
  grouped,
  type Ranked,
  ranked,
  timeline,
  total,
} from "./cells.ts"
import { type Params, Refusal, type Source } from "./source.ts"

type Getters = { [P in ViewName]: (params: Params) => Views[P] }

const SHOWN = 12
// What numbers without some samples are; the server says the same.
const ACCOUNT =
  "An account: the model's output less what these samples added to it through all layers; nothing is trained again."
const LAYER_ACCOUNT =
  "An account of this layer alone: its output less what these samples added to its parameters; its input stays as it is, and nothing is trained again."
const ESTIMATE =
  "An estimate of what training without these samples would have led to; not an account."
const LIVE = "`dualform view` on the run answers everything."

export class ReportSource implements Source {
  private readonly carried: ReportData
  private readonly rows: Map<string, number>
  /** All samples, the most suspicious first. */
  private readonly suspicion: Ranked[]
  private readonly decoded = new Map<string, Cells>()
  private readonly getters: Getters = {
    run: () => this.carried.run,
    books: () => this.carried.books,
    attention: () => this.attention(),
    suspects: (params) => this.suspects(params),
    queries: (params) => this.queries(params),
    answer: (params) => this.answer(params),
    evidence: (params) => this.evidence(params),
    highlights: (params) => this.highlights(params),
    layers: (params) => this.layers(params),
    acts: (params) => this.acts(params),
    sample: (params) => this.sample(params),
    subtract: (params) => this.subtract(params),
  }

  constructor(carried: ReportData) {
    this.carried = carried
    this.rows = new Map(carried.ids.map((id, row) => [String(id), row]))
    const { values } = decode(carried.suspicion, carried.ids.length)
    this.suspicion = Array.from(values, (value, index) => ({ index, value })).sort(
      (a, b) => b.value - a.value || a.index - b.index,
    )
  }

  link(): null {
    return null
  }

  carries(path: ViewName, params: Params): boolean {
    if (path === "sample") return String(params.id) in this.carried.samples
    const kept = this.find(params)
    if (path === "answer" && !restricts(params)) return kept !== undefined
    return typeof kept?.cells === "string" && params.at == null
  }

  async get<P extends ViewName>(path: P, params: Params): Promise<Views[P]> {
    return this.getters[path](params)
  }

  private queries(params: Params): QueriesView {
    const word = String(params.search ?? "").toLowerCase()
    const found = this.carried.queries.filter(({ title, label, preview, right }) => {
      const text = preview?.kind === "text" ? preview.text : ""
      const words = `${title} ${label ?? ""} ${text}`.toLowerCase()
      return (!params.wrong || right === false) && words.includes(word)
    })
    return { total: found.length, queries: page(found, params) }
  }

  private attention(): AttentionView {
    if (this.carried.attention) return this.carried.attention
    throw new Refusal("There is no attention to look at: the report has no transformer in it.")
  }

  private suspects(params: Params): SuspectsView {
    const samples = page(this.suspicion, params).map((one) => this.show(one))
    return { total: this.suspicion.length, samples }
  }

  private sample(params: Params): SampleView {
    const facts = this.carried.samples[String(params.id)]
    if (facts) return facts
    throw new Refusal(`This report does not carry the page of sample ${params.id}. ${LIVE}`)
  }

  private layers(params: Params): LayersView {
    const first = this.first(params)
    const output = params.output ?? first.output
    const shares = this.carried.layers[`${params.query}|${output}`]
    if (shares && (params.place == null || Number(params.place) === first.place)) return shares
    throw new Refusal(`This report does not carry the layers' shares of output ${output}. ${LIVE}`)
  }

  private answer(params: Params): AnswerView {
    const { cells: _, ...bare } = this.kept(params)
    const kept = { ...bare, sides: this.illustrated(bare.sides) }
    if (params.at != null) throw new Refusal(`This report does not carry single positions. ${LIVE}`)
    if (!restricts(params)) return kept
    const groups = this.groups(params)
    const only = restrictions(params)
    if (only.length === 0) return { ...kept, groups }
    const values = this.restricted(params)
    const notes = kept.check ? only : [...only, kept.note]
    return {
      ...kept,
      check: null,
      attributed: null,
      error: null,
      note: notes.join(" "),
      sides: { for: this.side(values, "for"), against: this.side(values, "against") },
      timeline: kept.timeline && timeline(this.cells(params), this.chosen(params)),
      groups,
    }
  }

  /** The amounts, zero for samples that are not asked about. */
  private restricted(params: Params): number[] {
    const chosen = this.chosen(params)
    return this.values(params).map((value, index) => (chosen(index) ? value : 0))
  }

  private chosen(params: Params): (index: number) => boolean {
    if (params.label == null) return () => true
    const column = this.column(params)
    return (index) => String(column[index]) === String(params.label)
  }

  private evidence(params: Params): EvidenceView {
    const side: SideName = params.side === "against" ? "against" : "for"
    const all = ranked(this.restricted(params), side)
    return { total: all.length, samples: page(all, params).map((one) => this.show(one)) }
  }

  /** What is carried is of the whole training: under a span, nothing is highlighted. */
  private highlights(params: Params): HighlightsView {
    if (spanOf(params)) return { samples: {} }
    const { sides } = this.kept(params)
    const marked = [...sides.for.samples, ...sides.against.samples].flatMap(
      ({ id, tokens, places }) => (tokens && places ? [[String(id), { tokens, places }]] : []),
    )
    return { samples: Object.fromEntries(marked) as HighlightsView["samples"] }
  }

  private acts(params: Params): ActsView {
    const row = this.row(params.id)
    const cells = this.cells(params)
    const own = Array.from(cells.values.subarray(row * cells.bins, (row + 1) * cells.bins))
    const value =
      amounts({ values: Float32Array.from(own), bins: cells.bins }, spanOf(params))[0] ?? 0
    return {
      ...this.show({ index: row, value }),
      timeline: this.kept(params).timeline ? own : null,
      places: null,
      tokens: null,
      grid: null,
    }
  }

  /** An account: outputs less the ticked samples' amounts, for the outputs that are carried. */
  private subtract(params: Params): SubtractView {
    const ids = Array.isArray(params.id) ? params.id : [params.id ?? ""]
    const { ask, layer, output, outputs } = this.kept(params)
    const ofLayer = ask === "layer" || ask === "keys"
    const account: Params = ofLayer
      ? { ...params, ask: "layer" }
      : { ...params, ask: "network", layer: null }
    const left = (of: number) => this.removed({ ...account, output: of }, ids)
    const before = outputs.filter((one) => left(one.output) !== null)
    before.sort((a, b) => a.output - b.output)
    const after = before.map((one) => ({ ...one, value: one.value - (left(one.output) ?? 0) }))
    if (left(output) === null) {
      throw new Refusal(`This report does not carry the account of output ${output}. ${LIVE}`)
    }
    const value = valueOf(before, output)
    const ofModel = !ofLayer || layer === this.layerOf("layer")
    const retrained = ofModel
      ? this.removed({ ...params, ask: "removed", layer: null, output }, ids)
      : null
    return {
      ids: ids.map((id) => this.carried.ids[this.row(id)] ?? String(id)),
      note: ofLayer ? LAYER_ACCOUNT : ACCOUNT,
      before,
      after,
      asked: {
        output,
        before: value,
        after: valueOf(after, output),
        retrained: retrained === null ? null : value - retrained,
        estimate: ESTIMATE,
      },
    }
  }

  private removed(params: Params, ids: readonly (string | number)[]): number | null {
    const kept = this.find(params)
    if (!kept?.cells) return null
    const values = amounts(this.cells(params), null)
    return total(ids.map((id) => values[this.row(id)] ?? 0))
  }

  /** Each picture is carried once, by the id of its sample. */
  private pictured(samples: EvidenceCard[]): EvidenceCard[] {
    const find = (id: Id) => this.carried.previews[String(id)] ?? null
    return samples.map((one) => ({ ...one, preview: one.preview ?? find(one.id) }))
  }

  private illustrated({ for: left, against: right }: AnswerView["sides"]): AnswerView["sides"] {
    return {
      for: { ...left, samples: this.pictured(left.samples) },
      against: { ...right, samples: this.pictured(right.samples) },
    }
  }

  private side(values: number[], side: SideName): SideView {
    const all = ranked(values, side)
    const samples = all.slice(0, SHOWN).map((one) => this.show(one))
    return { sum: total(all.map((one) => one.value)), count: all.length, samples }
  }

  private show({ index, value }: Ranked): EvidenceCard {
    const id = this.carried.ids[index] ?? index
    const preview = this.carried.previews[String(id)] ?? null
    return { id, label: this.carried.columns.label?.[index] ?? null, value, preview }
  }

  private groups(params: Params): GroupView[] {
    return grouped(this.values(params), this.column(params))
  }

  private column(params: Params): readonly (Id | null)[] {
    return this.carried.columns[String(params.by ?? "label")] ?? []
  }

  private row(id: Params[string]): number {
    const row = this.rows.get(String(id))
    if (row === undefined) throw new Refusal(`This report has no sample ${id}. ${LIVE}`)
    return row
  }

  private values(params: Params): number[] {
    return amounts(this.cells(params), spanOf(params))
  }

  private cells(params: Params): Cells {
    const kept = this.kept(params)
    const key = keyOf(kept.query.query, kept.ask, kept.layer, kept.output)
    const known = this.decoded.get(key)
    if (known) return known
    if (kept.cells === null)
      throw new Refusal(`This report carries only the first samples of this answer. ${LIVE}`)
    const cells = decode(kept.cells, this.carried.ids.length)
    this.decoded.set(key, cells)
    return cells
  }

  private kept(params: Params): CarriedAnswer {
    const kept = this.find(params)
    if (kept) return kept
    throw new Refusal(`This report does not carry the answer to this question. ${LIVE}`)
  }

  /** The answer to a question, or to its default output: the first of the largest outputs. */
  private find(params: Params): CarriedAnswer | undefined {
    const { query, ask = "layer", output, place } = params
    const layer = params.layer ?? this.layerOf(String(ask))
    const all = Object.values(this.carried.answers).filter(
      (kept) =>
        kept.query.query === String(query) &&
        kept.ask === ask &&
        kept.layer === layer &&
        (place == null || kept.place === Number(place)),
    )
    if (output != null) return all.find((kept) => kept.output === Number(output))
    return all.find((kept) => kept.output === kept.outputs[0]?.output) ?? all[0]
  }

  private first(params: Params): CarriedAnswer {
    return this.kept({ query: params.query, ask: "network" })
  }

  private layerOf(ask: string): string | null {
    const last = this.carried.run.layers.at(-1)?.name ?? null
    return ask === "layer" || ask === "keys" ? last : null
  }
}

export function keyOf(query: string, ask: string, layer: string | null, output: number): string {
  return `${query}|${ask}|${layer ?? ""}|${output}`
}

/** Whether it takes cells to answer: what is carried as it is has no restrictions. */
function restricts(params: Params): boolean {
  return restrictions(params).length > 0 || params.at != null || (params.by ?? "label") !== "label"
}

/** What an answer is restricted to, a sentence each; the words of the server. */
function restrictions(params: Params): string[] {
  const { span, label, by } = params
  const learned = "Only what was learned in the chosen part of training."
  const sampled = `Only samples whose ${by ?? "label"} is ${label}.`
  return [...(span == null ? [] : [learned]), ...(label == null ? [] : [sampled])]
}

function spanOf(params: Params): [number, number] | null {
  if (params.span == null) return null
  const [first = 0, last = first] = String(params.span).split("-").map(Number)
  return [first, last]
}

function page<T>(all: T[], params: Params): T[] {
  const offset = Number(params.offset ?? 0)
  return all.slice(offset, offset + Number(params.limit ?? 50))
}

function valueOf(outputs: OutputValue[], output: number): number {
  return outputs.find((one) => one.output === output)?.value ?? 0
}
