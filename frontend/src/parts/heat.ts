/** As strong as a background may be for text on it to stay readable, in percent. */
export const UNDER_TEXT = 50
/** Where there is no text. */
export const ALONE = 85

/** A background between nothing and `most` percent of a color: blue for, orange against. */
export function heat(
  value: number,
  largest: number,
  most: number,
): { backgroundColor: string } | undefined {
  if (!largest || !value) return undefined
  const percent = Math.round(most * Math.sqrt(Math.abs(value) / largest))
  const color = value > 0 ? "var(--for)" : "var(--against)"
  return { backgroundColor: `color-mix(in srgb, ${color} ${percent}%, transparent)` }
}
