import type { Answer } from "../api.ts"
import { MINUS, Scale, tiny } from "../numbers.ts"
import { plural } from "../words.ts"
import { Amount, Figure } from "./Amount.tsx"

/** The sum that an answer must be: initial + evidence (+ by step) + remainder = output, with its error. */
export function Check({ answer }: { answer: Answer }) {
  const { check, sides } = answer
  return (
    <div class="check" data-testid="check">
      {check ? <Sum answer={answer} check={check} /> : <Sides sides={sides} unit={answer.unit} />}
      <p class="small">
        {answer.note}
        {answer.error !== null && (
          <>
            {" "}
            The sum misses the output by{" "}
            <Figure value={answer.error} text={tiny(answer.error)} testid="check-error" />,
            relatively.
          </>
        )}
      </p>
    </div>
  )
}

type Terms = NonNullable<Answer["check"]>

function Sum({ answer, check }: { answer: Answer; check: Terms }) {
  const scale = new Scale([check.initial, check.evidence, check.total])
  const count = answer.sides.for.count + answer.sides.against.count
  const terms: [string, string, number][] = [
    ["initial", "before training", check.initial],
    ["evidence", `evidence of ${plural(count, "sample")}`, check.evidence],
    ...(check.by_step
      ? [["by-step", "booked by step", check.by_step] as [string, string, number]]
      : []),
    ["remainder", "remainder", check.remainder],
  ]
  return (
    <dl class="sum">
      {terms.map(([name, words, value], i) => (
        <div class={`term ${name}`}>
          <dt>{words}</dt>
          <dd>
            {i > 0 && <span class="operator">{value < 0 ? MINUS : "+"}</span>}
            <Term value={value} scale={scale} name={name} alone={i === 0} />
          </dd>
        </div>
      ))}
      <div class="term total">
        <dt>{answer.asked}</dt>
        <dd>
          <span class="operator">=</span>
          <Amount value={check.total} scale={scale} plain testid="check-total" />
        </dd>
      </div>
    </dl>
  )
}

interface TermProps {
  value: number
  scale: Scale
  name: string
  /** The first of a sum carries its own sign; the others' is the operator before them. */
  alone: boolean
}

function Term({ value, scale, name, alone }: TermProps) {
  const tone = name !== "evidence" ? "" : value < 0 ? "against" : "for"
  return (
    <data class={`amount ${tone}`} value={String(value)} data-testid={`check-${name}`}>
      {scale.plain(alone ? value : Math.abs(value))}
    </data>
  )
}

/** Where nothing has to add up there are still the two sides. */
function Sides({ sides, unit }: { sides: Answer["sides"]; unit: string }) {
  const scale = new Scale([sides.for.sum, sides.against.sum])
  return (
    <dl class="sum">
      <div class="term">
        <dt>{plural(sides.for.count, "sample")} for</dt>
        <dd>
          <Amount value={sides.for.sum} scale={scale} />
        </dd>
      </div>
      {sides.against.count > 0 && (
        <div class="term">
          <dt>{plural(sides.against.count, "sample")} against</dt>
          <dd>
            <Amount value={sides.against.sum} scale={scale} />
          </dd>
        </div>
      )}
      <div class="term">
        <dt>in</dt>
        <dd class="unit">{unit}</dd>
      </div>
    </dl>
  )
}
