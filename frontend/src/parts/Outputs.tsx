import type { Answer } from "../api.ts"
import { usePane } from "../context.ts"
import { Scale } from "../numbers.ts"
import { Amount, Bar } from "./Amount.tsx"

/** What the model or the layer says: its largest outputs, any of which can be asked about. */
export function Outputs({ answer }: { answer: Answer }) {
  const { asked, ask, run } = usePane()
  const scale = new Scale(answer.outputs.map((one) => one.value))
  const last = run.layers.at(-1)?.name
  const named = run.classes && (answer.layer === null || answer.layer === last)
  return (
    <div
      class="outputs"
      role="group"
      aria-label="Which output is asked about"
      data-testid="outputs"
    >
      {answer.outputs.map(({ output, value }) => (
        <button
          type="button"
          key={output}
          class="output"
          aria-pressed={output === (asked.output ?? answer.output)}
          onClick={() => ask({ ...asked, output })}
          data-testid={`output-${output}`}
        >
          <span class="name">
            {output}
            {named &&
              answer.query.label !== null &&
              String(answer.query.label) === String(output) && <span class="tag">label</span>}
          </span>
          <Bar share={scale.share(value)} />
          <Amount value={value} scale={scale} plain />
        </button>
      ))}
    </div>
  )
}
