import type { AnswerView } from "../contract.ts"
import { usePane } from "../context.ts"
import { paramsOf } from "../state.ts"
import { spanName } from "../words.ts"
import { Section } from "./Section.tsx"
import { Timeline } from "./Timeline.tsx"

/** When in training the output was learned and unlearned, with the brush that restricts everything. */
export function When({ answer }: { answer: AnswerView }) {
  const { asked, ask, run, source } = usePane()
  const { span } = asked
  const brushed = source.carries("answer", paramsOf({ ...asked, span: span ?? [0, 0] }))
  return (
    <Section title="When" testid="when" twin={{ source, path: "answer", params: paramsOf(asked) }}>
      {answer.timeline ? (
        <>
          <Timeline
            values={answer.timeline}
            bins={run.bins}
            label="What was learned and unlearned"
            span={span}
            onSpan={brushed ? (next) => ask({ ...asked, span: next }) : undefined}
            testid="timeline"
          />
          <p class="small">
            {span ? `Only ${spanName(run.bins, span)}. ` : "Up is learned, down is unlearned. "}
            {span ? (
              <button
                type="button"
                class="quiet"
                onClick={() => ask({ ...asked, span: null })}
                data-testid="whole-span"
              >
                All of training
              </button>
            ) : (
              brushed && "Drag over a span to see only what was learned in it."
            )}
          </p>
        </>
      ) : (
        <p class="small">This question has no time: it is about the end of training.</p>
      )}
    </Section>
  )
}
