import type { AnswerView, SideName, SideView } from "../contract.ts"
import { useExplorer, usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { count, Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { plural } from "../words.ts"
import { Amount } from "./Amount.tsx"
import { Card } from "./Card.tsx"
import { Section } from "./Section.tsx"

const TITLES: Record<SideName, string> = { for: "For", against: "Against" }

/** The evidence for and against, side by side and drawn to one scale. */
export function EvidenceSides({ answer }: { answer: AnswerView }) {
  const { asked, source } = usePane()
  const sides = useHighlighted(answer)
  const scale = new Scale([...sides.for.samples, ...sides.against.samples].map((one) => one.value))
  return (
    <Section
      title="Evidence"
      testid="evidence"
      twin={{ source, path: "answer", params: paramsOf(asked) }}
    >
      <div class="sides">
        <OneSide name="for" side={sides.for} scale={scale} />
        {answer.ask === "keys" ? (
          <p class="small">Keys have no sign: they say what is alike, not what speaks against.</p>
        ) : (
          <OneSide name="against" side={sides.against} scale={scale} />
        )}
      </div>
    </Section>
  )
}

/** The texts of the samples that are shown, with what each of their words adds. */
function useHighlighted({ sides, layer }: AnswerView): AnswerView["sides"] {
  const { asked, run, source } = usePane()
  const shown = [...sides.for.samples, ...sides.against.samples]
  const textual = shown.some((one) => one.preview?.kind === "text")
  const placed = run.layers.some((one) => one.name === layer && one.places > 1)
  const wanted = asked.ask === "layer" && textual && placed ? "highlights" : null
  const id = shown.map((one) => one.id)
  const { value } = useGet(source, wanted, { ...paramsOf(asked), label: null, id })
  const mark = (side: SideView): SideView => ({
    ...side,
    samples: side.samples.map((one) => ({ ...one, ...value?.samples[String(one.id)] })),
  })
  return { for: mark(sides.for), against: mark(sides.against) }
}

interface Props {
  name: SideName
  side: SideView
  scale: Scale
}

function OneSide({ name, side, scale }: Props) {
  const { go } = useExplorer()
  const { asked, source, which } = usePane()
  const { samples, count: total } = side
  const listed = source.carries("evidence", { ...paramsOf(asked), side: name })
  return (
    <div class={`side ${name}`} data-testid={`side-${name}`}>
      <h3>
        {TITLES[name]}{" "}
        <Amount value={side.sum} scale={new Scale([side.sum])} testid={`sum-${name}`} />
        <span class="small">
          {plural(total, "sample")}
          {asked.label !== null && ` labeled ${asked.label}`}
        </span>
      </h3>
      {samples.length ? (
        <div class="cards">
          {samples.map((evidence) => (
            <Card key={evidence.id} evidence={evidence} scale={scale} />
          ))}
        </div>
      ) : (
        <p class="small">No training sample is on this side.</p>
      )}
      {total > samples.length && listed && (
        <button
          type="button"
          class="quiet"
          onClick={() => go({ all: name, pane: which })}
          data-testid={`all-${name}`}
        >
          Show all {count(total)}
        </button>
      )}
    </div>
  )
}
