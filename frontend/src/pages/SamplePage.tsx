import type { EffectCard, SampleView } from "../contract.ts"
import { useExplorer, usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { toQuery, wholly } from "../moves.ts"
import { nameOf } from "../names.ts"
import { count, Scale } from "../numbers.ts"
import { Amount, Bar, Figure } from "../parts/Amount.tsx"
import { Tick } from "../parts/Card.tsx"
import { Go } from "../parts/Go.tsx"
import { History } from "../parts/History.tsx"
import { Picture } from "../parts/Picture.tsx"
import { Section } from "../parts/Section.tsx"
import { Waiting } from "../parts/Waiting.tsx"
import { paramsOf } from "../state.ts"
import { plural, sampleName } from "../words.ts"

/** A training sample: which predictions it helps and hurts, and its history. */
export function SamplePage({ id }: { id: string }) {
  const { source } = usePane()
  const loaded = useGet(source, "sample", { id })
  const facts = loaded.value
  return (
    <>
      <Waiting of={loaded} doing={`Reading sample ${id}`} />
      {facts && String(facts.id) === id && <Facts facts={facts} />}
    </>
  )
}

function Facts({ facts }: { facts: SampleView }) {
  const { asked, source, run } = usePane()
  const twin = { source, path: "sample", params: { id: facts.id } }
  const itself = wholly(toQuery(asked, facts.query))
  return (
    <div class="prediction" data-testid="sample">
      <aside class="query" aria-label="The sample">
        <h1>Sample {String(facts.id)}</h1>
        <p class="verdict">
          {facts.label === null ? "It has no label." : `Labeled ${facts.label}.`}
        </p>
        <div class="stage">
          <Picture preview={facts.preview} name={sampleName(facts.id, facts.label)} />
        </div>
        <p>
          Training saw it {plural(facts.visits, "time")}. It is number{" "}
          <Figure value={facts.rank} text={count(facts.rank)} testid="rank" /> of{" "}
          {count(run.samples)} by suspicion (
          <Figure
            value={facts.suspicion}
            text={new Scale([facts.suspicion]).plain(facts.suspicion)}
          />
          ).
        </p>
        <p class="ticking">
          <Tick id={String(facts.id)} name={sampleName(facts.id, facts.label)} /> Subtract it
        </p>
        {source.carries("answer", paramsOf(itself)) && (
          <p class="links">
            <Go to={{ page: "query", asked: itself }} testid="as-query">
              What is its own prediction made of?
            </Go>
          </p>
        )}
      </aside>
      <div class="answer">
        <Section title="Its history" twin={twin} testid="history">
          <History history={facts.history} bins={run.bins} />
        </Section>
        <div class="sides">
          <Effects title="Helps most" effects={facts.helps} of={facts.of} testid="helps" />
          <Effects title="Hurts most" effects={facts.hurts} of={facts.of} testid="hurts" />
        </div>
      </div>
    </div>
  )
}

interface EffectsProps {
  title: string
  effects: EffectCard[]
  of: number
  testid: string
}

function Effects({ title, effects, of, testid }: EffectsProps) {
  const scale = new Scale(effects.map((effect) => effect.value))
  return (
    <Section title={title} testid={testid}>
      <p class="small">
        {effects.length
          ? `Of ${plural(of, "prediction")} that were looked at.`
          : `None of ${plural(of, "prediction")} that were looked at.`}
      </p>
      <ol class="effects">
        {effects.map((effect) => (
          <li>
            <OneEffect effect={effect} scale={scale} />
          </li>
        ))}
      </ol>
    </Section>
  )
}

function OneEffect({ effect, scale }: { effect: EffectCard; scale: Scale }) {
  const { asked, run, source } = usePane()
  const { state } = useExplorer()
  const { query, output, value } = effect
  const target = {
    ...wholly(toQuery(asked, query.query)),
    ask: "layer" as const,
    layer: null,
    output,
  }
  const shown = (
    <>
      <Picture preview={query.preview} />
      <span class="name">
        {query.title}
        <span class="small"> output {nameOf(run, null, output)}</span>
      </span>
      <Bar share={scale.share(value)} both={false} />
      <Amount value={value} scale={scale} />
    </>
  )
  if (!source.carries("answer", paramsOf(target))) return <span class="effect">{shown}</span>
  return (
    <Go class="effect" to={{ ...state, page: "query", asked: target }}>
      {shown}
    </Go>
  )
}
