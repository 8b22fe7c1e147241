import type { EvidenceCard } from "../contract.ts"
import { useExplorer, usePane } from "../context.ts"
import { tick } from "../moves.ts"
import type { Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { brief, sampleName } from "../words.ts"
import { Amount, Bar } from "./Amount.tsx"
import { Highlighted } from "./Picture.tsx"

/** Labels of more letters have a line of their own, above the box and the amount. */
const BESIDE = 3

interface Props {
  evidence: EvidenceCard
  scale: Scale
  /** Its place in a long list. */
  row?: boolean
}

/** A training sample as evidence; opened, it shows where and when it acts. */
export function Card({ evidence, scale, row = false }: Props) {
  const { go } = useExplorer()
  const { asked, source, which } = usePane()
  const { id, label, value, preview } = evidence
  const name = sampleName(id, label)
  return (
    <article
      class={`card ${preview?.kind ?? "none"} ${row ? "row" : ""}`}
      data-testid={`card-${id}`}
    >
      <button
        type="button"
        class="open"
        disabled={!source.carries("acts", { ...paramsOf(asked), id })}
        onClick={() => go({ acting: String(id), pane: which })}
      >
        {!row && preview && <span class="hidden">Sample {String(id)}: </span>}
        {row || preview ? (
          <Highlighted evidence={evidence} />
        ) : (
          <span class="picture text" title={String(id)}>
            Sample {brief(id)}
          </span>
        )}
        <span class="caption">
          {row && (
            <span class="name" title={String(id)}>
              Sample {brief(id)}
            </span>
          )}
          {label !== null && (
            <span
              class={String(label).length > BESIDE ? "label long" : "label"}
              title={String(label)}
            >
              {String(label)}
            </span>
          )}
          <Amount value={value} scale={scale} />
        </span>
        <Bar share={scale.share(value)} both={false} />
        <span class="hidden">. Show where and when it acts.</span>
      </button>
      <Tick id={String(id)} name={name} />
    </article>
  )
}

/** Puts a sample among those whose contributions are taken away. */
export function Tick({ id, name }: { id: string; name: string }) {
  const { state, go } = useExplorer()
  return (
    <label class="tick" title={`Subtract ${name}`}>
      <input
        type="checkbox"
        checked={state.ticked.includes(id)}
        onChange={() => go({ ticked: tick(state.ticked, id) }, true)}
        aria-label={`Subtract ${name}`}
        data-testid={`tick-${id}`}
      />
    </label>
  )
}
