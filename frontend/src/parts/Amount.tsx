import { MINUS, type Scale } from "../numbers.ts"

interface Props {
  value: number
  scale: Scale
  plain?: boolean
  testid?: string
}

/** A number, rounded to the eye and exact underneath; its sign is written and colored. */
export function Amount({ value, scale, plain = false, testid }: Props) {
  const text = plain ? scale.plain(value) : scale.signed(value)
  const tone = plain ? "" : value > 0 ? "for" : value < 0 ? "against" : ""
  return (
    <data class={`amount ${tone}`} value={String(value)} data-testid={testid}>
      {text}
    </data>
  )
}

/** A number that is not an amount of evidence: a count, a size, an error. */
export function Figure({
  value,
  text,
  testid,
}: {
  value: number | null
  text: string
  testid?: string
}) {
  if (value === null) return <span data-testid={testid}>{text}</span>
  return (
    <data class="figure" value={String(value)} data-testid={testid}>
      {text}
    </data>
  )
}

/** A bar from a middle line to either side, as long as the share (−1 to 1) says. */
export function Bar({ share, both = true }: { share: number; both?: boolean }) {
  const size = Math.min(1, Math.abs(share)) * (both ? 50 : 100)
  const start = both ? (share < 0 ? 50 - size : 50) : 0
  return (
    <span class={`bar ${both ? "both" : ""} ${share < 0 ? "against" : "for"}`} aria-hidden="true">
      <span style={{ left: `${start}%`, width: `${size}%` }} />
    </span>
  )
}

/** What an amount sounds like. */
export function spoken(scale: Scale, value: number): string {
  return scale.signed(value).replace(MINUS, "minus ").replace("+", "plus ")
}
