// Numbers as a page shows them: signed, alike in one place.

export const MINUS = "\u2212"

/** Writes numbers with the decimals that give the largest of them so many digits. */
export class Scale {
  readonly largest: number
  private readonly decimals: number
  private readonly digits: number
  private readonly plainly: boolean

  constructor(values: Iterable<number>, digits = 3) {
    let largest = 0
    for (const value of values) if (Math.abs(value) > largest) largest = Math.abs(value)
    const exponent = largest ? Math.floor(Math.log10(largest)) : 0
    this.largest = largest
    this.digits = digits
    this.decimals = Math.min(100, Math.max(0, digits - 1 - exponent))
    this.plainly = -4 < exponent && exponent < 7
  }

  signed(value: number): string {
    return value > 0 ? `+${this.write(value)}` : this.plain(value)
  }

  plain(value: number): string {
    return value < 0 ? MINUS + this.write(-value) : this.write(value)
  }

  /** From −1 to 1, for the length of a bar. */
  share(value: number): number {
    return this.largest ? value / this.largest : 0
  }

  private write(size: number): string {
    const vanishes = size !== 0 && size < 0.5 * 10 ** -this.decimals
    if (vanishes) return oneDigit(size)
    return this.plainly ? thousands(size.toFixed(this.decimals)) : power(size, this.digits - 1)
  }
}

/** What other decimals would round to zero: 0.06, and powers of ten from 8e−5 down. */
function oneDigit(size: number): string {
  const rounded = power(size, 0)
  const decimals = Math.max(0, -Math.floor(Math.log10(Number(size.toExponential(0)))))
  return decimals > 4 ? rounded : size.toFixed(decimals)
}

/** 1234567 → 1,234,567. */
export function count(value: number): string {
  return thousands(String(Math.round(value)))
}

/** A relative error: 3.2e−7, 0, or that it was not measured. */
export function tiny(value: number | null): string {
  if (value === null) return "not measured"
  return value === 0 ? "0" : power(value, 1)
}

/** A share in percent: 63.4 %. Only all of it is 100 %, and only nothing is 0 %. */
export function percent(share: number | null): string {
  if (share === null) return "not measured"
  if (share <= 0 || share >= 1) return share <= 0 ? "0 %" : "100 %"
  return `${Math.min(99.9, Math.max(0.1, +(100 * share).toFixed(1)))} %`
}

/** 1,234,567 bytes → 1.2 MB. */
export function bytes(value: number): string {
  const units = ["bytes", "kB", "MB", "GB", "TB"]
  let unit = 0
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000
    unit += 1
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`
}

function power(size: number, decimals: number): string {
  const [digits = "0", exponent = "0"] = size.toExponential(decimals).split("e")
  return `${digits}e${exponent.replace("-", MINUS).replace("+", "")}`
}

function thousands(text: string): string {
  const [whole = "", part] = text.split(".")
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",")
  return part === undefined ? grouped : `${grouped}.${part}`
}
