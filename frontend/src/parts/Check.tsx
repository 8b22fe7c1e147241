import type { ComponentChildren } from "preact"
import type { AnswerView, SideName } from "../contract.ts"
import { MINUS, percent, Scale, tiny } from "../numbers.ts"
import { plural } from "../words.ts"
import { Amount, Bar, Figure } from "./Amount.tsx"

/** The sum that an answer must be: initial + evidence (+ by step) + remainder = output, with its error. */
export function Check({ answer }: { answer: AnswerView }) {
  const { check, sides, attributed: share } = answer
  return (
    <div class="check" data-testid="check">
      {check ? <Sum answer={answer} check={check} /> : <Sides sides={sides} unit={answer.unit} />}
      {check && share !== null && share < 1 && <Attributed check={check} share={share} />}
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

type Terms = NonNullable<AnswerView["check"]>

function scaleOf({ initial, evidence, total }: Terms): Scale {
  return new Scale([initial, evidence, total])
}

function Sum({ answer, check }: { answer: AnswerView; check: Terms }) {
  const scale = scaleOf(check)
  const count = answer.sides.for.count + answer.sides.against.count
  const terms: [string, string, number][] = [
    ["initial", "before training", check.initial],
    ["evidence", `evidence of ${plural(count, "sample")}`, check.evidence],
    ...(check.by_step
      ? [["by-step", "of no sample", check.by_step] as [string, string, number]]
      : []),
    ["remainder", "remainder", check.remainder],
  ]
  return (
    <dl class="sum">
      {terms.map(([name, words, value], i) => (
        <Part key={name} words={words} operator={i > 0 && (value < 0 ? MINUS : "+")}>
          <Term
            value={value}
            scale={scale}
            name={name}
            tone={toneOf(name, value)}
            alone={i === 0}
          />
        </Part>
      ))}
      <Part words={answer.asked} operator="=" kind="total">
        <Amount value={check.total} scale={scale} plain testid="check-total" />
      </Part>
    </dl>
  )
}

/** How much of what training changed is attributed to samples, and how much to none of them. */
function Attributed({ check, share }: { check: Terms; share: number }) {
  const scale = scaleOf(check)
  return (
    <p class="attributed" data-testid="attributed">
      Of what training changed here,{" "}
      <Figure value={share} text={percent(share)} testid="attributed-share" /> is attributed to
      samples ({scale.signed(check.evidence)}) and {percent(1 - share)} belongs to no sample (
      {scale.signed(check.by_step)}): what summaries or rounded rows leave out, or what was kept by
      step.
      <Bar share={share} both={false} />
    </p>
  )
}

/** Only evidence is for or against. */
function toneOf(name: string, value: number): SideName | "" {
  return name !== "evidence" ? "" : value < 0 ? "against" : "for"
}

/** Where nothing has to add up there are still the two sides, and what is left of them. */
function Sides({ sides, unit }: { sides: AnswerView["sides"]; unit: string }) {
  const { for: left, against: right } = sides
  const scale = new Scale([left.sum, right.sum])
  if (right.count === 0)
    return (
      <dl class="sum">
        <Part words={`${plural(left.count, "sample")}, in ${unit}`}>
          <Amount value={left.sum} scale={scale} plain />
        </Part>
      </dl>
    )
  return (
    <dl class="sum">
      <Part words={`${plural(left.count, "sample")} for`}>
        <Term value={left.sum} scale={scale} tone="for" name="for" alone />
      </Part>
      <Part words={`${plural(right.count, "sample")} against`} operator={MINUS}>
        <Term value={right.sum} scale={scale} tone="against" name="against" />
      </Part>
      <Part words={`in ${unit}`} operator="=">
        <Amount value={left.sum + right.sum} scale={scale} testid="check-sides" />
      </Part>
    </dl>
  )
}

interface PartProps {
  words: string
  operator?: string | false
  kind?: string
  children: ComponentChildren
}

function Part({ words, operator, kind = "", children }: PartProps) {
  return (
    <div class={`term ${kind}`}>
      <dt>{words}</dt>
      <dd>
        {operator && <span class="operator">{operator}</span>}
        {children}
      </dd>
    </div>
  )
}

interface TermProps {
  value: number
  scale: Scale
  name: string
  tone?: SideName | ""
  /** The first of a sum carries its own sign; the others' is the operator before them. */
  alone?: boolean
}

function Term({ value, scale, name, tone = "", alone = false }: TermProps) {
  return (
    <data class={`amount ${tone}`} value={String(value)} data-testid={`check-${name}`}>
      {scale.plain(alone ? value : Math.abs(value))}
    </data>
  )
}
