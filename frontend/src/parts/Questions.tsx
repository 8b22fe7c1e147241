import { type Pane, usePane } from "../context.ts"
import { suits, toAsk, wholly } from "../moves.ts"
import type { AnswerView, QuestionCard } from "../contract.ts"
import { type Asked, paramsOf } from "../state.ts"
import { useUnique } from "../unique.ts"
import { Words } from "./Words.tsx"

const SEEN =
  "A training sample is known as the layers saw it, not as the model was called with it. Give it as a query instead."

const NOT_CARRIED = "This report does not carry it for this query."

/** The four questions; those that cannot be asked of this run say what it would take. */
export function Questions({ answer }: { answer: AnswerView }) {
  const pane = usePane()
  const { asked, ask, run } = pane
  const name = useUnique()
  const chosen = run.questions.find((question) => question.ask === asked.ask)
  const questions = run.questions.map((question) => suited(question, pane, answer))
  return (
    <fieldset class="questions" data-testid="questions">
      <legend class="hidden">What is asked</legend>
      <div class="tabs">
        {questions.map((question) => (
          <label class={question.available ? "" : "disabled"} title={question.why || undefined}>
            <input
              type="radio"
              name={name}
              checked={question.ask === asked.ask}
              disabled={!question.available}
              onChange={() => ask(moved(question, pane, answer))}
              data-testid={`ask-${question.ask}`}
            />
            <span>{question.title}</span>
          </label>
        ))}
      </div>
      {chosen && (
        <p class="meaning" data-testid="meaning">
          {chosen.meaning}
        </p>
      )}
      <Missing questions={questions.filter((question) => !question.available)} />
    </fieldset>
  )
}

/** A question as this query, and what is carried, allow it. */
function suited(question: QuestionCard, pane: Pane, answer: AnswerView): QuestionCard {
  if (!question.available) return question
  if (!suits(pane.asked.query, question.ask)) return { ...question, available: false, why: SEEN }
  const carried = pane.source.carries("answer", paramsOf(moved(question, pane, answer)))
  return carried ? question : { ...question, available: false, why: NOT_CARRIED }
}

/** What is asked then: the same as far as that is carried, or else without restrictions. */
function moved({ ask }: QuestionCard, { asked, source }: Pane, answer: AnswerView): Asked {
  const next = toAsk(asked, ask, answer.shared)
  return source.carries("answer", paramsOf(next)) ? next : wholly(next)
}

/** Why some cannot be asked, each reason once. */
function Missing({ questions }: { questions: QuestionCard[] }) {
  const reasons = [...new Set(questions.map((question) => question.why))]
  return (
    <>
      {reasons.map((why) => {
        const titles = questions.filter((one) => one.why === why).map((one) => `“${one.title}”`)
        return (
          <p class="small why" data-testid="why">
            {titles.join(" and ")} cannot be asked here. <Words text={why} />
          </p>
        )
      })}
    </>
  )
}
