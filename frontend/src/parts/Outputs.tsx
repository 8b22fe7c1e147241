import type { AnswerView } from "../contract.ts"
import { usePane } from "../context.ts"
import { nameOf } from "../names.ts"
import { Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { Amount, Bar } from "./Amount.tsx"
import { Words } from "./Words.tsx"

/** What the model or the layer says: its largest outputs, any of which can be asked about. */
export function Outputs({ answer }: { answer: AnswerView }) {
  const { asked, ask, run, source } = usePane()
  const scale = new Scale(answer.outputs.map((one) => one.value))
  const last = run.layers.at(-1)?.name
  const carried = (output: number) => source.carries("answer", paramsOf({ ...asked, output }))
  const missing = answer.outputs.some(({ output }) => !carried(output))
  const ofModel = answer.layer === null || answer.layer === last
  const label = answer.query.label === null ? null : String(answer.query.label)
  const called = (output: number) => (run.classes ? String(output) : run.names[output])
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
          disabled={!carried(output)}
          title={`Output ${output}`}
          onClick={() => ask({ ...asked, output })}
          data-testid={`output-${output}`}
        >
          <span class="name">
            {nameOf(run, answer.layer, output)}
            {ofModel && label === called(output) && <span class="tag">label</span>}
          </span>
          <Bar share={scale.share(value)} />
          <Amount value={value} scale={scale} plain />
        </button>
      ))}
      {missing && (
        <p class="small" data-testid="outputs-missing">
          <Words text="This report carries the evidence of some outputs. `dualform view` on the run shows it of all." />
        </p>
      )}
    </div>
  )
}
