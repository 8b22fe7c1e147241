// One way in and one way out: state is read from a written form and changes by writing a new one.
import { fromHash, type State, toHash } from "./state.ts"

/** Where the written form lives: the URL, or a notebook's model. */
export interface Home {
  read(): string
  write(hash: string, replace: boolean): void
  listen(changed: () => void): () => void
}

export const urlHome: Home = {
  read: () => location.hash,
  write: (hash, replace) => (replace ? location.replace(hash) : location.assign(hash)),
  listen(changed) {
    addEventListener("hashchange", changed)
    return () => removeEventListener("hashchange", changed)
  },
}

export class Route {
  private readonly home: Home
  private readonly listeners = new Set<() => void>()

  constructor(home: Home) {
    this.home = home
  }

  get state(): State {
    return fromHash(this.home.read())
  }

  link(patch: Partial<State>): string {
    return toHash({ ...this.state, ...patch })
  }

  /** Those who listen are told at once: a browser tells of a new # only when it finds the time. */
  go(patch: Partial<State>, replace = false): void {
    this.home.write(this.link(patch), replace)
    for (const changed of this.listeners) changed()
  }

  listen(changed: () => void): () => void {
    this.listeners.add(changed)
    const leave = this.home.listen(changed)
    return () => {
      this.listeners.delete(changed)
      leave()
    }
  }
}
