import type { AnswerView } from "../contract.ts"
import { usePane } from "../context.ts"
import { nameOf } from "../names.ts"
import { paramsOf } from "../state.ts"
import { Stage } from "./Stage.tsx"

/** The query itself; where it has positions, each can be asked about alone. */
export function QueryFigure({ answer }: { answer: AnswerView }) {
  const { asked, ask, run, source } = usePane()
  const { preview, title } = answer.query
  const layer = run.layers.find((one) => one.name === answer.layer)
  return (
    <Stage
      preview={preview}
      name={title}
      amounts={answer.marks}
      chosen={asked.place ?? answer.place}
      onChoose={(place) => ask({ ...asked, place })}
      offers={(place) => source.carries("answer", paramsOf({ ...asked, place }))}
      label="Positions of the query: choose the one that is asked about"
      tokens={answer.tokens}
      grid={layer?.grid}
      testid="query-places"
    />
  )
}

export function Verdict({ answer }: { answer: AnswerView }) {
  const { run } = usePane()
  const { label, predicted, right } = answer.query
  return (
    <p class="verdict" data-testid="verdict">
      {predicted !== null && <>Predicted {nameOf(run, null, predicted)}. </>}
      {label !== null && <>Labeled {String(label)}. </>}
      {right !== null && (
        <span class={right ? "right" : "wrong"}>{right ? "✓ right" : "✗ wrong"}</span>
      )}
    </p>
  )
}
