import type { ComponentChildren } from "preact"
import type { Ask } from "../contract.ts"
import { paneOf, PaneContext, useExplorer, usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { toAsk, toLayer, toQuery, toRun } from "../moves.ts"
import { Check } from "../parts/Check.tsx"
import { EvidenceSides } from "../parts/EvidenceSides.tsx"
import { Filters } from "../parts/Filters.tsx"
import { Groups } from "../parts/Groups.tsx"
import { Opened } from "../parts/Opened.tsx"
import { Outputs } from "../parts/Outputs.tsx"
import { QueryFigure, Verdict } from "../parts/QueryFigure.tsx"
import { Waiting } from "../parts/Waiting.tsx"
import { Wholly } from "../parts/Wholly.tsx"
import { When } from "../parts/When.tsx"
import { type Asked, paramsOf, type Which } from "../state.ts"

/** Two questions side by side: two queries, two layers, two runs. */
export function ComparePage() {
  return (
    <>
      <h1 class="hidden">Compare</h1>
      <div class="panes">
        <OnePane which="asked" name="Left" />
        <OnePane which="other" name="Right" />
      </div>
    </>
  )
}

function OnePane({ which, name }: { which: Which; name: string }) {
  const explorer = useExplorer()
  const pane = paneOf(explorer, which)
  if (!pane) return <p class="notice">There is no run number {explorer.state[which].run} here.</p>
  return (
    <PaneContext.Provider value={pane}>
      <section class="pane" aria-label={`${name} pane`} data-testid={`pane-${which}`}>
        <Choices />
        <PaneAnswer />
        <Opened />
      </section>
    </PaneContext.Provider>
  )
}

function Choices() {
  const { runs } = useExplorer()
  const { asked, ask, run, source } = usePane()
  const carried = (next: Asked) => source.carries("answer", paramsOf(next))
  const question = (next: Ask) => toAsk(asked, next, false)
  const inside = asked.ask === "layer" || asked.ask === "keys"
  const last = run.layers.at(-1)?.name ?? ""
  return (
    <div class="choices">
      {runs.length > 1 && (
        <Choice
          label="Run"
          value={String(asked.run)}
          onChoose={(v) => ask(toRun(asked, Number(v)))}
        >
          {runs.map((one, i) => (
            <option value={i}>{one.name}</option>
          ))}
        </Choice>
      )}
      {run.carried ? <QueryChoice /> : <QueryNumber />}
      <Choice label="Question" value={asked.ask} onChoose={(v) => ask(question(v as Ask))}>
        {run.questions.map((one) => (
          <option value={one.ask} disabled={!one.available || !carried(question(one.ask))}>
            {one.title}
          </option>
        ))}
      </Choice>
      {inside && (
        <Choice
          label="Layer"
          value={asked.layer ?? last}
          onChoose={(v) => ask(toLayer(asked, v, asked.ask))}
        >
          {run.layers.map(({ name }) => (
            <option value={name} disabled={!carried(toLayer(asked, name, asked.ask))}>
              {name}
            </option>
          ))}
        </Choice>
      )}
    </div>
  )
}

interface ChoiceProps {
  label: string
  value: string
  onChoose(value: string): void
  children: ComponentChildren
}

function Choice({ label, value, onChoose, children }: ChoiceProps) {
  return (
    <label>
      <span class="small">{label}</span>
      <select
        value={value}
        onChange={(event) => onChoose(event.currentTarget.value)}
        data-testid={`choose-${label.toLowerCase()}`}
      >
        {children}
      </select>
    </label>
  )
}

/** A report has few queries, and they need not be numbers. */
function QueryChoice() {
  const { asked, ask, source } = usePane()
  const { value } = useGet(source, "queries", { limit: 500 })
  return (
    <Choice label="Query" value={asked.query} onChoose={(v) => ask(toQuery(asked, v))}>
      {value?.queries.map((card) => (
        <option value={card.query}>{card.title}</option>
      ))}
    </Choice>
  )
}

/** Given queries by their number; others keep their own way of being written. */
function QueryNumber() {
  const { asked, ask, run } = usePane()
  const own = !/^\d+$/.test(asked.query)
  return (
    <label>
      <span class="small">
        Query{run.queries > 0 && ` (0 to ${run.queries - 1})`}
        {own && ", now one of your own"}
      </span>
      <input
        type="number"
        min={0}
        max={Math.max(0, run.queries - 1)}
        value={own ? "" : asked.query}
        onChange={(event) => {
          const { value } = event.currentTarget
          if (value) ask(toQuery(asked, value))
        }}
        data-testid="choose-query"
      />
    </label>
  )
}

function PaneAnswer() {
  const { asked, source } = usePane()
  const loaded = useGet(source, "answer", paramsOf(asked))
  const answer = loaded.value
  return (
    <>
      <Waiting of={loaded} doing="Reading the evidence" />
      {loaded.failed !== null && <Wholly />}
      {answer && loaded.failed === null && (
        <div class={loaded.busy ? "stale" : ""} aria-busy={loaded.busy}>
          <div class="opening">
            <QueryFigure answer={answer} />
            <div>
              <h2>{answer.query.title}</h2>
              <Verdict answer={answer} />
              <Outputs answer={answer} />
            </div>
          </div>
          <Check answer={answer} />
          <Filters />
          <EvidenceSides answer={answer} />
          <When answer={answer} />
          <Groups answer={answer} />
        </div>
      )}
    </>
  )
}
