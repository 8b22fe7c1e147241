import { usePane } from "../context.ts"
import { suits, toAsk } from "../moves.ts"
import { useUnique } from "../unique.ts"

const SEEN =
  "a training sample is known as the layers saw it, not as the model was called with it. Give it as a query instead."

/** The four questions; those that cannot be asked of this run say what it would take. */
export function Questions() {
  const { asked, ask, run } = usePane()
  const name = useUnique()
  const chosen = run.questions.find((question) => question.ask === asked.ask)
  const questions = run.questions.map((question) =>
    suits(asked.query, question.ask) ? question : { ...question, available: false, why: SEEN },
  )
  const missing = questions.filter((question) => !question.available)
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
      {missing.map((question) => (
        <p class="small" data-testid={`why-${question.ask}`}>
          <b>{question.title}</b> cannot be asked here: {question.why}
        </p>
      ))}
    </fieldset>
  )
}
