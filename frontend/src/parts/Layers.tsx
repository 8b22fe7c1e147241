import { useEffect, useRef } from "preact/hooks"
import type { AnswerView, LayerFacts, LayersView } from "../contract.ts"
import { usePane } from "../context.ts"
import { type Loaded, useGet } from "../load.ts"
import { suits, toLayer } from "../moves.ts"
import { nameOf } from "../names.ts"
import { count, Scale } from "../numbers.ts"
import { type Asked, paramsOf } from "../state.ts"
import { Amount, Bar } from "./Amount.tsx"
import { Section } from "./Section.tsx"
import { Waiting } from "./Waiting.tsx"
import { Words } from "./Words.tsx"

/** What each layer's training adds to the output; a click enters a layer. */
export function Layers({ answer }: { answer: AnswerView }) {
  const { asked, ask, run, source } = usePane()
  const whole = run.questions.find((question) => question.ask === "network")
  const last = run.layers.at(-1)?.name
  const ofModel = asked.layer === null || asked.layer === last || asked.ask === "network"
  const place = answer.shared ? answer.place : null
  const params = { query: asked.query, output: ofModel ? asked.output : null, place }
  const asks = whole?.available && suits(asked.query, "network")
  const loaded = useGet(source, asks ? "layers" : null, params)
  const named = (output: number) => nameOf(run, null, output)
  const restricted = asked.span !== null || !!asked.label
  const shares = new Map(loaded.value?.shares.map((share) => [share.layer, share.value]))
  const scale = new Scale(shares.values())
  const inside = asked.ask === "layer" || asked.ask === "keys"
  const current = inside ? (asked.layer ?? last) : null
  const box = useRef<HTMLDivElement>(null)
  useEffect(() => uncover(box.current), [current])
  return (
    <Section
      title="Layers"
      testid="layers"
      twin={asks ? { source, path: "layers", params } : undefined}
    >
      <div class="layers" ref={box} aria-busy={loaded.busy}>
        {run.layers.map((layer) => {
          const { name, inputs, outputs } = layer
          const next = entered(asked, layer, answer)
          return (
            <button
              type="button"
              class="layer"
              aria-pressed={name === current}
              disabled={!source.carries("answer", paramsOf(next))}
              onClick={() => ask(next)}
              data-testid={`layer-${name}`}
            >
              <span class="name">{name}</span>
              <span class="small shape">
                {count(inputs)} → {count(outputs)}
              </span>
              {shares.has(name) && (
                <>
                  <Bar share={scale.share(shares.get(name) ?? 0)} />
                  <Amount value={shares.get(name) ?? 0} scale={scale} />
                </>
              )}
            </button>
          )
        })}
      </div>
      {!run.carried && <Waiting of={loaded} doing="Asking every layer" />}
      <p class="small">
        <Words text={loaded.busy ? "" : explained(loaded, restricted, named)} />
      </p>
    </Section>
  )
}

/** Scrolls a long list, and nothing around it, to the layer that is looked into. */
function uncover(list: HTMLElement | null): void {
  const chosen = list?.querySelector<HTMLElement>('[aria-pressed="true"]')
  if (!list || !chosen) return
  const top = chosen.offsetTop - list.offsetTop
  const below = top + chosen.offsetHeight > list.scrollTop + list.clientHeight
  if (below || top < list.scrollTop) list.scrollTop = top - list.clientHeight / 2
}

function explained(
  { value, failed }: Loaded<LayersView>,
  restricted: boolean,
  named: (output: number) => string,
): string {
  const enter = "Choose a layer to look inside it."
  if (failed !== null) return `${failed} ${enter}`
  if (!value) return enter
  const all = restricted ? ", of all samples and all of training" : ""
  const byStep = value.by_step
    ? ` What belongs to no sample adds ${value.by_step.toPrecision(3)}.`
    : ""
  return `What the training of each layer adds to output ${named(value.output)} of the whole network${all}.${byStep} ${enter}`
}

/** What is asked inside a layer: at the same position, if it has as many. */
function entered(asked: Asked, layer: LayerFacts, answer: AnswerView): Asked {
  const next = toLayer(asked, layer.name)
  return layer.places === answer.places ? { ...next, place: asked.place } : next
}
