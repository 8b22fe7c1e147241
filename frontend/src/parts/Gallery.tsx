import { useCallback, useEffect, useState } from "preact/hooks"
import type { QueriesView, QueryCard } from "../contract.ts"
import { usePane } from "../context.ts"
import { type Pages, usePages } from "../load.ts"
import { toQuery } from "../moves.ts"
import { plural } from "../words.ts"
import { Give } from "./Give.tsx"
import { Picture } from "./Picture.tsx"
import { Virtual } from "./Virtual.tsx"
import { Failed } from "./Waiting.tsx"

const list = (answer: QueriesView) => ({ total: answer.total, items: answer.queries })

/** The predictions that can be asked about, as a strip of film. */
export function Gallery() {
  const { run, source } = usePane()
  const [typed, setTyped] = useState("")
  const search = useSettled(typed)
  const [wrong, setWrong] = useState(false)
  const params = { search, wrong: wrong ? 1 : null }
  const pages = usePages<"queries", QueryCard>(source, "queries", params, list)
  return (
    <section class="gallery" aria-label="Choose a prediction" data-testid="gallery">
      <div class="tools">
        <label>
          <span class="hidden">Search predictions</span>
          <input
            type="search"
            placeholder="Search predictions"
            value={typed}
            onInput={(event) => setTyped(event.currentTarget.value)}
            data-testid="search"
          />
        </label>
        {run.queries > 0 && pages.item(0)?.right !== null && (
          <label class="switch">
            <input
              type="checkbox"
              checked={wrong}
              onChange={(event) => setWrong(event.currentTarget.checked)}
              data-testid="only-wrong"
            />
            Only wrong ones
          </label>
        )}
        <span class="small" role="status" data-testid="found">
          {pages.total === null ? "Reading the predictions…" : plural(pages.total, "prediction")}
        </span>
        {run.accepts && !run.carried && <Give accepts={run.accepts} />}
      </div>
      {pages.failed && <Failed message={pages.failed} />}
      {pages.total === 0 && (
        <p class="notice">
          {run.queries
            ? "No prediction fits. Search for something else, or show right ones too."
            : "No predictions were given with this run."}
        </p>
      )}
      <div class="shelf">
        {pages.total ? <Film key={`${search}|${wrong}`} pages={pages} total={pages.total} /> : null}
      </div>
    </section>
  )
}

/** What was typed, once the typing pauses. */
function useSettled(typed: string): string {
  const [settled, settle] = useState(typed)
  useEffect(() => {
    const timer = setTimeout(() => settle(typed), 150)
    return () => clearTimeout(timer)
  }, [typed])
  return settled
}

function Film({ pages, total }: { pages: Pages<QueryCard>; total: number }) {
  const { asked } = usePane()
  const preview = pages.item(0)?.preview
  const textual = preview === null || preview?.kind === "text"
  const range = useCallback((first: number, last: number) => pages.need(first, last), [total])
  return (
    <Virtual
      total={total}
      size={textual ? 216 : 84}
      across
      label="Predictions"
      start={placeOf(asked.query, pages, total)}
      onRange={range}
      testid="film"
      item={(index) => <Frame card={pages.item(index)} />}
    />
  )
}

/** Where a query stands: a report has some of them, so that its number is no place there. */
function placeOf(query: string, pages: Pages<QueryCard>, total: number): number {
  for (let at = 0; at < total; at++) if (pages.item(at)?.query === query) return at
  return Number(query) < total ? Number(query) : 0
}

function Frame({ card }: { card: QueryCard | undefined }) {
  const { asked, ask } = usePane()
  if (!card) return <span class="frame empty" aria-hidden="true" />
  return (
    <button
      type="button"
      class={`frame ${card.preview?.kind ?? "none"} ${card.right === false ? "wrong" : ""}`}
      aria-pressed={card.query === asked.query}
      title={card.title}
      onClick={() => ask(toQuery(asked, card.query))}
      onKeyDown={walk}
      data-testid={`query-${card.query}`}
    >
      {card.preview && <Picture preview={card.preview} />}
      {!card.preview && <span class="picture text">{card.title}</span>}
      <span class="small caption">
        {card.preview && <span class="hidden">{card.title}: </span>}
        {card.right === false && <span class="wrong">✗ </span>}
        {card.predicted ?? card.label ?? (card.preview && card.title)}
      </span>
    </button>
  )
}

/** Arrow keys go from frame to frame. */
function walk(event: KeyboardEvent): void {
  const item = (event.currentTarget as HTMLElement).closest("li")
  const next = { ArrowRight: item?.nextElementSibling, ArrowLeft: item?.previousElementSibling }
  const found = next[event.key as keyof typeof next]
  if (!found) return
  event.preventDefault()
  found.querySelector("button")?.focus()
}
