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

  constructor(home: Home) {
    this.home = home
  }

  get state(): State {
    return fromHash(this.home.read())
  }

  link(patch: Partial<State>): string {
    return toHash({ ...this.state, ...patch })
  }

  go(patch: Partial<State>, replace = false): void {
    this.home.write(this.link(patch), replace)
  }

  listen(changed: (state: State) => void): () => void {
    return this.home.listen(() => changed(this.state))
  }
}
