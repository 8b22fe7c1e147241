// Everything that a person has chosen, and its one written form: the part of the URL after the #.
import type { Ask, SideName } from "./contract.ts"
import type { Params } from "./source/source.ts"

export type Page = "query" | "sample" | "suspects" | "books" | "compare" | "attention"
export type Theme = "auto" | "light" | "dark"
/** A comparison has two panes; other pages have the first. */
export type Which = "asked" | "other"
export type Span = readonly [number, number]

/** One question: to which run, about what, restricted to what. */
export interface Asked {
  run: number
  /** Empty: the first that there is. */
  query: string
  ask: Ask
  layer: string | null
  output: number | null
  place: number | null
  span: Span | null
  at: number | null
  /** The column that samples are grouped by; null: their label. */
  by: string | null
  label: string | null
}

export interface State {
  page: Page
  asked: Asked
  /** The second pane of a comparison. */
  other: Asked
  /** Whose page is shown. */
  sample: string | null
  /** The sample of which is shown where and when it acts. */
  acting: string | null
  /** The side whose every sample is listed. */
  all: SideName | null
  /** The pane in which those two were opened. */
  pane: Which
  ticked: readonly string[]
  theme: Theme
}

const PAGES: readonly Page[] = ["query", "sample", "suspects", "books", "compare", "attention"]
const ASKS: readonly Ask[] = ["layer", "network", "removed", "keys"]
const THEMES: readonly Theme[] = ["auto", "light", "dark"]
const PANES: readonly Which[] = ["asked", "other"]
const SIDES: readonly SideName[] = ["for", "against"]

export const NOTHING_ASKED: Asked = {
  run: 0,
  query: "",
  ask: "layer",
  layer: null,
  output: null,
  place: null,
  span: null,
  at: null,
  by: null,
  label: null,
}

export const START: State = {
  page: "query",
  asked: NOTHING_ASKED,
  other: NOTHING_ASKED,
  sample: null,
  acting: null,
  all: null,
  pane: "asked",
  ticked: [],
  theme: "auto",
}

/** The parameters of a question, as every path takes them. */
export function paramsOf(asked: Asked): Params {
  const { run: _, span, ...rest } = asked
  return { ...rest, span: span && span.join("-") }
}

export function toHash(state: State): string {
  const words = new URLSearchParams()
  writeAsked(words, "", state.asked)
  writeAsked(words, "b.", state.other)
  put(words, "sample", state.sample)
  put(words, "acting", state.acting)
  put(words, "all", state.all)
  if (state.pane !== START.pane) words.set("pane", state.pane)
  for (const id of state.ticked) words.append("tick", id)
  if (state.theme !== "auto") words.set("theme", state.theme)
  const query = words.toString()
  return `#/${state.page}${query ? `?${query}` : ""}`
}

/** What cannot be understood is left at its default: a link may come from a newer version. */
export function fromHash(hash: string): State {
  const [, page = "", query = ""] = /^#?\/?([a-z]*)\??(.*)$/.exec(hash) ?? []
  const words = new URLSearchParams(query)
  return {
    page: oneOf(PAGES, page) ?? "query",
    asked: readAsked(words, ""),
    other: readAsked(words, "b."),
    sample: words.get("sample"),
    acting: words.get("acting"),
    all: oneOf(SIDES, words.get("all")),
    pane: oneOf(PANES, words.get("pane")) ?? START.pane,
    ticked: [...new Set(words.getAll("tick"))],
    theme: oneOf(THEMES, words.get("theme")) ?? "auto",
  }
}

function writeAsked(words: URLSearchParams, prefix: string, asked: Asked): void {
  for (const name of Object.keys(NOTHING_ASKED) as (keyof Asked)[]) {
    const value = asked[name]
    const text = name === "span" && asked.span ? asked.span.join("-") : value
    if (value !== NOTHING_ASKED[name]) put(words, prefix + name, text as string | number | null)
  }
}

function readAsked(words: URLSearchParams, prefix: string): Asked {
  const get = (name: keyof Asked) => words.get(prefix + name)
  return {
    run: whole(get("run")) ?? 0,
    query: get("query") ?? NOTHING_ASKED.query,
    ask: oneOf(ASKS, get("ask")) ?? "layer",
    layer: get("layer"),
    output: whole(get("output")),
    place: whole(get("place")),
    span: readSpan(get("span")),
    at: whole(get("at")),
    by: get("by"),
    label: get("label"),
  }
}

function readSpan(text: string | null): Span | null {
  const [, first, last] = /^(\d+)-(\d+)$/.exec(text ?? "") ?? []
  return first && last && Number(first) <= Number(last) ? [Number(first), Number(last)] : null
}

function put(words: URLSearchParams, name: string, value: string | number | null): void {
  if (value !== null) words.set(name, String(value))
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null
}

function oneOf<T extends string>(all: readonly T[], text: string | null): T | null {
  return all.find((one) => one === text) ?? null
}
