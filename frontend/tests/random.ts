/** Numbers that look random and are the same each time (a linear congruence). */
export function random(seed: number) {
  let state = seed
  const next = () => {
    state = (1664525 * state + 1013904223) % 2 ** 32
    return state / 2 ** 32
  }
  return {
    next,
    below: (end: number) => Math.floor(next() * end),
    of: <T>(all: readonly T[]): T => all[Math.floor(next() * all.length)] as T,
  }
}
