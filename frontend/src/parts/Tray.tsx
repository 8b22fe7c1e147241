import { useState } from "preact/hooks"
import type { QuestionCard, SubtractView } from "../contract.ts"
import { useExplorer, usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { nameOf } from "../names.ts"
import { Scale } from "../numbers.ts"
import { plural } from "../words.ts"
import { Amount, Bar } from "./Amount.tsx"
import { Waiting } from "./Waiting.tsx"

/** The ticked samples, and the prediction without their contributions. */
export function Tray() {
  const { state, go } = useExplorer()
  const { asked, source, run } = usePane()
  const { query, ask, layer, output } = asked
  const wanted = query && state.ticked.length ? "subtract" : null
  const [estimated, setEstimated] = useState(false)
  const estimate = estimated || ask === "removed" ? 1 : null
  const params = { query, ask, layer, output, id: state.ticked, estimate }
  const loaded = useGet(source, wanted, params)
  const named = (of: number) => nameOf(run, ask === "layer" || ask === "keys" ? layer : null, of)
  if (!wanted) return null
  const link = source.link("subtract", params)
  return (
    <aside class="tray" aria-label="Subtracting" data-testid="tray">
      <div class="inside">
        <p class="headline">
          Without {plural(state.ticked.length, "ticked sample")}
          {loaded.value && <Change subtraction={loaded.value} named={named} />}
        </p>
        <Waiting of={loaded} doing="Taking the ticked samples away" />
        {loaded.value && <Kind subtraction={loaded.value} />}
        {loaded.value && loaded.value.after.length > 1 && (
          <Others subtraction={loaded.value} named={named} />
        )}
        <p class="links">
          {loaded.value?.asked.retrained === null && run.questions.some(canEstimate) && (
            <button
              type="button"
              class="quiet"
              onClick={() => setEstimated(true)}
              data-testid="estimate"
            >
              Estimate retraining
            </button>
          )}
          <button
            type="button"
            class="quiet"
            onClick={() => go({ ticked: [] })}
            data-testid="untick"
          >
            Untick all
          </button>
          {link && (
            <a
              class="twin"
              href={link}
              target="_blank"
              rel="noreferrer"
              aria-label="Subtraction as JSON"
            >
              JSON
            </a>
          )}
        </p>
      </div>
    </aside>
  )
}

/** Estimates take a while on large runs, so they are asked for. */
function canEstimate({ ask, available }: QuestionCard): boolean {
  return ask === "removed" && available
}

type Named = { subtraction: SubtractView; named: (output: number) => string }

function Change({ subtraction, named }: Named) {
  const { output, before, after, retrained } = subtraction.asked
  const scale = new Scale([before, after, retrained ?? 0], 4)
  return (
    <span role="status">
      : output {named(output)} goes from{" "}
      <Amount plain value={before} scale={scale} testid="before" /> to{" "}
      <Amount plain value={after} scale={scale} testid="after" />
      {retrained !== null && (
        <>
          ; by an estimate, training without them would give about{" "}
          <Amount plain value={retrained} scale={scale} testid="retrained" />
        </>
      )}
      .
    </span>
  )
}

/** Whether the numbers are an account or an estimate. */
function Kind({ subtraction }: { subtraction: SubtractView }) {
  const { retrained, estimate } = subtraction.asked
  return (
    <p class="small" data-testid="kind">
      {subtraction.note}
      {retrained !== null && ` ${estimate}`}
    </p>
  )
}

function Others({ subtraction, named }: Named) {
  const { before, after } = subtraction
  const scale = new Scale([...before, ...after].map((one) => one.value))
  return (
    <details>
      <summary>All outputs</summary>
      <table class="sums">
        <thead>
          <tr>
            <th scope="col">Output</th>
            <th scope="col">Before</th>
            <th scope="col" aria-label="Bar" />
            <th scope="col">Without</th>
          </tr>
        </thead>
        <tbody>
          {before.map(({ output, value }, i) => (
            <tr>
              <th scope="row">{named(output)}</th>
              <td>
                <Amount plain value={value} scale={scale} />
              </td>
              <td class="wide">
                <Bar share={scale.share(after[i]?.value ?? 0)} />
              </td>
              <td>
                <Amount
                  plain
                  value={after[i]?.value ?? 0}
                  scale={scale}
                  testid={`after-${output}`}
                />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  )
}
