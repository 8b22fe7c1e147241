import { usePane } from "../context.ts"
import { suits, toAsk } from "../moves.ts"
import type { Question } from "../api.ts"
import { useUnique } from "../unique.ts"

const SEEN =
  "A training sample is known as the layers saw it, not as the model was called with it. Give it as a query instead."

/** The four questions; those that cannot be asked of this run say what it would take. */
export function Questions() {
  const { asked, ask, run } = usePane()
  const name = useUnique()
  const chosen = run.questions.find((question) => question.ask === asked.ask)
  const questions = run.questions.map((question) => suited(question, asked.query))
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
              onChange={() => ask(toAsk(asked, question.ask))}
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

/** A question as this query allows it. */
function suited(question: Question, query: string): Question {
  if (!question.available || suits(query, question.ask)) return question
  return { ...question, available: false, why: SEEN }
}

/** Why some cannot be asked, each reason once. */
function Missing({ questions }: { questions: Question[] }) {
  const reasons = [...new Set(questions.map((question) => question.why))]
  return (
    <>
      {reasons.map((why) => {
        const titles = questions.filter((one) => one.why === why).map((one) => `“${one.title}”`)
        return (
          <p class="small why" data-testid="why">
            {titles.join(" and ")} cannot be asked here. {why}
          </p>
        )
      })}
    </>
  )
}
